"""Leases on a sender's window, laid out as a ring of bytes. Pure bookkeeping.

No call blocks. ``take`` returns None if there is no space; the caller tries again after the end of a lease.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from weft.common.errors import EngineDead
from weft.types.transfer import TransferKey


class MemoryLease(NamedTuple):
    """``size`` bytes from ``offset`` on, leased to one owner until ``give_back``."""

    number: int
    offset: int
    size: int
    owner: TransferKey


class Ring:
    """Ring of bytes, leased in order. Bytes become free in the order of leasing, whatever the order of
    ``give_back``.

        |....tail######head....|      # leased, or given back behind one that is not

    A lease never wraps around. The bytes left at the end of the ring are skipped, and count as part of the
    first lease after the wrap.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._leases: dict[int, MemoryLease] = {}
        self._number = 0
        # (number, bytes including the skipped bytes before the lease)
        self._order: deque[tuple[int, int]] = deque()
        self._head = 0
        self.used = 0
        """Bytes in use, skipped bytes included."""

    def of(self, owner: TransferKey) -> list[MemoryLease]:
        """Return the leases of a transfer, in the order of leasing."""
        return [lease for lease in self._leases.values() if lease.owner == owner]

    @property
    def count(self) -> int:
        return len(self._leases)

    def take(self, size: int, owner: TransferKey) -> MemoryLease | None:
        """Reserve ``size`` bytes for ``owner``. Return the lease, or None while there is no space. Raises
        EngineDead for a size beyond the ring."""
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
        """End a lease. Raises EngineDead for an inactive lease."""
        if self._leases.pop(lease.number, None) != lease:
            raise EngineDead("a lease was given back that does not run")
        while self._order and self._order[0][0] not in self._leases:
            self.used -= self._order.popleft()[1]
