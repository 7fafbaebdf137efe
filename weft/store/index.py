"""The index in memory: name of a record -> place. All methods may be called from any thread."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from weft.store import layout
from weft.store.records import Changes, RecordId, Stored
from weft.store.segment import Segment

_ROW_BITS = 32
_ROWS = (1 << _ROW_BITS) - 1


class Found(NamedTuple):
    """Place of a record."""

    segment: Segment
    row: int
    entry: np.void
    """One ``ENTRY``."""


class Index:
    """Records by name. The first segment with a record has the record; copies are not used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[bytes, int] = {}
        """Name -> number of the segment and row, in one integer: a small object for each record."""
        self._segments: dict[int, Segment] = {}
        self._numbers: dict[Segment, int] = {}
        self._parts: list[int] = []
        """Every number of parts that occurs, ascending."""
        self._added: list[bytes] = []
        self._gone: list[bytes] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._places)

    def segments(self) -> list[Segment]:
        """Return all segments, in order of arrival."""
        with self._lock:
            return list(self._numbers)

    def add(self, segment: Segment, oldest: float) -> None:
        """Add a segment. Records written before ``oldest`` are left out."""
        with self._lock:
            number = self._next
            self._next += 1
            self._segments[number], self._numbers[segment] = segment, number
            segment.alive[: segment.count] &= segment.entries["written"] >= oldest
            rows = segment.living()
            names = layout.names_of(segment.entries[rows])
            places, pairs = self._places, zip(names, rows.tolist(), strict=True)
            fresh = [(name, row) for name, row in pairs if name not in places]
            places.update((name, number << _ROW_BITS | row) for name, row in fresh)
            self._added.extend(name for name, _ in fresh)
            for parts in np.unique(segment.entries["parts"]).tolist():
                self._add_parts(parts)

    def append(self, segment: Segment, record: RecordId, entry: np.ndarray) -> None:
        """Add a record at the end of a segment of the index."""
        with self._lock:
            row = segment.append(entry)
            name = layout.name_bytes(record)
            self._places[name] = self._numbers[segment] << _ROW_BITS | row
            self._added.append(name)
            self._add_parts(record.parts)

    def place(self, record: RecordId) -> Found | None:
        """Return the place of a record; None if there is none."""
        with self._lock:
            return self._found(layout.name_bytes(record))

    def find(self, kind: int, key: bytes, oldest: float) -> Stored | None:
        """Return a block with all parts, each written at ``oldest`` or later; None if there is none."""
        with self._lock:
            # Groups of several sizes may have written the block: one size with all parts is enough.
            for parts in self._parts:
                found = [self._found(layout.name_bytes(RecordId(kind, key, n, parts))) for n in range(parts)]
                entries = [one.entry for one in found if one is not None]
                if len(entries) < parts:
                    continue
                written = min(float(entry["written"]) for entry in entries)
                if written >= oldest:
                    return Stored(kind, key, parts, sum(int(entry["nbytes"]) for entry in entries), written)
        return None

    def drop(self, segment: Segment, rows: np.ndarray) -> int:
        """Remove records of a segment. rows: int64 [n]. Return the number of records that were there."""
        with self._lock:
            return self._drop(segment, rows)

    def forget(self, segment: Segment) -> int:
        """Remove a segment. Return the number of records that were there."""
        with self._lock:
            if segment not in self._numbers:
                return 0
            count = self._drop(segment, segment.living())
            del self._segments[self._numbers.pop(segment)]
            return count

    def changes(self) -> Changes:
        """Return what came and went since the last call. A record may be in both lists: then ``gone`` is
        the state only if the record is not there now."""
        with self._lock:
            added, gone = self._added, self._gone
            self._added, self._gone = [], []
            # Report the present state: a record that came and went is gone, a record that returned is there.
            places = self._places
            there = [name for name in dict.fromkeys(added) if name in places]
            left = [name for name in dict.fromkeys(gone) if name not in places]
        return Changes([layout.record_of(name) for name in there], [layout.record_of(name) for name in left])

    def blocks(self) -> list[tuple[int, bytes]]:
        """Return (KV cache group, hash) of all complete blocks."""
        with self._lock:
            names = list(self._places)
        found = dict.fromkeys((record.kind, record.key) for record in map(layout.record_of, names))
        return [block for block in found if self.find(*block, 0.0) is not None]

    def _found(self, name: bytes) -> Found | None:
        at = self._places.get(name)
        if at is None:
            return None
        segment, row = self._segments[at >> _ROW_BITS], at & _ROWS
        return Found(segment, row, segment.entries[row])

    def _drop(self, segment: Segment, rows: np.ndarray) -> int:
        number, count = self._numbers.get(segment, -1), 0
        rows = rows[segment.alive[rows]]
        for name, row in zip(layout.names_of(segment.entries[rows]), rows.tolist(), strict=True):
            if self._places.get(name) == number << _ROW_BITS | row:
                del self._places[name]
                self._gone.append(name)
                count += 1
        segment.alive[rows] = False
        return count

    def _add_parts(self, parts: int) -> None:
        if parts not in self._parts:
            self._parts = sorted([*self._parts, parts])
