"""Changes of other processes to the segments of a namespace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from weft.store.disk import Disk
from weft.store.index import Index
from weft.store.segment import SEGMENT_NAME, BeingWritten, Digests, Segment, Unreadable, mark_of, open_segment


class Scanner:
    """Keeps an index up to date with a folder. Methods raise OSError if the disk fails."""

    def __init__(self, disk: Disk, folder: Path, namespace: bytes, index: Index, digest: Digests) -> None:
        self._disk, self._folder, self._namespace = disk, folder, namespace
        self._index, self._digest = index, digest
        self._refused: dict[Path, tuple[int, int]] = {}
        """Files that are no segments for this process, with the mark of the last look."""

    def scan(self, own: Path | None, oldest: float) -> tuple[int, int]:
        """Add new segments and remove what is gone. ``own``: the segment that this process writes.
        ``oldest``: see ``Index.add``.

        Return (damaged places and files, records that are gone).
        """
        known = {segment.path: segment for segment in self._index.segments()}
        seen, damaged, gone = dict[Path, tuple[int, int]](), 0, 0
        for path, mark in self._listed():
            seen[path] = mark
            segment = known.get(path)
            # Footers are read only for new and changed files: most scans only list the folder.
            if path == own:
                continue
            if segment is None and self._refused.get(path) != mark:
                damaged += self._add(path, mark, oldest)
            elif segment is not None and segment.mark != mark:
                gone += self._look_again(segment)
        for path, segment in known.items():
            if path not in seen:
                gone += self._index.forget(segment)
        self._refused = {path: mark for path, mark in self._refused.items() if path in seen}
        return damaged, gone

    def _listed(self) -> Iterator[tuple[Path, tuple[int, int]]]:
        """Yield path and mark of each segment file, the oldest first."""
        try:
            with os.scandir(self._folder) as entries:
                names = sorted(entry.name for entry in entries if SEGMENT_NAME.fullmatch(entry.name))
        except FileNotFoundError:
            return
        for name in names:
            path = self._folder / name
            try:
                yield path, mark_of(path.lstat())
            except FileNotFoundError:
                continue

    def _add(self, path: Path, mark: tuple[int, int], oldest: float) -> int:
        """Add a segment. Return the number of damaged places."""
        try:
            segment, damaged = open_segment(self._disk, path, self._namespace, self._digest)
        except (FileNotFoundError, BeingWritten):
            return 0
        except Unreadable:
            self._refused[path] = mark
            return 1
        self._index.add(segment, oldest)
        return damaged

    def _look_again(self, segment: Segment) -> int:
        """Take over removals of another process from a changed file. Return the number of records."""
        try:
            fresh, _ = open_segment(self._disk, segment.path, self._namespace, self._digest)
        except BeingWritten:
            return 0  # another process changes the footer now
        except (FileNotFoundError, Unreadable):
            return self._index.forget(segment)
        segment.mark = fresh.mark
        left = np.flatnonzero(~np.isin(segment.entries["offset"], fresh.entries["offset"]))
        return self._index.drop(segment, left)
