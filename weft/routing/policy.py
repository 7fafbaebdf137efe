"""Policies: which instance gets a group of sequences that share a prompt. Pure but for their own memory."""

from __future__ import annotations

import abc
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from weft.common.recent import Recent
from weft.kv.hashing import prompt_hashes
from weft.routing.instances import PROMPT_TOKENS, Instance
from weft.types.media import MediaItem

DEFAULT_BLOCK = 64
"""Tokens of a block of an instance that does not say."""
MOST_BLOCKS = 65536
"""Blocks that an affinity remembers of one instance."""

MOST_SESSIONS = 65536
"""Sessions whose instance is remembered."""
HOME_LOAD = 1.0
"""Load, as of one running sequence, that a session waits for rather than go elsewhere. A guess: what its
turns share beside this prompt's prefix is not seen here."""
MOVED_TOKENS = 16 * PROMPT_TOKENS
"""Tokens of a prompt still to be moved that weigh as much as a running sequence. A guess: to move a token's
cache costs far less than to compute it.
"""

PromptHashes: TypeAlias = Mapping[int, Sequence[bytes]]
"""Block size -> the hashes of a prompt's full blocks, as the prefix caches of instances name them."""
Hashes: TypeAlias = Callable[[int], Sequence[bytes]]
"""The same, computed when asked for."""


class Decisions:
    """How much was known when an instance was chosen among several by what they have cached."""

    def __init__(self) -> None:
        self.exact = 0
        """All had told what they have cached."""
        self.degraded = 0
        """Some had not."""
        self.fallback = 0
        """None had."""

    def count(self, instances: Sequence[Instance]) -> None:
        """One more decision."""
        knows = sum(instance.prefixes.known for instance in instances)
        if knows == len(instances):
            self.exact += 1
        elif knows:
            self.degraded += 1
        else:
            self.fallback += 1


class Policy(abc.ABC):
    """Chooses among instances that take sequences; there is at least one."""

    knows_prefixes = False
    """Whether it asks what instances have cached."""

    def __init__(self) -> None:
        self.decisions = Decisions()

    @abc.abstractmethod
    def choose(self, instances: Sequence[Instance], hashes: Hashes, session: str = "") -> Instance:
        """``hashes``: of the prompt. ``session``: that it is a turn of, if it is known."""

    def told(self, instance: Instance, idle: bool) -> None:  # noqa: B027, most need not know
        """``instance`` has told what it has cached, or (``idle``) that it has nothing to compute."""


class RoundRobin(Policy):
    """One after the other, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._last = -1

    def choose(self, instances: Sequence[Instance], hashes: Hashes, session: str = "") -> Instance:
        chosen = min(instances, key=lambda one: (one.order <= self._last, one.order))
        self._last = chosen.order
        return chosen


class LeastLoad(Policy):
    """The least loaded; of equals the one chosen least often, then the first."""

    def choose(self, instances: Sequence[Instance], hashes: Hashes, session: str = "") -> Instance:
        return min(instances, key=lambda instance: (instance.load, instance.chosen, instance.order))


class TwoChoices(Policy):
    """The less loaded of two random ones: fronts that know old loads do not all choose the same one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._least = LeastLoad()

    def choose(self, instances: Sequence[Instance], hashes: Hashes, session: str = "") -> Instance:
        return self._least.choose(self._random.sample(instances, min(2, len(instances))), hashes)


class PrefixAffinity(Policy):
    """The least loaded, where prompt tokens that an instance has probably in its cache count as no load.

    So a conversation goes on where it was, unless that costs more in waiting than it saves. What an instance
    has is what it tells (``PrefixView``), and what was sent to the same process of it and is not computed
    yet; where it tells nothing, all that was sent there.

    A session goes on at the same instance, unless another one has more of the prompt, or is less loaded by
    more than ``HOME_LOAD``.
    """

    knows_prefixes = True

    def __init__(self, tokens: float = PROMPT_TOKENS) -> None:
        """``tokens``: of a prompt, that weigh as much as a running sequence if they are not cached."""
        super().__init__()
        self._tokens = tokens
        self._known: dict[str, tuple[int, Recent[bytes, bool]]] = {}
        """Instance -> the incarnation that it is about, and hashes."""
        self._homes: Recent[str, tuple[str, int]] = Recent(MOST_SESSIONS)
        """Session -> the instance of its last turn, and its incarnation."""

    def choose(self, instances: Sequence[Instance], hashes: Hashes, session: str = "") -> Instance:
        if len(instances) == 1:  # many long prompts take long to hash, and there is nothing to choose
            self._settle(session, instances[0])
            return instances[0]
        self.decisions.count(instances)
        has = {one.name: self._has(one, hashes) for one in instances}
        cost = {one.name: one.load - has[one.name] / self._tokens for one in instances}
        chosen = min(instances, key=lambda one: (cost[one.name], one.chosen, one.order))
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
        """Tokens of a prompt that it has probably cached."""
        incarnation, known = self._known.get(instance.name, (0, None))
        if incarnation != instance.incarnation:
            known = None
        return _cached(instance, hashes, known)

    def _remember(self, instance: Instance, hashes: Sequence[bytes]) -> None:
        incarnation, known = self._known.get(instance.name, (0, None))
        if known is None or incarnation != instance.incarnation:  # its cache began empty
            known = Recent(MOST_BLOCKS)
            self._known[instance.name] = (instance.incarnation, known)
        for block_hash in reversed(hashes):  # so that a prefix outlives what follows it
            known.put(block_hash, True)

    def told(self, instance: Instance, idle: bool) -> None:
        """What was sent there and is not in its cache when it has nothing to compute will not come. While
        sequences are open it still may: an idle head does not count those that await something, and does not
        know of those on their way."""
        incarnation, known = self._known.get(instance.name, (0, None))
        if known is None or incarnation != instance.incarnation or not instance.prefixes.known:
            return
        if idle and not instance.open:
            known.clear()
        for key in instance.prefixes.removed:
            known.discard(key)


def _cached(instance: Instance, hashes: Hashes, sent: Collection[bytes] | None) -> int:
    """Tokens of a prompt that ``instance`` has probably cached; ``sent``: blocks of what was sent there."""
    block = block_of(instance)
    view = instance.prefixes
    each = max(view.positions // block, 1)
    blocks = hashes(block)
    hit = 0
    for number in range(each - 1, len(blocks), each):
        key = blocks[number]
        if key not in view and (sent is None or key not in sent):
            break
        hit = number + 1
    return hit * block


class Policies(NamedTuple):
    """The two choices that there are: each has a memory of its own."""

    compute: Policy
    """Where a prompt is computed."""
    decode: Policy
    """Where a sequence goes on whose prompt is computed elsewhere."""

    @property
    def knows_prefixes(self) -> bool:
        """Whether any asks what instances have cached."""
        return any(policy.knows_prefixes for policy in self)

    @property
    def decisions(self) -> dict[str, int]:
        """How many were exact, degraded and fallback (``Decisions``)."""
        each = [policy.decisions for policy in self]
        names = ("exact", "degraded", "fallback")
        return {name: sum(getattr(one, name) for one in each) for name in names}


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


def hashes_of(
    prompt: bytes, salt: str, known: PromptHashes | None = None, media: tuple[MediaItem, ...] = ()
) -> Hashes:
    """Block hashes of ``prompt`` (int32 ids) with the images ``media``. ``known``: those that were made
    already.
    """
    made = dict(known or {})

    def hashes(block: int) -> Sequence[bytes]:
        if block not in made:
            made[block] = prompt_hashes(prompt, salt, block, media)
        return made[block]

    return hashes
