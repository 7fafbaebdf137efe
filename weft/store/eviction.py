"""Removal from the disk tier: budget, age, flush.

The budget counts the bytes on disk of all namespaces and processes of one root folder. If the budget is used
up, records go in this order:

1. records of the payers with more than an equal share of the budget, in the coldest segments first, if
   several payers have records in this namespace;
2. whole segments of any namespace, the coldest first.

The modification time of a file is the time of the last use by any process. A segment that a living process
writes is locked, and stays.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.store import layout
from weft.store.disk import Disk, lock
from weft.store.index import Index
from weft.store.records import PAGE
from weft.store.segment import (
    FILE_NAME,
    FOLDER_NAME,
    SUFFIX,
    Digests,
    Segment,
    mark_of,
    read_footer,
    remove_records,
    walk,
)

_BLOCK = 512  # unit of st_blocks
_LEFT_OVER_S = 600.0
"""Age at which files without the name of a segment are removed: left by processes that died."""


class File(NamedTuple):
    """A file of the root folder."""

    path: Path
    nbytes: int
    """Bytes on disk."""
    used: float
    """Time of the last use."""


def files_of(root: Path) -> Iterator[File]:
    """Yield the files of all namespaces. A file that vanishes meanwhile is left out. Raises OSError.

    A user may name a folder with other contents: only names that stores make count.
    """
    for folder in namespaces_of(root):
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if FILE_NAME.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        facts = entry.stat(follow_symlinks=False)
                        yield File(Path(entry.path), facts.st_blocks * _BLOCK, facts.st_mtime)


def namespaces_of(root: Path) -> list[Path]:
    """Return this user's folders of all namespaces. Several users may share a root such as /tmp. Raises
    OSError."""
    with os.scandir(root) as entries:
        return [
            Path(entry.path) for entry in entries if FOLDER_NAME.fullmatch(entry.name) and _own_folder(entry)
        ]


def _own_folder(entry: os.DirEntry[str]) -> bool:
    """Return True for a folder of this user, False for links and for what has vanished."""
    try:
        facts = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()


class Cleaner:
    """Removes records and segments of a root folder. Methods raise OSError if the disk fails."""

    def __init__(self, disk: Disk, root: Path, index: Index, digest: Digests, budget: int) -> None:
        self._disk, self._root, self._index, self._digest, self._budget = disk, root, index, digest, budget
        self.nbytes = 0
        """Bytes of all files, as last counted."""
        self.evicted = self.expired = self.flushed = 0
        """Records removed from the index, by reason."""

    def count(self) -> int:
        """Count the bytes of all files again."""
        self.nbytes = sum(file.nbytes for file in files_of(self._root))
        return self.nbytes

    def make_room(self, nbytes: int) -> bool:
        """Remove records until ``nbytes`` more fit in the budget. Return False if the budget cannot be
        reached."""
        if self.count() + nbytes <= self._budget:
            return True
        self.save_use()
        self._shrink_payers(nbytes)
        if self.count() + nbytes <= self._budget:
            return True
        for file in sorted(files_of(self._root), key=lambda file: (file.used, file.path)):
            if file.path.suffix == SUFFIX and self._remove(file.path):
                self.evicted += self._forget(file.path)
                self.nbytes -= file.nbytes
            if self.nbytes + nbytes <= self._budget:
                return True
        return False

    def expire(self, oldest: float, now: float, own: Segment | None) -> None:
        """Remove the records written before ``oldest`` from the index, segments with only such records
        from the disk, and files that dead processes left behind."""
        for segment in self._index.segments():
            late = np.flatnonzero(segment.entries["written"] < oldest)
            if len(late):
                self.expired += self._index.drop(segment, late)
            if len(late) == segment.count and segment is not own and self._remove(segment.path):
                self._index.forget(segment)
        # Segments of other namespaces: nobody may read them, so the last use bounds the time of writing.
        known = {segment.path for segment in self._index.segments()}
        for file in files_of(self._root):
            left = file.path.suffix != SUFFIX and file.used < now - _LEFT_OVER_S
            if file.path not in known and (file.used < oldest or left):
                self._remove(file.path)
        self._remove_empty_folders()

    def save_use(self) -> None:
        """Write the times of use to the files, for the processes that share the folder."""
        for segment in self._index.segments():
            if segment.used:
                with contextlib.suppress(FileNotFoundError):
                    os.utime(segment.path, (segment.used, segment.used))
                    segment.mark = mark_of(segment.path.stat())
                segment.used = 0.0

    def flush_all(self) -> int:
        """Remove every file of every namespace. Return the number of records known here."""
        # Also the files of living writers: a writer looks for its file before each record.
        for file in list(files_of(self._root)):
            file.path.unlink(missing_ok=True)
        count = sum(self._index.forget(segment) for segment in self._index.segments())
        self.flushed += count
        return count

    def flush(self, fields: dict[str, bytes], own: Segment | None) -> int:
        """Remove the records whose ``fields`` (name of a field of ``ENTRY`` -> hash) all match, in every
        namespace. Return the number of records."""
        count, known = 0, {segment.path: segment for segment in self._index.segments()}
        for file in list(files_of(self._root)):
            if file.path.suffix != SUFFIX:
                continue
            with contextlib.suppress(FileNotFoundError):
                segment = known.get(file.path) or self._unknown(file.path)
                if segment is None:
                    # No version of this release can tell the owners: nothing of the file may stay.
                    file.path.unlink(missing_ok=True)
                    continue
                rows = matching(segment, fields)
                if len(rows):
                    remove_records(self._disk, segment, rows, self._digest, own=segment is own)
                    count += self._index.drop(segment, rows) if file.path in known else len(rows)
        self.flushed += count
        return count

    def _shrink_payers(self, nbytes: int) -> None:
        """Remove records of payers over an equal share, until ``nbytes`` more fit in the budget."""
        segments = [segment for segment in self._index.segments() if segment.sealed]
        held = dict[bytes, int]()
        for segment in segments:
            for payer, size in _payers(segment).items():
                held[payer] = held.get(payer, 0) + size
        if len(held) < 2:
            return
        share = self._budget // len(held)
        wanted = self.nbytes + nbytes - self._budget
        coldest = sorted(segments, key=_last_use)
        for payer, size in sorted(held.items(), key=lambda item: (-item[1], item[0])):
            excess = min(size - share, wanted)
            for segment in coldest:
                if excess <= 0:
                    break
                freed = self._remove_payer(segment, payer, excess)
                excess -= freed
                wanted -= freed

    def _remove_payer(self, segment: Segment, payer: bytes, nbytes: int) -> int:
        """Remove records of a payer from a segment, from the first on, up to ``nbytes``. Return the freed
        bytes."""
        rows = segment.living()
        rows = rows[segment.entries["payer"][rows] == np.void(payer)]
        sizes = _sizes(segment.entries[rows])
        # Enough rows to reach nbytes: the first row whose cumulative size does.
        rows = rows[: int(np.searchsorted(np.cumsum(sizes), nbytes)) + 1]
        if not len(rows):
            return 0
        freed = int(sizes[: len(rows)].sum())
        with contextlib.suppress(FileNotFoundError):
            if len(rows) == len(segment.living()):
                if not self._remove(segment.path):
                    return 0
                self.evicted += self._index.forget(segment)
                return freed
            remove_records(self._disk, segment, rows, self._digest)
        self.evicted += self._index.drop(segment, rows)
        return freed

    def _remove(self, path: Path) -> bool:
        """Remove a file that no living process writes. Return False if one does."""
        try:
            fd = self._disk.open(path)
        except FileNotFoundError:
            return True
        try:
            if not lock(fd):
                return False
            path.unlink(missing_ok=True)
            return True
        finally:
            os.close(fd)

    def _forget(self, path: Path) -> int:
        """Remove the segment of ``path`` from the index. Return the number of records."""
        return sum(self._index.forget(one) for one in self._index.segments() if one.path == path)

    def _unknown(self, path: Path) -> Segment | None:
        """Return a segment that is not in the index: of another namespace, or being written. None for a file
        of another version."""
        fd = self._disk.open(path)
        try:
            facts = os.fstat(fd)
            identity = layout.identity_of(os.pread(fd, PAGE, 0))
            if identity is None:
                return None
            entries = read_footer(fd, identity, facts.st_size, self._digest)
            sealed = entries is not None
            if entries is None:
                entries, _ = walk(fd, identity, facts.st_size)
            return Segment(path, identity, entries, sealed=sealed)
        finally:
            os.close(fd)

    def _remove_empty_folders(self) -> None:
        for folder in namespaces_of(self._root):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


def matching(segment: Segment, fields: dict[str, bytes]) -> np.ndarray:
    """Return the rows whose fields all match, int64 [n], also of records that are not in the index."""
    same = np.ones(segment.count, bool)
    for field, value in fields.items():
        same &= segment.entries[field] == np.void(value)
    rows: np.ndarray = np.flatnonzero(same)
    return rows


def _sizes(entries: np.ndarray) -> np.ndarray:
    """Return the bytes of each record on disk, int64 [n]."""
    sizes: np.ndarray = PAGE + (entries["nbytes"].astype(np.int64) + PAGE - 1) // PAGE * PAGE
    return sizes


def _payers(segment: Segment) -> dict[bytes, int]:
    """Return payer -> bytes of the records of a segment."""
    entries = segment.entries[segment.living()]
    held = dict[bytes, int]()
    for payer, size in zip(entries["payer"].tolist(), _sizes(entries).tolist(), strict=True):
        held[payer] = held.get(payer, 0) + size
    return held


def _last_use(segment: Segment) -> tuple[float, Path]:
    with contextlib.suppress(OSError):
        return segment.path.stat().st_mtime, segment.path
    return 0.0, segment.path
