"""Numbers sorted into buckets, as histograms of metrics have them."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BYTES = (2.0**16, 2.0**18, 2.0**20, 2.0**22, 2.0**24, 2.0**26, 2.0**28, 2.0**30, 2.0**32)


class Measures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many numbers fell between each two bounds, and their sum. Nothing of what was not measured yet."""

    counts: tuple[int, ...] = ()
    """One for each bound, numbers up to it and above the one before; and one for those above all."""
    total: float = 0.0

    def add(self, bounds: tuple[float, ...], value: float) -> Measures:
        """With one more."""
        counts = list(self.counts) or [0] * (len(bounds) + 1)
        counts[bisect_left(bounds, value)] += 1
        return Measures(counts=tuple(counts), total=self.total + value)

    def __add__(self, other: Measures) -> Measures:
        """Of both, whose bounds are equal."""
        one, two = self.counts, other.counts
        counts = tuple(map(sum, zip(one, two, strict=True))) if one and two else one or two
        return Measures(counts=counts, total=self.total + other.total)

    def cumulative(self, bounds: tuple[float, ...]) -> list[tuple[str, float]]:
        """(bound, numbers up to it), as Prometheus has them."""
        counts = self.counts if len(self.counts) == len(bounds) + 1 else (0,) * (len(bounds) + 1)
        found, below = list[tuple[str, float]](), 0
        for bound, count in zip((*bounds, float("inf")), counts, strict=True):
            below += count
            found.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(below)))
        return found
