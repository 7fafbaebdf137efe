"""Sequences in FCFS order: sorted by (priority, arrival), whatever order they come in."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from weft.common.errors import EngineDead
from weft.scheduler.sequence import Sequence

_key = attrgetter("key")


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
