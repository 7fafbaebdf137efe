"""Which bytes of a room have come to one rank: each exactly once, and nothing beside them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.common.errors import WeftError


class BadSpans(WeftError):
    """Spans that do not belong to the room, or come twice."""

    code, blame = "bad_spans", "peer"


class Coverage:
    """What a rank expects, and what of it has landed. ``expected``: see ``spans.arriving``."""

    def __init__(self, expected: Mapping[int, np.ndarray]) -> None:
        self._expected = {region: spans for region, spans in expected.items() if len(spans)}
        self._landed: dict[int, list[np.ndarray]] = {region: [] for region in self._expected}
        self.nbytes = sum(int(spans[:, 1].sum()) for spans in self._expected.values())
        """In all."""
        self.landed_bytes = 0

    def check(self, region: int, spans: np.ndarray) -> None:
        """Raises BadSpans unless each of ``spans``, int64 [n, 2], lies in what is expected of ``region``.

        To be asked before a byte is written.
        """
        expected = self._expected.get(region)
        if expected is None:
            raise BadSpans(f"region {region} gets nothing in this room")
        offsets, lengths = spans[:, 0], spans[:, 1]
        if len(spans) and (lengths.min() < 1 or lengths.max() > self.nbytes or offsets.min() < 0):
            raise BadSpans("a span of a length or an offset that cannot be")
        at = np.searchsorted(expected[:, 0], offsets, side="right") - 1
        if (at < 0).any() or (offsets > expected[at].sum(axis=1) - lengths).any():
            raise BadSpans(f"a span lies outside what this room has in region {region}")

    def add(self, region: int, spans: np.ndarray) -> None:
        """``spans``, which were checked, have been written, and their digests are right."""
        self._landed[region].append(spans)
        self.landed_bytes += int(spans[:, 1].sum())

    def complete(self) -> bool:
        """Whether everything has landed. Raises BadSpans where some came twice, in place of others."""
        if self.landed_bytes < self.nbytes:
            return False
        for region, expected in self._expected.items():
            landed = np.concatenate(self._landed[region]) if self._landed[region] else expected[:0]
            order = np.argsort(landed[:, 0], kind="stable")
            begins, ends = landed[order, 0], landed[order].sum(axis=1)
            if (begins[1:] < ends[:-1]).any() or ends.sum() - begins.sum() != expected[:, 1].sum():
                raise BadSpans(f"bytes of region {region} came twice")
        return True


class Positions:
    """Which positions of a sequence are there: half-open ranges, apart from each other, in order."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, begin: int, end: int) -> list[tuple[int, int]]:
        """``begin`` .. end - 1 are there. Returns those of them that were not before."""
        new, at = list[tuple[int, int]](), begin
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
        """Whether all of ``begin`` .. end - 1 are there."""
        return begin >= end or any(low <= begin and end <= high for low, high in self._ranges)
