"""The order of sequences: by key (priority, turn, arrival), whatever order they come in; and the next one.

A smaller priority comes first. It decides who gets a slot, and who loses it where blocks are short; but of
``PASSES`` sequences that get a slot one is of another priority than the first, if such wait.

The turn of a sequence is the number of client requests that came before its own, plus its place among the
sequences of its own. Where every client asks for one sequence that is first come, first served; of a large
request the j-th sequence comes after the first one of each of the next j requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from weft.common.errors import EngineDead
from weft.scheduler.sequence import OwnerShare, Sequence

PASSES = 64
"""Sequences of other priorities that may get a slot, one after another, before one that waits does."""

_key = attrgetter("key")
_place = attrgetter("place")


@dataclass(slots=True)
class _Level:
    """A priority of which sequences wait."""

    since: int
    """How many sequences had got a slot when one of these last did, or when they began to wait."""
    waiting: int = 0


class SequenceQueue:
    """A sorted list of sequences. Keys are unique (arrival is)."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Puts ``sequence`` in its place."""
        insort(self._items, sequence, key=_key)

    def remove(self, sequence: Sequence) -> None:
        """Takes ``sequence`` out. Raises EngineDead when it is not there."""
        place = bisect_left(self._items, sequence.key, key=_key)
        if place == len(self._items) or self._items[place] is not sequence:
            raise EngineDead("a sequence was taken from a queue that does not hold it")
        del self._items[place]

    def first(self) -> Sequence:
        return self._items[0]

    def snapshot(self) -> list[Sequence]:
        """The sequences in order, safe to walk while the queue changes."""
        return self._items.copy()

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._items)

    def __len__(self) -> int:
        return len(self._items)


class FairQueue:
    """Waiting sequences, and how many run, by the shares of client requests.

    Of the highest priority that waits, the share that runs fewest sequences is first; of equals the one whose
    first sequence has the smaller key. Before all of them are sequences for which a slot is given up. No
    priority waits for ever: that which was passed by for longest is first after ``PASSES``. A sequence is in
    a share from ``enter`` to ``leave``; ``start`` and ``stop`` tell when it runs. Each is one or two
    insertions into sorted lists.
    """

    def __init__(self) -> None:
        self._shares: dict[tuple[int, int], OwnerShare] = {}
        self._order: list[OwnerShare] = []
        """Those with waiting sequences, by place. Places are unique (arrival is)."""
        self._length = 0
        self._levels: dict[int, _Level] = {}
        """By priority, those with waiting sequences, in the order of ``since``."""
        self._started = 0
        """Sequences that ever got a slot."""
        self._arrived = 0
        self.large = 0
        """Shares that run two sequences or more."""

    def enter(self, sequence: Sequence) -> None:
        """``sequence`` is live from now on: gives it its share and its turn."""
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
        """``sequence`` has ended. It neither waits nor runs."""
        share = self._share(sequence)
        sequence.share = None
        share.live -= 1
        if not share.live:
            del self._shares[share.priority, sequence.owner]

    def add(self, sequence: Sequence) -> None:
        """``sequence`` waits, in its place."""
        share = self._lift(sequence)
        insort(share.waiting, sequence, key=_key)
        self._length += 1
        self._levels.setdefault(share.priority, _Level(self._started)).waiting += 1
        self._put(share)

    def remove(self, sequence: Sequence) -> None:
        """``sequence`` no longer waits. Raises EngineDead when it did not."""
        share = self._lift(sequence)
        self._take(share, sequence)
        self._put(share)

    def start(self, sequence: Sequence) -> None:
        """``sequence``, which waited, runs. Raises EngineDead when it did not wait."""
        share = self._lift(sequence)
        self._take(share, sequence)
        share.running += 1
        self.large += share.running == 2
        self._started += 1
        if (level := self._levels.pop(share.priority, None)) is not None:
            level.since = self._started
            self._levels[share.priority] = level
        self._put(share)

    def stop(self, sequence: Sequence) -> None:
        """``sequence`` no longer runs."""
        share = self._lift(sequence)
        self.large -= share.running == 2
        share.running -= 1
        self._put(share)

    def invite(self, sequence: Sequence) -> None:
        """Puts the waiting ``sequence`` first until it runs: another one gives up its slot for it."""
        share = self._lift(sequence)
        share.invited = sequence
        self._put(share)

    def first(self) -> Sequence:
        share = self._order[0]
        priority, level = next(iter(self._levels.items()))
        if priority > share.priority and self._started - level.since >= PASSES:
            share = self._order[bisect_left(self._order, (priority,), key=_place)]
        return share.invited or share.waiting[0]

    def __iter__(self) -> Iterator[Sequence]:
        for share in self._order:
            yield from share.waiting

    def __len__(self) -> int:
        return self._length

    def _share(self, sequence: Sequence) -> OwnerShare:
        if sequence.share is None:
            raise EngineDead("a sequence was asked for its share that is not live")
        return sequence.share

    def _lift(self, sequence: Sequence) -> OwnerShare:
        """The share of ``sequence``, taken out of the order if it is there: what it has may change."""
        share = self._share(sequence)
        if share.waiting:
            del self._order[bisect_left(self._order, share.place, key=_place)]
        return share

    def _put(self, share: OwnerShare) -> None:
        if share.waiting:
            _, turn, arrival = share.waiting[0].key
            running = share.running if share.invited is None else -1
            share.place = (share.priority, running, turn, arrival)
            insort(self._order, share, key=_place)

    def _take(self, share: OwnerShare, sequence: Sequence) -> None:
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
