"""Leases on a sender's window, as on a ring of bytes. Pure bookkeeping.

Nothing waits. Where there is no room, ``take`` gives None, and the caller comes back when a lease has ended.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from weft.common.errors import EngineDead
from weft.types.rooms import RoomKey


class MemoryLease(NamedTuple):
    """``size`` bytes from ``offset`` on, of one owner, until they are given back."""

    number: int
    offset: int
    size: int
    owner: RoomKey


class Ring:
    """Memory that is taken in turn. It is free again in the same order, whatever the order of giving back.

        |....tail######head....|      # leased, or given back behind one that is not

    A lease never wraps around: what is left at the end is skipped with the lease that did not fit there.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._leases: dict[int, MemoryLease] = {}
        self._number = 0
        self._order: deque[tuple[int, int]] = deque()  # (number, bytes with what was skipped before them)
        self._head = 0
        self.used = 0
        """Bytes, skipped ones included."""

    def of(self, owner: RoomKey) -> list[MemoryLease]:
        """The leases of a room, in the order in which they were taken."""
        return [lease for lease in self._leases.values() if lease.owner == owner]

    @property
    def count(self) -> int:
        return len(self._leases)

    def take(self, size: int, owner: RoomKey) -> MemoryLease | None:
        """A lease, or None while there is no room. Raises EngineDead for what can never fit."""
        if not 0 < size <= self.size:
            raise EngineDead(f"a lease of {size} bytes of a ring of {self.size}")
        if not self._order:
            self._head = 0
        wraps = self._head + size > self.size
        skipped = self.size - self._head if wraps else 0
        if self.used + skipped + size > self.size:
            return None
        offset = 0 if wraps else self._head
        self._head = offset + size
        self.used += skipped + size
        self._number += 1
        lease = self._leases[self._number] = MemoryLease(self._number, offset, size, owner)
        self._order.append((lease.number, skipped + size))
        return lease

    def give_back(self, lease: MemoryLease) -> None:
        """Ends a lease. Raises EngineDead when it does not run."""
        if self._leases.pop(lease.number, None) != lease:
            raise EngineDead("a lease was given back that does not run")
        while self._order and self._order[0][0] not in self._leases:
            self.used -= self._order.popleft()[1]
