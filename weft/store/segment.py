"""One segment file: reading of its entries, sealing, removal of single records."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np

from weft.store import layout
from weft.store.disk import Disk, lock
from weft.store.layout import ENTRY, Identity
from weft.store.records import PAGE

SUFFIX, NEW_SUFFIX = ".kv", ".new"
"""Ends of the names of a segment and of a segment that is being created."""
SEGMENT_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{8}\.kv")
FILE_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{8}\.(kv|new)|probe-[0-9]+-[0-9a-f]{8}")
"""Names of all files that a store makes. Files of other names are never touched."""
FOLDER_NAME = re.compile(r"[0-9a-f]{32}")
"""Names of namespaces. Folders of other names are never touched."""
Digests = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(memory uint8 [n], spans int64 [k, 2], seeds uint64 [k]) -> uint64 [k], see ``digests.digest_spans``."""


class Segment:
    """A segment as this process sees the file. The entries of a sealed segment never grow."""

    def __init__(self, path: Path, identity: Identity, entries: np.ndarray, *, sealed: bool) -> None:
        self.path, self.identity, self.sealed = path, identity, sealed
        self._entries = entries
        self.count = len(entries)
        self.alive = np.ones(len(entries), bool)
        """[capacity]; False for a record that was removed or is damaged."""
        self.used = 0.0
        """Time of the last use by this process; 0 before the first use or once the file has the time."""
        self.mark: tuple[int, int] = (0, 0)
        """(change time in ns, size) of the file when it was read."""

    @property
    def entries(self) -> np.ndarray:
        """All records in order of their places, ``ENTRY`` [count]."""
        return self._entries[: self.count]

    def append(self, entry: np.ndarray) -> int:
        """Add the next record and return the row."""
        if self.count == len(self._entries):
            more = max(64, self.count)
            self._entries = np.concatenate([self._entries, np.zeros(more, ENTRY)])
            self.alive = np.concatenate([self.alive, np.zeros(more, bool)])
        row = self.count
        self._entries[row] = entry[0]
        self.alive[row] = True
        self.count += 1
        return row

    def living(self) -> np.ndarray:
        """Return the rows of the records that are there, int64 [n]."""
        rows: np.ndarray = np.flatnonzero(self.alive[: self.count])
        return rows


class Unreadable(Exception):
    """A file that is no segment of this version, namespace and user."""


class BeingWritten(Unreadable):
    """A segment that a living process writes."""


def open_segment(disk: Disk, path: Path, namespace: bytes, digest: Digests) -> tuple[Segment, int]:
    """Return a segment of another process or of an earlier time, and the number of damaged places.

    A segment whose writer has died is sealed here. Raises Unreadable and OSError.
    """
    fd = disk.open(path)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise Unreadable("not a file of this user")
        identity = layout.identity_of(os.pread(fd, PAGE, 0))
        if identity is None or identity.namespace != namespace:
            raise Unreadable("not a segment of this version and namespace")
        entries = read_footer(fd, identity, facts.st_size, digest)
        if entries is not None:
            segment, damaged = Segment(path, identity, entries, sealed=True), 0
        else:
            # No footer: the writer lives, has died, or the end of the file is damaged.
            if not lock(fd):
                raise BeingWritten("another process writes the segment")
            # The writer may have sealed the segment before giving up the lock.
            size = os.fstat(fd).st_size
            entries, damaged = read_footer(fd, identity, size, digest), 0
            if entries is None:
                entries, damaged = walk(fd, identity, size)
            segment = Segment(path, identity, entries, sealed=True)
            # A disk that takes no footer does not matter: the next process walks again.
            with contextlib.suppress(OSError):
                rewrite_footer(disk, path, identity, entries, digest)
        segment.mark = mark_of(os.fstat(fd))
        return segment, damaged
    finally:
        os.close(fd)


def keys_of(disk: Disk, path: Path, digest: Digests) -> list[bytes]:
    """Return the keys in the footer of a segment of any namespace; [] without a footer that holds. Raises
    OSError."""
    try:
        fd = disk.open(path)
    except FileNotFoundError:
        return []
    try:
        identity = layout.identity_of(os.pread(fd, PAGE, 0))
        entries = None if identity is None else read_footer(fd, identity, os.fstat(fd).st_size, digest)
        return [] if entries is None else [bytes(key) for key in entries["key"]]
    finally:
        os.close(fd)


def mark_of(facts: os.stat_result) -> tuple[int, int]:
    """Return the mark of a file, see ``Segment.mark``."""
    return facts.st_ctime_ns, facts.st_size


def read_footer(fd: int, identity: Identity, size: int, digest: Digests) -> np.ndarray | None:
    """Return the entries of a sealed segment, ``ENTRY`` [n]; None without a footer that holds."""
    if size < 2 * PAGE:
        return None
    trailer = layout.trailer_of(os.pread(fd, PAGE, size - PAGE), identity, size)
    if trailer is None:
        return None
    data = os.pread(fd, trailer.entries * ENTRY.itemsize, trailer.offset)
    if (
        len(data) != trailer.entries * ENTRY.itemsize
        or entries_digest(data, identity, digest) != trailer.digest
    ):
        return None
    return np.frombuffer(data, ENTRY)


def walk(fd: int, identity: Identity, size: int) -> tuple[np.ndarray, int]:
    """Return the entries of all headers that hold and whose payload lies inside the file, and the number of
    damaged places.

    After a header that does not hold, the walk goes on page by page: lengths of such a header are not
    trusted. Raises OSError.
    """
    # A file that ends within a page was cut.
    found, damaged, at, whole = list[np.ndarray](), int(size % PAGE > 0), PAGE, True
    while at + PAGE <= size:
        at = _next_data(fd, at)
        page = os.pread(fd, PAGE, at)
        header = layout.header_of(page, identity, at)
        if header is None:
            # Zeros are the free end or a removed record; a footer ends the records.
            if whole and any(page) and layout.trailer_of(page, identity, size) is None:
                damaged += 1
            whole = False
            at += PAGE
            continue
        end = at + PAGE + layout.padded(int(header.entry["nbytes"][0]))
        if end > size:
            damaged += 1
            at += PAGE
            continue
        found.append(header.entry)
        at, whole = end, True
    return np.concatenate(found) if found else np.zeros(0, ENTRY), damaged


def rewrite_footer(disk: Disk, path: Path, identity: Identity, entries: np.ndarray, digest: Digests) -> None:
    """Write a footer with ``entries`` after the last record, and end the file there. The caller has the lock.
    Raises OSError."""
    last = entries[-1:] if len(entries) else None
    end = PAGE if last is None else int(last["offset"][0]) + PAGE + layout.padded(int(last["nbytes"][0]))
    fd = disk.open(path, write=True)
    try:
        facts = os.fstat(fd)
        write_footer(fd, identity, entries, end, digest)
        disk.sync(fd)
        # A changed footer is no use of the segment.
        os.utime(fd, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    finally:
        os.close(fd)


def write_footer(fd: int, identity: Identity, entries: np.ndarray, end: int, digest: Digests) -> None:
    """Write the footer at ``end``, and end the file after the footer. Raises OSError."""
    footer = layout.footer_of(identity, entries, end, entries_digest(entries.tobytes(), identity, digest))
    # The old trailer goes first: a half-written footer then has no trailer, and the headers count.
    os.ftruncate(fd, end)
    done = 0
    while done < len(footer):
        done += os.pwrite(fd, footer[done:], end + done)


def remove_records(
    disk: Disk, segment: Segment, rows: np.ndarray, digest: Digests, *, own: bool = False
) -> None:
    """Remove the records of ``rows``, int64 [n], from a file: the bytes are gone when the call returns.

    ``own``: this process writes the segment. The footer is written again only under the lock of the file;
    a footer that lists removed records does no harm, because reads check headers. Raises OSError.
    """
    gone = segment.entries[rows]
    fd = disk.open(segment.path, write=True)
    try:
        facts = os.fstat(fd)
        for offset, nbytes in zip(gone["offset"].tolist(), gone["nbytes"].tolist(), strict=True):
            disk.punch(fd, offset, PAGE + layout.padded(nbytes))
        if segment.sealed and not own and lock(fd):
            last = os.pread(fd, PAGE, facts.st_size - PAGE)
            trailer = layout.trailer_of(last, segment.identity, facts.st_size)
            if trailer is not None:
                kept = segment.alive[: segment.count].copy()
                kept[rows] = False
                write_footer(fd, segment.identity, segment.entries[kept], trailer.offset, digest)
        os.utime(fd, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    finally:
        os.close(fd)


def entries_digest(data: bytes, identity: Identity, digest: Digests) -> int:
    """Return the digest of the entries of a footer."""
    memory = np.frombuffer(bytearray(data), np.uint8)  # torch takes only writable memory
    spans = np.array([[0, len(memory)]], np.int64)
    return int(digest(memory, spans, np.array([layout.entries_seed(identity)], np.uint64))[0])


def _next_data(fd: int, at: int) -> int:
    """Return the next page with data from ``at`` on; ``at`` itself on a file system that cannot tell."""
    try:
        return max(at, os.lseek(fd, at, os.SEEK_DATA) // PAGE * PAGE)
    except OSError as error:
        if error.errno == errno.ENXIO:  # only a hole follows
            return os.fstat(fd).st_size
        return at
