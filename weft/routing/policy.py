"""Policies: which instance gets a group of sequences that share a prompt. Pure but for their own memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from weft.common.recent import Recent
from weft.kv.hashing import prompt_hashes
from weft.routing.instances import PROMPT_TOKENS, Instance

DEFAULT_BLOCK = 64
"""Tokens of a block of an instance that does not say."""
MOST_BLOCKS = 65536
"""Blocks that an affinity remembers of one instance."""

PromptHashes: TypeAlias = Mapping[int, Sequence[bytes]]
"""Block size -> the hashes of a prompt's full blocks, as the prefix caches of instances name them."""
Hashes: TypeAlias = Callable[[int], Sequence[bytes]]
"""The same, computed when asked for."""


class Policy(Protocol):
    """Chooses among instances that take sequences; there is at least one."""

    def choose(self, instances: Sequence[Instance], hashes: Hashes) -> Instance:
        """``hashes``: of the prompt."""

    def forget(self, name: str) -> None:
        """Instance ``name`` starts with an empty cache."""


class LeastLoad:
    """The least loaded; of equals the one chosen least often, then the first."""

    def choose(self, instances: Sequence[Instance], hashes: Hashes) -> Instance:
        return min(instances, key=lambda instance: (instance.load, instance.chosen, instance.order))

    def forget(self, name: str) -> None: ...


class PrefixAffinity:
    """The least loaded, where prompt tokens that an instance has probably in its cache count as no load.

    So a conversation goes on where it was, unless that costs more in waiting than it saves in computing.
    """

    def __init__(self) -> None:
        self._known: dict[str, Recent[bytes, bool]] = {}

    def choose(self, instances: Sequence[Instance], hashes: Hashes) -> Instance:
        if len(instances) == 1:  # many long prompts take long to hash, and there is nothing to choose
            return instances[0]
        cost = {instance.name: self._cost(instance, hashes) for instance in instances}
        chosen = min(instances, key=lambda one: (cost[one.name], one.chosen, one.order))
        self._remember(chosen.name, hashes(block_of(chosen)))
        return chosen

    def forget(self, name: str) -> None:
        self._known.pop(name, None)

    def _cost(self, instance: Instance, hashes: Hashes) -> float:
        known = self._known.get(instance.name)
        if not known:
            return instance.load
        block = block_of(instance)
        hit = 0
        for block_hash in hashes(block):
            if block_hash not in known:
                break
            hit += 1
        return instance.load - hit * block / PROMPT_TOKENS

    def _remember(self, name: str, hashes: Sequence[bytes]) -> None:
        known = self._known.setdefault(name, Recent(MOST_BLOCKS))
        for block_hash in reversed(hashes):  # so that a prefix outlives what follows it
            known.put(block_hash, True)


def block_of(instance: Instance) -> int:
    """Tokens of a block of its prefix cache."""
    return (instance.welcome.block_size if instance.welcome is not None else 0) or DEFAULT_BLOCK


def hashes_of(prompt: bytes, salt: str, known: PromptHashes | None = None) -> Hashes:
    """Of ``prompt`` (int32 ids). ``known``: those that were made already."""
    made = dict(known or {})

    def hashes(block: int) -> Sequence[bytes]:
        if block not in made:
            made[block] = prompt_hashes(prompt, salt, block)
        return made[block]

    return hashes
