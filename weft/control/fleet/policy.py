"""Policies: choose the instance for a group of sequences with one prompt. Pure except for the policy's
memory."""

from __future__ import annotations

import abc
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from weft.common.recent import Recent
from weft.control.fleet.instances import PROMPT_TOKENS, Instance
from weft.kv.hashing import prompt_hashes
from weft.types.media_item import MediaItem

DEFAULT_BLOCK = 64
"""Tokens of a block for an instance without a reported block size."""
MOST_BLOCKS = 65536
"""Blocks remembered per instance for affinity."""

MOST_SESSIONS = 65536
"""Number of sessions with a remembered instance."""
HOME_LOAD = 1.0
"""Extra load that a session accepts to stay at its instance, in running sequences.

A guess: the policy does not see the prefix that the session's turns share beyond this prompt.
"""
MOVED_TOKENS = 16 * PROMPT_TOKENS
"""Prompt tokens, still to be transferred, that weigh as much as one running sequence.

A guess: the transfer of a token's cache costs far less than computing the token.
"""

PromptHashes: TypeAlias = Mapping[int, Sequence[bytes]]
"""Block size -> hashes of a prompt's full blocks, in the form of the instances' prefix caches."""
Hashes: TypeAlias = Callable[[int], Sequence[bytes]]
"""Function from a block size to the hashes of a prompt's full blocks, computed on demand."""


class Decisions:
    """Counts of choices among several instances, by the knowledge of cached prefixes."""

    def __init__(self) -> None:
        self.exact = 0
        """Every instance had reported cached prefixes."""
        self.degraded = 0
        """Some instances had reported, some not."""
        self.fallback = 0
        """No instance had reported."""

    def count(self, instances: Sequence[Instance]) -> None:
        """Count one choice among ``instances``, as exact, degraded or fallback."""
        knows = sum(instance.prefixes.known for instance in instances)
        if knows == len(instances):
            self.exact += 1
        elif knows:
            self.degraded += 1
        else:
            self.fallback += 1


class Policy(abc.ABC):
    """Chooses among serving instances. At least one instance is always given."""

    knows_prefixes = False
    """True if the policy needs reports of cached prefixes."""

    def __init__(self) -> None:
        self.decisions = Decisions()

    @abc.abstractmethod
    def choose(self, instances: Sequence[Instance], hashes: Hashes, session: str = "") -> Instance:
        """Return the chosen instance.

        ``hashes`` are the block hashes of the prompt. ``session`` is the session of the request, "" if
        unknown.
        """

    def observe(self, instance: Instance, idle: bool) -> None:  # noqa: B027, most need not know
        """Take note of a report of ``instance``: of cached prefixes or, with ``idle``, of no work left."""


class RoundRobin(Policy):
    """Round robin, in the order of instances."""

    def __init__(self) -> None:
        super().__init__()
        self._last = -1

    def choose(self, instances: Sequence[Instance], hashes: Hashes, session: str = "") -> Instance:
        chosen = min(instances, key=lambda one: (one.order <= self._last, one.order))
        self._last = chosen.order
        return chosen


class LeastLoad(Policy):
    """The least loaded instance; of equal loads the one chosen least often, then the first in order."""

    def choose(self, instances: Sequence[Instance], hashes: Hashes, session: str = "") -> Instance:
        return min(instances, key=lambda instance: (instance.load, instance.chosen, instance.order))


class TwoChoices(Policy):
    """The less loaded of two random instances.

    Several API servers with old loads then do not all choose the same instance.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._least = LeastLoad()

    def choose(self, instances: Sequence[Instance], hashes: Hashes, session: str = "") -> Instance:
        return self._least.choose(self._random.sample(instances, min(2, len(instances))), hashes)


class PrefixAffinity(Policy):
    """The least loaded instance, after a discount for prompt tokens probably in its prefix cache.

    So a conversation stays at its instance, unless the wait there costs more than the cache saves. The known
    content of a cache is the report of the instance (``PrefixView``), plus the prompts sent to the same
    process and not computed yet. Without reports, all prompts sent to the process count.

    A session stays at its instance, unless another instance has more of the prompt, or has a load lower by
    more than ``HOME_LOAD``.
    """

    knows_prefixes = True

    def __init__(self, tokens: float = PROMPT_TOKENS) -> None:
        """Create the policy. ``tokens`` uncached prompt tokens weigh as much as one running sequence."""
        super().__init__()
        self._tokens = tokens
        self._known: dict[str, tuple[int, Recent[bytes, bool]]] = {}
        """Instance -> (incarnation, hashes of blocks sent to the incarnation)."""
        self._homes: Recent[str, tuple[str, int]] = Recent(MOST_SESSIONS)
        """Session -> (instance of the last turn, incarnation of the instance)."""

    def choose(self, instances: Sequence[Instance], hashes: Hashes, session: str = "") -> Instance:
        """Return the instance of lowest load after the discount, or the session's instance.

        Remember the choice: the session's home, and the prompt's blocks as sent there.
        """
        if len(instances) == 1:  # no choice, so skip the hashing of many long prompts
            self._settle(session, instances[0])
            return instances[0]
        self.decisions.count(instances)
        has = {one.name: self._has(one, hashes) for one in instances}
        # Each cached token saves 1 / `tokens` of the load of a running sequence.
        cost = {one.name: one.load - has[one.name] / self._tokens for one in instances}
        chosen = min(instances, key=lambda one: (cost[one.name], one.chosen, one.order))
        # A session's instance wins over the cheapest instance if it is near enough in cost and has as much
        # cached.
        home = self._homes.get(session) if session else None
        for one in instances:
            near = cost[one.name] - cost[chosen.name] <= HOME_LOAD and has[one.name] >= has[chosen.name]
            if (one.name, one.incarnation) == home and near:
                chosen = one
        self._settle(session, chosen)
        self._remember(chosen, hashes(block_of(chosen)))
        return chosen

    def _settle(self, session: str, instance: Instance) -> None:
        if session:
            self._homes.put(session, (instance.name, instance.incarnation))

    def _has(self, instance: Instance, hashes: Hashes) -> int:
        """Return the number of prompt tokens probably cached at ``instance``."""
        incarnation, known = self._known.get(instance.name, (0, None))
        if incarnation != instance.incarnation:
            known = None
        return _cached(instance, hashes, known)

    def _remember(self, instance: Instance, hashes: Sequence[bytes]) -> None:
        """Note the block ``hashes`` as sent to the present process of ``instance``."""
        incarnation, known = self._known.get(instance.name, (0, None))
        if known is None or incarnation != instance.incarnation:  # the cache of a new process is empty
            known = Recent(MOST_BLOCKS)
            self._known[instance.name] = (instance.incarnation, known)
        # Last block first, so a prefix is evicted after all continuations.
        for block_hash in reversed(hashes):
            known.put(block_hash, True)

    def observe(self, instance: Instance, idle: bool) -> None:
        """Forget blocks with no more chance to enter the reported cache.

        An idle instance without open sequences has computed every block sent there, so the report is
        complete. With open sequences blocks may still come: an idle engine does not count blocked sequences,
        and does not know of sequences on their way. Reported removals are forgotten in any case.
        """
        incarnation, known = self._known.get(instance.name, (0, None))
        if known is None or incarnation != instance.incarnation or not instance.prefixes.known:
            return
        # Everything sent to an idle instance is either in the reported index or will not come.
        if idle and not instance.open:
            known.clear()
        for key in instance.prefixes.removed:
            known.discard(key)


def _cached(instance: Instance, hashes: Hashes, sent: Collection[bytes] | None) -> int:
    """Return the number of prompt tokens probably cached. ``sent`` holds the hashes of blocks sent to the
    process."""
    block = block_of(instance)
    view = instance.prefixes
    each = max(view.positions // block, 1)
    # Reports have one key per `positions` tokens, which may span several blocks.
    blocks = hashes(block)
    hit = 0
    for number in range(each - 1, len(blocks), each):
        key = blocks[number]
        if key not in view and (sent is None or key not in sent):
            break
        hit = number + 1
    return hit * block


class Policies(NamedTuple):
    """The two choices of a route, each with a memory of its own."""

    compute: Policy
    """The choice of the instance for a prompt."""
    decode: Policy
    """The choice of the decode instance for a prompt computed elsewhere."""

    @property
    def knows_prefixes(self) -> bool:
        """True if either policy needs reports of cached prefixes."""
        return any(policy.knows_prefixes for policy in self)

    @property
    def decisions(self) -> dict[str, int]:
        """Number of exact, degraded and fallback choices of both policies (``Decisions``)."""
        each = [policy.decisions for policy in self]
        names = ("exact", "degraded", "fallback")
        return {name: sum(getattr(one, name) for one in each) for name in names}


RoutingPolicy: TypeAlias = Literal["prefix", "least-load", "round-robin", "two-choices"]


def make_policies(name: RoutingPolicy = "prefix", seed: int | None = None) -> Policies:
    """Return the policies for ``name``. Equal call sequences give equal choices; ``seed`` None means 0."""
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
    """Return the block size of the instance's prefix cache in tokens; ``DEFAULT_BLOCK`` if unknown."""
    return (instance.welcome.block_size if instance.welcome is not None else 0) or DEFAULT_BLOCK


def hashes_of(
    prompt: bytes,
    salt: str,
    known: PromptHashes | None = None,
    media: tuple[MediaItem, ...] = (),
    adapter: str = "",
    weights: bytes = b"",
) -> Hashes:
    """Return the lazy block hashes of ``prompt`` (int32 ids as bytes) with the images ``media``.

    ``known`` holds hashes computed earlier. Each block size is hashed at most once.
    """
    made = dict(known or {})

    def hashes(block: int) -> Sequence[bytes]:
        if block not in made:
            made[block] = prompt_hashes(prompt, salt, block, media, adapter, weights)
        return made[block]

    return hashes
