"""Files of clients in a batch folder: inputs that clients upload, and outputs of batches."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from weft.batch.database import BatchDatabase
from weft.common.errors import Overloaded

ORPHAN_S = 3600.0
"""Age in seconds at which contents without a row are deleted: the upload's process has ended."""


class FileRow(NamedTuple):
    """A file as stored. Times are seconds since 1970."""

    id: str
    owner: str
    purpose: str
    name: str
    bytes: int
    created: int
    expires: int


class IncomingFile:
    """Contents of an upload, written in pieces. Unknown to clients until ``BatchFiles.keep``."""

    def __init__(self, path: Path, id: str) -> None:
        self.path, self.id = path, id
        self.size = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> None:
        """Append bytes."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        self.size += len(data)

    def flush(self) -> None:
        """Flush all bytes to the disk and close the file."""
        os.fdatasync(self._file)
        os.close(self._file)
        self._file = -1

    def discard(self) -> None:
        """Delete the contents. The row of a kept file stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self.path.unlink(missing_ok=True)


class BatchFiles:
    """All files of a folder. Used from one thread at a time."""

    def __init__(self, database: BatchDatabase, clock: Callable[[], float], retention: float) -> None:
        """``retention``: seconds for which a file is kept."""
        self._base = database
        self._clock = clock
        self._retention = retention

    def path(self, id: str) -> Path:
        """Return the path of the contents of a file. ``id`` must come from this class or from a row."""
        return self._base.files / id

    def incoming(self) -> IncomingFile:
        """Return the contents of a new file."""
        made = "file-" + secrets.token_hex(12)
        return IncomingFile(self.path(made), made)

    def keep(
        self,
        incoming: IncomingFile,
        owner: str,
        name: str,
        retention: float | None = None,
        most: tuple[int, int] = (1 << 62, 1 << 62),
    ) -> FileRow:
        """Add the row of a complete upload and return the row. After an error, delete the contents.

        ``retention``: seconds; None for the default. ``most``: maximum (files, bytes) of the owner. Raises
        Overloaded above the maximum."""
        try:
            incoming.flush()
            with self._base.transaction():
                count, size = self.load(owner)
                if count >= most[0] or size + incoming.size > most[1]:
                    raise Overloaded(
                        f"this key may have {most[0]} files (--batch-max-files) and {most[1]} bytes "
                        "(--batch-max-bytes); delete files"
                    )
                self.add_row(incoming.id, owner, "batch", name, incoming.size, retention)
        except BaseException:
            incoming.discard()
            raise
        found = self.get(incoming.id, owner)
        assert found is not None
        return found

    def add_row(
        self, id: str, owner: str, purpose: str, name: str, size: int, retention: float | None = None
    ) -> None:
        """Add a row. Call in a transaction."""
        now = int(self._clock())
        keeps = self._retention if retention is None else min(retention, self._retention)
        self._base.db.execute(
            "INSERT OR REPLACE INTO files (id, owner, purpose, name, bytes, created, expires)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (id, owner, purpose, name, size, now, now + int(keeps)),
        )

    def get(self, id: str, owner: str) -> FileRow | None:
        """Return a file; None if unknown, expired, or of another owner."""
        row = self._base.row("SELECT * FROM files WHERE id = ? AND owner = ?", id, owner)
        return None if row is None or row["expires"] <= self._clock() else _file(row)

    def list(
        self, owner: str, purpose: str | None, after: str | None, limit: int, newest: bool
    ) -> tuple[list[FileRow], bool] | None:
        """Return (files behind ``after``, True if there are more); None for an unknown ``after``."""
        place = None
        if after is not None:
            row = self._base.row("SELECT number FROM files WHERE id = ? AND owner = ?", after, owner)
            if row is None:
                return None
            place = row["number"]
        order, sign = ("DESC", "<") if newest else ("ASC", ">")
        rows = self._base.rows(
            f"SELECT * FROM files WHERE owner = ? AND expires > ? AND (? IS NULL OR purpose = ?)"
            f" AND (? IS NULL OR number {sign} ?) ORDER BY number {order} LIMIT ?",
            *(owner, self._clock(), purpose, purpose, place, place, limit + 1),
        )
        return [_file(row) for row in rows[:limit]], len(rows) > limit

    def load(self, owner: str) -> tuple[int, int]:
        """Return (number, bytes) of the files of an owner. The bytes include the outputs of running
        batches."""
        row = self._base.row(
            "SELECT COUNT(*) AS count, COALESCE(SUM(bytes), 0) AS bytes FROM files WHERE owner = ?"
            " AND expires > ?",
            owner,
            self._clock(),
        )
        grows = self._base.row(
            "SELECT COALESCE(SUM(output_end + error_end), 0) AS bytes FROM batches WHERE owner = ?"
            " AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')",
            owner,
        )
        assert row is not None
        assert grows is not None
        return row["count"], row["bytes"] + grows["bytes"]

    def users(self, id: str) -> str | None:
        """Return the id of an unfinished batch that reads the file; None without such a batch."""
        row = self._base.row(
            "SELECT id FROM batches WHERE input = ? AND status IN ('validating', 'in_progress')", id
        )
        return None if row is None else str(row["id"])

    def delete(self, id: str) -> str | None:
        """Delete a file and its row, and return None. If an unfinished batch reads the file, delete nothing
        and return the id of the batch."""
        with self._base.transaction() as db:
            if (user := self.users(id)) is not None:
                return user
            db.execute("DELETE FROM files WHERE id = ?", (id,))
        self.path(id).unlink(missing_ok=True)
        return None

    def purge(self, used: set[str]) -> None:
        """Delete expired files, and contents without a row, except ``used``. Call in a transaction."""
        # The files of a young upload have no row yet: see ORPHAN_S.
        rows = self._base.rows("SELECT id, expires FROM files")
        now = self._clock()
        ended = [row["id"] for row in rows if row["expires"] <= now and row["id"] not in used]
        self._base.db.executemany("DELETE FROM files WHERE id = ?", [(id,) for id in ended])
        known = {row["id"] for row in rows} - set(ended) | used
        for path in self._base.files.iterdir():
            if path.name in ended or (path.name not in known and _age(path) > ORPHAN_S):
                path.unlink(missing_ok=True)


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _file(row: object) -> FileRow:
    return FileRow(*(row[name] for name in FileRow._fields))  # type: ignore[index]
