"""The scheduling order: by key (priority, queue position, arrival), independent of insertion order.

A smaller priority number comes first. The priority decides about slots and about preemption. Starvation
guard: after ``PASSES`` admissions from other priorities, a waiting priority gets the next slot. Batches
(``BATCH_PRIORITY``) have no such guard, and wait for slots that nobody else wants.

The queue position of a sequence is the number of earlier client requests plus the index within the sequence's
own client request. If every client request has one sequence, the order is first come, first served. In a
large client request, sequence j comes after the first sequence of each of the next j client requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from weft.common.errors import EngineDead
from weft.scheduler.sequence import OwnerShare, Sequence
from weft.types.priority import BATCH_PRIORITY

PASSES = 64
"""Number of admissions from other priorities after which a waiting priority gets the next slot."""

_key = attrgetter("key")
_place = attrgetter("place")


@dataclass(slots=True)
class _Level:
    """A priority with waiting sequences."""

    since: int
    """Value of the admission counter when the level last got a slot, or when the level began to wait."""
    waiting: int = 0


class SequenceQueue:
    """A list of sequences sorted by key. Keys are unique because arrivals are unique."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Insert ``sequence`` by key."""
        insort(self._items, sequence, key=_key)

    def remove(self, sequence: Sequence) -> None:
        """Remove ``sequence``. Raises EngineDead if the sequence is not in the queue."""
        place = bisect_left(self._items, sequence.key, key=_key)
        if place == len(self._items) or self._items[place] is not sequence:
            raise EngineDead("a sequence was taken from a queue that does not hold it")
        del self._items[place]

    def first(self) -> Sequence:
        return self._items[0]

    def snapshot(self) -> list[Sequence]:
        """Return a copy of the sequences in order; the queue may change during iteration over the copy."""
        return self._items.copy()

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._items)

    def __len__(self) -> int:
        return len(self._items)


class FairQueue:
    """Waiting sequences, and counts of running sequences, by fair share (client request and priority).

    Within the first waiting priority, the share with the fewest running sequences is first. Ties go to the
    share whose first sequence has the smaller key. A share with an invited sequence precedes all others of
    its priority. No priority below ``BATCH_PRIORITY`` starves: the level passed over for longest is first
    after ``PASSES`` admissions.
    A sequence belongs to a share from ``enter`` to ``leave``; ``start`` and ``stop`` mark running sequences.
    Each operation costs one or two insertions into sorted lists.
    """

    def __init__(self) -> None:
        self._shares: dict[tuple[int, int], OwnerShare] = {}
        self._order: list[OwnerShare] = []
        """Shares with waiting sequences, by place. Places are unique because arrivals are unique."""
        self._length = 0
        self._levels: dict[int, _Level] = {}
        """Levels with waiting sequences, by priority; the dict order is the order of ``since``."""
        self._started = 0
        """Total number of admissions."""
        self._arrived = 0
        self.large = 0
        """Number of shares with two or more running sequences."""

    def enter(self, sequence: Sequence) -> None:
        """Register a new live sequence: assign the share and the queue position."""
        priority, _, arrival = sequence.key
        share = self._shares.get((priority, sequence.owner))
        if share is None:
            share = self._shares[priority, sequence.owner] = OwnerShare(priority, self._arrived)
            self._arrived += 1
        sequence.share = share
        sequence.key = (priority, share.number + share.arrived, arrival)
        share.arrived += 1
        share.live += 1

    def leave(self, sequence: Sequence) -> None:
        """Unregister an ended sequence, which must neither wait nor run. Raises EngineDead for an unknown
        sequence."""
        share = self._share(sequence)
        sequence.share = None
        share.live -= 1
        if not share.live:
            del self._shares[share.priority, sequence.owner]

    def add(self, sequence: Sequence) -> None:
        """Add a registered ``sequence`` to the waiting sequences. Raises EngineDead without ``enter``
        before."""
        share = self._lift(sequence)
        insort(share.waiting, sequence, key=_key)
        self._length += 1
        self._levels.setdefault(share.priority, _Level(self._started)).waiting += 1
        self._put(share)

    def remove(self, sequence: Sequence) -> None:
        """Remove ``sequence`` from the waiting sequences. Raises EngineDead if the sequence does not wait."""
        share = self._lift(sequence)
        self._take(share, sequence)
        self._put(share)

    def start(self, sequence: Sequence) -> None:
        """Move ``sequence`` from waiting to running. Raises EngineDead if the sequence does not wait."""
        share = self._lift(sequence)
        self._take(share, sequence)
        share.running += 1
        self.large += share.running == 2
        self._started += 1
        # Re-insert at the end: the dict stays ordered by ``since``.
        if (level := self._levels.pop(share.priority, None)) is not None:
            level.since = self._started
            self._levels[share.priority] = level
        self._put(share)

    def stop(self, sequence: Sequence) -> None:
        """Count ``sequence`` as no longer running."""
        share = self._lift(sequence)
        self.large -= share.running == 2
        share.running -= 1
        self._put(share)

    def invite(self, sequence: Sequence) -> None:
        """Put the waiting ``sequence`` first within the priority until admission: a running sequence gives up
        a slot."""
        share = self._lift(sequence)
        share.invited = sequence
        self._put(share)

    def first(self) -> Sequence:
        """Return the next sequence to admit, and change nothing. At least one sequence must wait."""
        share = self._order[0]
        # The level with the longest wait comes first in the dict.
        for priority, level in self._levels.items():
            if priority < BATCH_PRIORITY:
                if priority > share.priority and self._started - level.since >= PASSES:
                    share = self._order[bisect_left(self._order, (priority,), key=_place)]
                break
        return share.invited or share.waiting[0]

    def __iter__(self) -> Iterator[Sequence]:
        for share in self._order:
            yield from share.waiting

    def __len__(self) -> int:
        return self._length

    def _share(self, sequence: Sequence) -> OwnerShare:
        if sequence.share is None:
            raise EngineDead("the share of an unknown sequence was requested")
        return sequence.share

    def _lift(self, sequence: Sequence) -> OwnerShare:
        """Remove the share of ``sequence`` from the order before a change. Return the share; ``_put`` inserts
        the share again."""
        share = self._share(sequence)
        if share.waiting:
            del self._order[bisect_left(self._order, share.place, key=_place)]
        return share

    def _put(self, share: OwnerShare) -> None:
        """Insert a share into the order, at the new place, if sequences of the share wait."""
        if share.waiting:
            _, position, arrival = share.waiting[0].key
            running = share.running if share.invited is None else -1
            share.place = (share.priority, running, position, arrival)
            insort(self._order, share, key=_place)

    def _take(self, share: OwnerShare, sequence: Sequence) -> None:
        """Remove a waiting sequence from the share and from the level. Raises EngineDead if the sequence does
        not wait."""
        at = bisect_left(share.waiting, sequence.key, key=_key)
        if at == len(share.waiting) or share.waiting[at] is not sequence:
            raise EngineDead("a sequence was taken from a queue that does not hold it")
        del share.waiting[at]
        self._length -= 1
        level = self._levels[share.priority]
        level.waiting -= 1
        if not level.waiting:
            del self._levels[share.priority]
        if share.invited is sequence:
            share.invited = None
