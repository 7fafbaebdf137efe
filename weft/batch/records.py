"""Output records in files: written after the committed end, compared with digests, and repaired."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.batch.database import BatchDatabase

PENDING, COMPLETED, FAILED = 0, 1, 2
"""States of a line."""
SLICE = 64 << 20
"""Bytes of records compared between two yields of ``repaired``."""


def digest_of(data: bytes) -> bytes:
    """Return the digest of a record."""
    return hashlib.blake2b(data, digest_size=16).digest()


def write_at(path: Path, at: int, pieces: Sequence[bytes]) -> None:
    """Write bytes at offset ``at`` and flush the file to the disk. Makes a missing file with mode 0600."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        data = memoryview(b"".join(pieces))
        while data:
            written = os.pwrite(file, data, at)
            at += written
            data = data[written:]
        os.fdatasync(file)
    finally:
        os.close(file)


def repaired(base: BatchDatabase, path: Path, batch: str, good: bool, holder: str) -> Iterator[int]:
    """Remove the damaged records of one output file, and set their lines to pending.

    Yields the number of damaged records since the last yield, after every ``SLICE`` bytes of compared records
    and at the end. Memory is bounded by the largest record. Raises LeaseLost.
    """
    damaged: set[int] = set()
    known = start = 0
    while start >= 0:
        start = _compare(base, path, (batch, COMPLETED if good else FAILED, start), damaged)
        if start < 0 and damaged:
            _remove(base, path, (batch, good, holder), damaged)
        yield len(damaged) - known
        known = len(damaged)


_RECORDS = "SELECT line, at, length, digest FROM lines WHERE batch = ? AND state = ? AND at >= ? ORDER BY at"


def _compare(base: BatchDatabase, path: Path, place: tuple[str, int, int], damaged: set[int]) -> int:
    """Add the lines of damaged records to ``damaged``. ``place``: batch, state, first byte. Return the first
    byte of the next slice; -1 at the end."""
    begin = place[2]
    rows = base.db.execute(_RECORDS, place)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        damaged.update(row["line"] for row in rows)
        return -1
    try:
        for row in rows:
            if row["at"] - begin >= SLICE:
                return int(row["at"])
            if digest_of(os.pread(file, row["length"], row["at"])) != row["digest"]:
                damaged.add(row["line"])
    finally:
        rows.close()
        os.close(file)
    return -1


def _remove(base: BatchDatabase, path: Path, place: tuple[str, bool, str], damaged: set[int]) -> None:
    """Write the file anew without the records of ``damaged``. ``place``: batch, file of good answers, holder.

    A crash before the commit leaves rows whose digests do not match, which the next start mends.
    """
    batch, good, holder = place
    state = COMPLETED if good else FAILED
    fresh = path.with_name(path.name + ".new")
    with base.transaction(holder) as db:
        end, moved = 0, []
        fresh.unlink(missing_ok=True)
        write_at(fresh, 0, [])
        rows = [row for row in base.rows(_RECORDS, batch, state, 0) if row["line"] not in damaged]
        if rows:
            with open(path, "rb") as old, open(fresh, "r+b") as new:
                for row in rows:
                    new.write(os.pread(old.fileno(), row["length"], row["at"]))
                    moved.append((end, batch, row["line"]))
                    end += row["length"]
                new.flush()
                os.fdatasync(new.fileno())
        os.replace(fresh, path)
        gone = [(batch, line) for line in damaged]
        db.executemany("UPDATE lines SET state = 0 WHERE batch = ? AND line = ?", gone)
        db.executemany("UPDATE lines SET at = ? WHERE batch = ? AND line = ?", moved)
        column, count = ("output_end", "completed") if good else ("error_end", "failed")
        db.execute(f"UPDATE batches SET {column} = ?, {count} = ? WHERE id = ?", (end, len(moved), batch))
        # A batch that was ending as completed has pending lines again, so its end is taken back.
        db.execute(
            "UPDATE batches SET ends = NULL, status = 'in_progress' WHERE id = ? AND ends = 'completed'",
            (batch,),
        )
