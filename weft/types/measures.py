"""Counts of numbers by bucket, as in histogram metrics."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BYTES = (2.0**16, 2.0**18, 2.0**20, 2.0**22, 2.0**24, 2.0**26, 2.0**28, 2.0**30, 2.0**32)


class Measures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counts of numbers between bounds, and the sum. Empty before the first number."""

    counts: tuple[int, ...] = ()
    """One count for each bound (numbers up to the bound and above the bound before), and one for larger
    numbers.
    """
    total: float = 0.0

    def add(self, bounds: tuple[float, ...], value: float) -> Measures:
        """Return the measures with ``value`` added. ``bounds`` must be the same in every call."""
        counts = list(self.counts) or [0] * (len(bounds) + 1)
        counts[bisect_left(bounds, value)] += 1
        return Measures(counts=tuple(counts), total=self.total + value)

    def __add__(self, other: Measures) -> Measures:
        """Return the sum of two measures with equal bounds."""
        one, two = self.counts, other.counts
        counts = tuple(map(sum, zip(one, two, strict=True))) if one and two else one or two
        return Measures(counts=counts, total=self.total + other.total)

    def cumulative(self, bounds: tuple[float, ...]) -> list[tuple[str, float]]:
        """Return (bound, count of numbers up to the bound) for each bound and +Inf, as Prometheus expects."""
        counts = self.counts if len(self.counts) == len(bounds) + 1 else (0,) * (len(bounds) + 1)
        found, below = list[tuple[str, float]](), 0
        for bound, count in zip((*bounds, float("inf")), counts, strict=True):
            below += count
            found.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(below)))
        return found
