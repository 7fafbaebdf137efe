"""Changes of other processes to the segments of a namespace."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from weft.store.disk import Disk
from weft.store.index import Index
from weft.store.segment import SEGMENT_NAME, BeingWritten, Digests, Segment, Unreadable, mark_of, open_segment

_EACH_S = 10.0
"""Seconds between two scans of all files."""
_RECENT_S = 2.0


class Scanner:
    """Keeps an index up to date with a folder. Methods raise OSError if the disk fails."""

    def __init__(self, disk: Disk, folder: Path, namespace: bytes, index: Index, digest: Digests) -> None:
        self._disk, self._folder, self._namespace = disk, folder, namespace
        self._index, self._digest = index, digest
        self._refused: dict[Path, tuple[int, int]] = {}
        """Files that are no segments for this process, with the mark of the last look."""
        self._writing = set[Path]()
        """Segments that living processes wrote at the last look."""
        self._changed, self._listed_at = -1, -_EACH_S
        """Time of change of the folder in ns (-1: recent), and time of the last whole scan."""

    def scan(self, own: Path | None, oldest: float, now: float) -> tuple[int, int]:
        """Add new segments and remove what is gone. ``own``: the segment that this process writes.
        ``oldest``: see ``Index.add``. ``now``: seconds.

        Return (damaged places and files, records that are gone). Without a change of the folder, only the
        segments that other processes write are looked at, because a folder may have 1,000 files. Every
        ``_EACH_S`` seconds all files are looked at, for records that other processes removed.
        """
        if not self._must_list(now):
            files = list(self._marked(sorted(self._writing)))
            return sum(self._add(path, mark, oldest) for path, mark in files), 0
        known = {segment.path: segment for segment in self._index.segments()}
        seen, damaged, gone = dict[Path, tuple[int, int]](), 0, 0
        for path, mark in self._marked(self._listed()):
            seen[path] = mark
            segment = known.get(path)
            # Footers are read only for new and changed files: most scans only list the folder.
            if path == own:
                continue
            if segment is None and self._refused.get(path) != mark:
                damaged += self._add(path, mark, oldest)
            elif segment is not None and segment.mark != mark:
                gone += self._look_again(segment, oldest)
        for path, segment in known.items():
            if path not in seen:
                gone += self._index.forget(segment)
        self._writing &= seen.keys()
        self._refused = {path: mark for path, mark in self._refused.items() if path in seen}
        return damaged, gone

    def _must_list(self, now: float) -> bool:
        """Return True if the folder may have other files than at the last scan."""
        try:
            changed = self._folder.stat().st_mtime_ns
        except FileNotFoundError:
            changed = -1
        same = changed == self._changed and 0 <= now - self._listed_at < _EACH_S
        # Two changes within one tick of the file system have equal times: a recent time proves nothing.
        self._changed = changed if time.time() - changed / 1e9 > _RECENT_S else -1
        if not same:
            self._listed_at = now
        return not same

    def _listed(self) -> list[Path]:
        """Return all segment files, the oldest first."""
        try:
            with os.scandir(self._folder) as entries:
                names = sorted(entry.name for entry in entries if SEGMENT_NAME.fullmatch(entry.name))
        except FileNotFoundError:
            return []
        return [self._folder / name for name in names]

    def _marked(self, paths: Iterable[Path]) -> Iterator[tuple[Path, tuple[int, int]]]:
        """Yield path and mark of each file that is there."""
        for path in paths:
            try:
                yield path, mark_of(path.lstat())
            except FileNotFoundError:
                continue

    def _add(self, path: Path, mark: tuple[int, int], oldest: float) -> int:
        """Add a segment. Return the number of damaged places."""
        self._writing.discard(path)
        try:
            segment, damaged = open_segment(self._disk, path, self._namespace, self._digest)
        except FileNotFoundError:
            return 0
        except BeingWritten:
            self._writing.add(path)
            return 0
        except Unreadable:
            self._refused[path] = mark
            return 1
        self._index.add(segment, oldest)
        return damaged

    def _look_again(self, segment: Segment, oldest: float) -> int:
        """Take over removals of another process from a changed file, and further records of the writer.
        Return the number of removed records."""
        try:
            fresh, _ = open_segment(self._disk, segment.path, self._namespace, self._digest)
        except BeingWritten:
            return 0  # another process changes the footer now
        except (FileNotFoundError, Unreadable):
            return self._index.forget(segment)
        # The writer may have published more, and removed other records: numbers of records prove nothing.
        if not np.isin(fresh.entries["offset"], segment.entries["offset"]).all():
            self._index.forget(segment)
            self._index.add(fresh, oldest)
            return 0
        segment.mark = fresh.mark
        left = np.flatnonzero(~np.isin(segment.entries["offset"], fresh.entries["offset"]))
        return self._index.drop(segment, left)
