"""Counts of transfers by transport, as part of the counters of an engine process."""

from __future__ import annotations

from collections import Counter

import msgspec


class TransportCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Number of completed transfers by transport, sorted by the name of the transport."""

    counts: tuple[tuple[str, int], ...] = ()

    def add(self, transport: str) -> TransportCounts:
        """Return the counts with one more transfer over ``transport``."""
        return self + TransportCounts(((transport, 1),))

    def __add__(self, other: TransportCounts) -> TransportCounts:
        """Return the sum of both counts."""
        summed = Counter(dict(self.counts))
        summed.update(dict(other.counts))
        return TransportCounts(tuple(sorted(summed.items())))
