"""Policies: which instance gets a group of sequences that share a prompt. Pure but for their own memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

from weft.common.recent import Recent
from weft.routing.registry import PROMPT_TOKENS, Instance

CHUNK = 64
"""Tokens whose hash an affinity remembers as one."""
MOST_CHUNKS = 65536
"""Chunks that an affinity remembers of one instance."""


class Policy(Protocol):
    """Chooses among instances that are up; there is at least one."""

    def choose(self, instances: Sequence[Instance], prompt: bytes, salt: str, count: int) -> Instance:
        """``prompt``: int32 ids, little-endian; ``count``: sequences that will share it."""


class LeastLoad:
    """The least loaded; of equals the one chosen least often, then the first."""

    def choose(self, instances: Sequence[Instance], prompt: bytes, salt: str, count: int) -> Instance:
        return min(instances, key=lambda instance: (instance.load, instance.chosen, instance.number))


class PrefixAffinity:
    """The least loaded, where prompt tokens that an instance has probably in its cache count as no load.

    So a conversation goes on where it was, unless that costs more in waiting than it saves in computing.
    """

    def __init__(self) -> None:
        self._known: dict[int, Recent[bytes, bool]] = {}

    def choose(self, instances: Sequence[Instance], prompt: bytes, salt: str, count: int) -> Instance:
        if len(instances) == 1:  # many long prompts take long to hash, and there is nothing to choose
            return instances[0]
        chunks = chain(prompt, salt)
        cost = {instance.number: self._cost(instance, chunks) for instance in instances}
        made = min(instances, key=lambda one: (cost[one.number], one.chosen, one.number))
        self._remember(made.number, chunks)
        return made

    def forget(self, number: int) -> None:
        """Instance ``number`` starts with an empty cache."""
        self._known.pop(number, None)

    def _cost(self, instance: Instance, chunks: list[bytes]) -> float:
        known = self._known.get(instance.number)
        hit = 0
        while known is not None and hit < len(chunks) and chunks[hit] in known:
            hit += 1
        return instance.load - hit * CHUNK / PROMPT_TOKENS

    def _remember(self, number: int, chunks: list[bytes]) -> None:
        known = self._known.setdefault(number, Recent(MOST_CHUNKS))
        for chunk in reversed(chunks):  # so that a prefix outlives what follows it
            known.put(chunk, True)


def chain(prompt: bytes, salt: str) -> list[bytes]:
    """The hash of each full chunk of ``prompt`` (int32 ids) together with all before it."""
    size, made = 4 * CHUNK, []
    last = hashlib.blake2b(salt.encode(), digest_size=16).digest()
    for begin in range(0, len(prompt) - size + 1, size):
        last = hashlib.blake2b(last + prompt[begin : begin + size], digest_size=16).digest()
        made.append(last)
    return made
