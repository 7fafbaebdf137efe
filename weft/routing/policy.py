"""Policies: which instance gets a group of sequences that share a prompt. Pure but for their own memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from weft.common.recent import Recent
from weft.kv.hashing import prompt_hashes
from weft.routing.instances import PROMPT_TOKENS, Instance

DEFAULT_BLOCK = 64
"""Tokens of a block of an instance that does not say."""
MOST_BLOCKS = 65536
"""Blocks that an affinity remembers of one instance."""

MOVED_TOKENS = 16 * PROMPT_TOKENS
"""Tokens of a prompt still to be moved that weigh as much as a running sequence. A guess: to move a token's
cache costs far less than to compute it.
"""

PromptHashes: TypeAlias = Mapping[int, Sequence[bytes]]
"""Block size -> the hashes of a prompt's full blocks, as the prefix caches of instances name them."""
Hashes: TypeAlias = Callable[[int], Sequence[bytes]]
"""The same, computed when asked for."""


class Policy(Protocol):
    """Chooses among instances that take sequences; there is at least one."""

    def choose(self, instances: Sequence[Instance], hashes: Hashes) -> Instance:
        """``hashes``: of the prompt."""


class RoundRobin:
    """One after the other, in order."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, instances: Sequence[Instance], hashes: Hashes) -> Instance:
        chosen = min(instances, key=lambda one: (one.order <= self._last, one.order))
        self._last = chosen.order
        return chosen


class LeastLoad:
    """The least loaded; of equals the one chosen least often, then the first."""

    def choose(self, instances: Sequence[Instance], hashes: Hashes) -> Instance:
        return min(instances, key=lambda instance: (instance.load, instance.chosen, instance.order))


class TwoChoices:
    """The less loaded of two random ones: fronts that know old loads do not all choose the same one."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._least = LeastLoad()

    def choose(self, instances: Sequence[Instance], hashes: Hashes) -> Instance:
        return self._least.choose(self._random.sample(instances, min(2, len(instances))), hashes)


class PrefixAffinity:
    """The least loaded, where prompt tokens that an instance has probably in its cache count as no load.

    So a conversation goes on where it was, unless that costs more in waiting than it saves. What an instance
    has is what was sent to the same process of it: heads do not report what they keep.
    """

    def __init__(self, tokens: float = PROMPT_TOKENS) -> None:
        """``tokens``: of a prompt, that weigh as much as a running sequence if they are not cached."""
        self._tokens = tokens
        self._known: dict[str, tuple[int, Recent[bytes, bool]]] = {}
        """Instance -> the incarnation that it is about, and hashes."""

    def choose(self, instances: Sequence[Instance], hashes: Hashes) -> Instance:
        if len(instances) == 1:  # many long prompts take long to hash, and there is nothing to choose
            return instances[0]
        cost = {instance.name: self._cost(instance, hashes) for instance in instances}
        chosen = min(instances, key=lambda one: (cost[one.name], one.chosen, one.order))
        self._remember(chosen, hashes(block_of(chosen)))
        return chosen

    def _cost(self, instance: Instance, hashes: Hashes) -> float:
        incarnation, known = self._known.get(instance.name, (0, None))
        if not known or incarnation != instance.incarnation:
            return instance.load
        block = block_of(instance)
        hit = 0
        for block_hash in hashes(block):
            if block_hash not in known:
                break
            hit += 1
        return instance.load - hit * block / self._tokens

    def _remember(self, instance: Instance, hashes: Sequence[bytes]) -> None:
        incarnation, known = self._known.get(instance.name, (0, None))
        if known is None or incarnation != instance.incarnation:  # its cache began empty
            known = Recent(MOST_BLOCKS)
            self._known[instance.name] = (instance.incarnation, known)
        for block_hash in reversed(hashes):  # so that a prefix outlives what follows it
            known.put(block_hash, True)


class Policies(NamedTuple):
    """The two choices that there are: each has a memory of its own."""

    compute: Policy
    """Where a prompt is computed."""
    decode: Policy
    """Where a sequence goes on whose prompt is computed elsewhere."""


RoutingPolicy: TypeAlias = Literal["prefix", "least-load", "round-robin", "two-choices"]


def make_policies(name: RoutingPolicy = "prefix", seed: int | None = None) -> Policies:
    """The policies of that name. The same calls in the same order choose the same instances."""
    seed = seed or 0
    match name:
        case "prefix":
            return Policies(PrefixAffinity(), PrefixAffinity(MOVED_TOKENS))
        case "least-load":
            return Policies(LeastLoad(), LeastLoad())
        case "round-robin":
            return Policies(RoundRobin(), RoundRobin())
        case "two-choices":
            return Policies(TwoChoices(seed), TwoChoices(seed + 1))


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
