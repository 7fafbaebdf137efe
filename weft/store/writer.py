"""The open segment of a process."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from weft.store import layout
from weft.store.disk import Disk, lock
from weft.store.layout import ENTRY, Identity
from weft.store.records import PAGE, Owner, RecordBuffer, RecordId
from weft.store.segment import NEW_SUFFIX, SUFFIX, Digests, Segment, mark_of, write_footer


class Writer:
    """An open segment. Records are appended until ``seal``; the descriptor holds the lock of the file."""

    def __init__(self, disk: Disk, folder: Path, namespace: bytes, nbytes: int, now: float) -> None:
        """Create a segment of ``nbytes`` bytes. Raises OSError, and then leaves no file."""
        self._disk = disk
        self.nbytes, self.opened = nbytes, now
        identity = Identity(namespace, os.urandom(16))
        path = folder / f"{int(now * 1e6):016x}-{identity.segment[:4].hex()}{SUFFIX}"
        # The file has no name that others read until the lock is held and the first page is written.
        made = path.with_suffix(NEW_SUFFIX)
        self._fd = disk.create(made)
        try:
            lock(self._fd)
            disk.allocate(self._fd, nbytes)
            page = RecordBuffer(0).memory
            page[:] = np.frombuffer(layout.segment_page(identity), np.uint8)
            disk.write(self._fd, page, 0)
            made.rename(path)
        except BaseException:
            os.close(self._fd)
            made.unlink(missing_ok=True)
            raise
        self.segment = Segment(path, identity, np.zeros(0, ENTRY), sealed=False)
        self._end = PAGE
        self._published = 0
        """Records in the footer of the last ``publish``."""

    def fits(self, nbytes: int) -> bool:
        """Return True if a record with ``nbytes`` of payload and the footer fit in the segment."""
        entries = layout.padded((self.segment.count + 1) * ENTRY.itemsize)
        return self._end + PAGE + layout.padded(nbytes) + entries + PAGE <= self.nbytes

    def removed(self) -> bool:
        """Return True if another process has removed the file. Raises OSError."""
        return os.fstat(self._fd).st_nlink == 0

    def append(
        self, record: RecordId, buffer: RecordBuffer, nbytes: int, owner: Owner, now: float, digest: Digests
    ) -> np.ndarray:
        """Write one record. Return the entry, ``ENTRY`` [1]. Raises OSError: then the record does not
        count."""
        whole = layout.padded(nbytes)
        if self._published == self.segment.count > 0:  # a footer lies behind the last record
            os.ftruncate(self._fd, self._end)
            self._disk.allocate(self._fd, self.nbytes)
        entry = framed(self.segment.identity, record, buffer, nbytes, owner, self._end, now, digest)
        self._disk.write(self._fd, buffer.memory[: PAGE + whole], self._end)
        self._end += PAGE + whole
        return entry

    def publish(self, digest: Digests) -> bool:
        """Write a footer behind the records so far, so that other processes read the records. The next record
        overwrites the footer: until the next call other processes keep what they have read. Return False if
        another process has removed the file. Raises OSError."""
        if self._published == self.segment.count:
            return True
        try:
            fd = self._disk.open(self.segment.path, write=True)
        except FileNotFoundError:
            return False
        try:
            # All records, also removed ones: reads check headers, and a reader finds new entries by number.
            write_footer(fd, self.segment.identity, self.segment.entries, self._end, digest)
        finally:
            os.close(fd)
        self._published = self.segment.count
        return True

    def seal(self, digest: Digests) -> None:
        """Write the footer, free the unused space, wait for the disk and give up the lock. Raises OSError;
        the lock is given up in any case."""
        segment = self.segment
        try:
            # Metadata is not aligned to pages: use a descriptor without O_DIRECT.
            fd = self._disk.open(segment.path, write=True)
            try:
                write_footer(fd, segment.identity, segment.entries[segment.living()], self._end, digest)
                self._disk.sync(fd)
                segment.mark = mark_of(os.fstat(fd))
            finally:
                os.close(fd)
            segment.sealed = True
        finally:
            self.close()

    def close(self) -> None:
        """Give up the lock, without a footer. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def framed(
    identity: Identity,
    record: RecordId,
    buffer: RecordBuffer,
    nbytes: int,
    owner: Owner,
    offset: int,
    now: float,
    digest: Digests,
) -> np.ndarray:
    """Write the header of a record at ``offset`` of a segment before the payload, and zeros behind the
    payload. Return the entry, ``ENTRY`` [1]."""
    made = digest(buffer.payload, layout.spans_of(nbytes), layout.seeds_of(identity, record, nbytes))
    entry = layout.entry_of(record, owner, offset, nbytes, now)
    buffer.memory[:PAGE] = np.frombuffer(layout.header_page(identity, entry, made), np.uint8)
    # The rest of the last page must not hold bytes of an earlier record of another client.
    buffer.memory[PAGE + nbytes : PAGE + layout.padded(nbytes)] = 0
    return entry
