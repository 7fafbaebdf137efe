"""Record of received bytes of a transfer at one rank: each expected byte exactly once, and no other byte."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.common.errors import WeftError


class BadSpans(WeftError):
    """Spans outside the transfer's memory, or received twice."""

    code, blame = "bad_spans", "peer"


class Coverage:
    """Expected and received spans of one rank. ``expected``: region -> int64 [n, 2], see
    ``spans.arriving``."""

    def __init__(self, expected: Mapping[int, np.ndarray]) -> None:
        """``expected``: region -> int64 [n, 2], ascending; offset and length in bytes of each span."""
        self._expected = {region: spans for region, spans in expected.items() if len(spans)}
        self._received: dict[int, list[np.ndarray]] = {region: [] for region in self._expected}
        self.nbytes = sum(int(spans[:, 1].sum()) for spans in self._expected.values())
        """Number of expected bytes."""
        self.received_bytes = 0

    def check(self, region: int, spans: np.ndarray) -> None:
        """Raise BadSpans unless all ``spans``, int64 [n, 2], lie in the expected spans of ``region``.

        Call before a byte is written.
        """
        expected = self._expected.get(region)
        if expected is None:
            raise BadSpans(f"the transfer has no bytes for region {region}")
        offsets, lengths = spans[:, 0], spans[:, 1]
        if len(spans) and (lengths.min() < 1 or lengths.max() > self.nbytes or offsets.min() < 0):
            raise BadSpans("a span has an invalid length or offset")
        # [n]: the last expected span that starts at or before each offset.
        at = np.searchsorted(expected[:, 0], offsets, side="right") - 1
        if (at < 0).any() or (offsets > expected[at].sum(axis=1) - lengths).any():
            raise BadSpans(f"a span lies outside the transfer in region {region}")

    def add(self, region: int, spans: np.ndarray) -> None:
        """Record checked ``spans`` as written, with correct digests."""
        self._received[region].append(spans)
        self.received_bytes += int(spans[:, 1].sum())

    def complete(self) -> bool:
        """Return True if every expected byte was received. Raises BadSpans if enough bytes were received,
        but some of them twice."""
        if self.received_bytes < self.nbytes:
            return False
        for region, expected in self._expected.items():
            # The number of bytes is right. If spans overlap, some bytes came twice and others are missing.
            received = np.concatenate(self._received[region]) if self._received[region] else expected[:0]
            order = np.argsort(received[:, 0], kind="stable")
            begins, ends = received[order, 0], received[order].sum(axis=1)
            if (begins[1:] < ends[:-1]).any() or ends.sum() - begins.sum() != expected[:, 1].sum():
                raise BadSpans(f"bytes of region {region} arrived twice")
        return True


class Positions:
    """Set of positions of a sequence, as disjoint half-open ranges in ascending order."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Add positions ``begin`` .. end - 1. Return the ranges that are new to the set."""
        new, at = list[tuple[int, int]](), begin
        # The sentinel (end, end) closes the gap after the last known range.
        for known, until in [*self._ranges, (end, end)]:
            if at < min(known, end):
                new.append((at, min(known, end)))
            at = max(at, until)
        joined = list[tuple[int, int]]()
        for low, high in sorted([*self._ranges, *new]):
            if joined and joined[-1][1] == low:
                joined[-1] = joined[-1][0], high
            else:
                joined.append((low, high))
        self._ranges = joined
        return new

    def has(self, begin: int, end: int) -> bool:
        """Return True if all positions ``begin`` .. end - 1 are in the set. True for an empty range."""
        return begin >= end or any(low <= begin and end <= high for low, high in self._ranges)
