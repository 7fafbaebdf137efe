"""Batches and their lines on disk, with every output exactly once.

A line is done when its record is in the output file and the state in its row is set. One transaction does
both: write the record after the committed end of the file, flush, then commit the row and the new end. After
a crash in between, the line runs again with the same seed, and the new record overwrites the bytes after the
committed end. Each row has the digest of its record.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from weft.batch.book import EndReason
from weft.batch.database import BatchDatabase, LeaseLost
from weft.batch.files import BatchFiles
from weft.batch.lines import (
    BatchLine,
    Checks,
    LineError,
    line_of,
    read_places,
    record_of,
    undone_record,
)
from weft.batch.records import COMPLETED, FAILED, digest_of, repaired, write_at
from weft.batch.runner import LineOutput
from weft.common.errors import ErrorInfo

ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
ENDED = ("completed", "failed", "expired", "cancelled")
STATUSES = (*ACTIVE, *ENDED)
_ACTIVE_SQL = "('validating', 'in_progress', 'finalizing', 'cancelling')"
DAY = 24 * 3600
MOST_ENDED = 10_000
"""Maximum number of retained ended batches of a key."""
_CHUNK = 1000
_UNDONE = {
    "expired": ErrorInfo(
        code="batch_expired", message="The line did not run before the end of the completion window."
    ),
    "cancelled": ErrorInfo(code="batch_cancelled", message="The batch was cancelled before the line ran."),
}


class BatchRow(NamedTuple):
    """A batch as stored. ``times``: status -> second at which the batch got the status."""

    id: str
    owner: str
    endpoint: str
    input: str
    metadata: dict[str, str] | None
    status: str
    seed: int
    ends: EndReason | None
    """Final status, set when the end begins."""
    errors: list[dict[str, Any]]
    created: int
    expires: int
    times: dict[str, int]
    output: str
    error: str
    output_end: int
    error_end: int
    total: int
    completed: int
    failed: int


class _Written(NamedTuple):
    """A record to write."""

    line: int
    good: bool
    data: bytes


class BatchStore:
    """All batches of a folder. Used from one thread at a time. ``clock``: seconds since 1970."""

    def __init__(self, database: BatchDatabase, files: BatchFiles, clock: Callable[[], float]) -> None:
        self._base = database
        self._files = files
        self._clock = clock
        self.holder = secrets.token_hex(8)
        """Name of this process in the lease."""

    # -- batches of clients

    def create(
        self,
        owner: str,
        endpoint: str,
        source: str,
        metadata: dict[str, str] | None,
        most_open: int = 1 << 31,
    ) -> str | None:
        """Add a batch with status validating and return the id; None if the owner has ``most_open`` active
        batches. The caller has checked that the input file exists.

        Deletes the owner's ended batches beyond the last ``MOST_ENDED``. Their output files stay.
        """
        made = secrets.token_hex(12)
        now = int(self._clock())
        with self._base.transaction() as db:
            if self.load(owner)[0] >= most_open:
                return None
            db.execute(
                f"DELETE FROM batches WHERE owner = ? AND status NOT IN {_ACTIVE_SQL} AND number <= (SELECT"
                " number FROM batches WHERE owner = ? ORDER BY number DESC LIMIT 1 OFFSET ?)",
                (owner, owner, MOST_ENDED),
            )
            db.execute(
                "INSERT INTO batches (id, owner, endpoint, input, metadata, status, seed, created, expires,"
                " times, output, error) VALUES (?, ?, ?, ?, ?, 'validating', ?, ?, ?, '{}', ?, ?)",
                (
                    f"batch_{made}",
                    owner,
                    endpoint,
                    source,
                    None if metadata is None else json.dumps(metadata),
                    secrets.randbits(63),
                    now,
                    now + DAY,
                    f"file-{made}-output",
                    f"file-{made}-errors",
                ),
            )
        return f"batch_{made}"

    def get(self, batch: str, owner: str | None = None) -> BatchRow | None:
        """Return a batch; None if unknown or of another owner. ``owner``: None for any."""
        row = self._base.row("SELECT * FROM batches WHERE id = ?", batch)
        return None if row is None or owner not in (None, row["owner"]) else _batch(row)

    def list(self, owner: str, after: str | None, limit: int) -> tuple[Sequence[BatchRow], bool] | None:
        """Return (batches behind ``after``, newest first; True if there are more); None for an unknown
        ``after``."""
        below = 1 << 62
        if after is not None:
            row = self._base.row("SELECT number FROM batches WHERE id = ? AND owner = ?", after, owner)
            if row is None:
                return None
            below = row["number"]
        query = "SELECT * FROM batches WHERE owner = ? AND number < ? ORDER BY number DESC LIMIT ?"
        rows = self._base.rows(query, owner, below, limit + 1)
        return [_batch(row) for row in rows[:limit]], len(rows) > limit

    def cancel(self, batch: str) -> bool:
        """Set the status cancelling. Return False if the batch has ended or is finalizing."""
        with self._base.transaction():
            row = self.get(batch)
            if row is None or row.status not in ("validating", "in_progress", "cancelling"):
                return False
            if row.status != "cancelling":
                self._set(row, "cancelling")
        return True

    def load(self, owner: str) -> tuple[int, int]:
        """Return (number of active batches, number of their lines without an output) of an owner."""
        row = self._base.row(
            "SELECT COUNT(*) AS batches, COALESCE(SUM(total - completed - failed), 0) AS lines FROM batches"
            f" WHERE owner = ? AND status IN {_ACTIVE_SQL}",
            owner,
        )
        assert row is not None
        return row["batches"], row["lines"]

    def counts(self) -> dict[str, int]:
        """Return status -> number of batches."""
        rows = self._base.rows("SELECT status, COUNT(*) AS count FROM batches GROUP BY status")
        return dict.fromkeys(STATUSES, 0) | {row["status"]: row["count"] for row in rows}

    def oldest(self) -> float:
        """Return the age in seconds of the oldest active batch; 0 without active batches."""
        row = self._base.row(f"SELECT MIN(created) AS first FROM batches WHERE status IN {_ACTIVE_SQL}")
        first = None if row is None else row["first"]
        return 0.0 if first is None else max(self._clock() - first, 0.0)

    # -- the holder of the lease

    def active(self) -> Sequence[BatchRow]:
        """Return the active batches, oldest first."""
        query = f"SELECT * FROM batches WHERE status IN {_ACTIVE_SQL} ORDER BY number"
        return [_batch(row) for row in self._base.rows(query)]

    def validate(self, batch: str, checks: Checks, room: int) -> None:
        """Check the input file of a batch. Set the status in_progress and add all lines, or set the status
        failed with the errors. ``room``: maximum number of lines."""
        row = self.get(batch)
        if row is None or row.status != "validating":
            return
        try:
            with open(self._files.path(row.input), "rb") as file:
                places, errors = read_places(file, checks)
        except FileNotFoundError:
            places, errors = [], [LineError("input_file_missing", "the input file was deleted")]
        if len(places) > room:
            errors = [
                LineError(
                    "token_limit_exceeded",
                    f"this key may have {room} more lines in batches that have not ended; "
                    "wait for the end of a batch, or send fewer lines",
                )
            ]
        with self._base.transaction(self.holder) as db:
            if errors:
                shown = [
                    {"code": e.code, "message": e.message, "param": e.param, "line": e.line} for e in errors
                ]
                db.execute("UPDATE batches SET errors = ? WHERE id = ?", (json.dumps(shown), batch))
                self._set(row, "failed")
                return
            db.executemany(
                "INSERT INTO lines (batch, line, place, start, size, custom_id, model)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                ((batch, p.line, n, p.start, p.size, p.custom_id, p.model) for n, p in enumerate(places)),
            )
            db.execute("UPDATE batches SET total = ? WHERE id = ?", (len(places), batch))
            current = self.get(batch)
            if current is not None and current.status == "validating":  # not cancelled meanwhile
                self._set(row, "in_progress")

    def pending(self, batch: str) -> tuple[int, ...]:
        """Return the lines without an output, in the order of the run."""
        query = "SELECT line FROM lines WHERE batch = ? AND state = 0 ORDER BY place"
        return tuple(row["line"] for row in self._base.rows(query, batch))

    def models(self, batch: str) -> dict[int, str]:
        """Return line -> model, for the lines without an output."""
        query = "SELECT line, model FROM lines WHERE batch = ? AND state = 0"
        found = {row["line"]: row["model"] for row in self._base.rows(query, batch)}
        for line, name in found.items():
            if not name:  # validated by an earlier release
                with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    found[line] = str(self.line(batch, line).body.get("model", ""))
        return found

    def line(self, batch: str, line: int) -> BatchLine:
        """Return a line of the input file."""
        row = self._base.row(
            "SELECT start, size, input FROM lines JOIN batches ON batches.id = lines.batch"
            " WHERE batch = ? AND line = ?",
            batch,
            line,
        )
        assert row is not None
        with open(self._files.path(row["input"]), "rb") as file:
            return line_of(os.pread(file.fileno(), row["size"], row["start"]))

    def record(self, outputs: Sequence[LineOutput]) -> None:
        """Write outputs, durable on return. Lines with an output are skipped. Raises LeaseLost."""
        with self._base.transaction(self.holder):
            for batch in dict.fromkeys(output.batch for output in outputs):
                mine = {output.line: output for output in outputs if output.batch == batch}
                marks = ",".join("?" * len(mine))
                query = (
                    f"SELECT line, custom_id FROM lines WHERE batch = ? AND state = 0 AND line IN ({marks})"
                )
                names = {row["line"]: row["custom_id"] for row in self._base.rows(query, batch, *mine)}
                self._append(
                    batch,
                    [
                        _Written(line, one.good, record_of(batch, names[line], one.answer))
                        for line, one in mine.items()
                        if line in names
                    ],
                )

    def finalize(self, batch: str, reason: EndReason) -> None:
        """End a batch. Lines without an output get a record in the error file. A call after a crash
        continues the end. Raises LeaseLost."""
        row = self.get(batch)
        if row is None or row.status in ENDED:
            return
        reason = row.ends or ("cancelled" if row.status == "cancelling" else reason)
        if row.ends is None:
            with self._base.transaction(self.holder) as db:
                if reason == "completed" and self.pending(batch):
                    raise LeaseLost  # another holder has repaired the batch meanwhile
                db.execute("UPDATE batches SET ends = ? WHERE id = ?", (reason, batch))
                if row.status == "in_progress":
                    self._set(row, "finalizing")
        while True:
            with self._base.transaction(self.holder) as db:
                query = (
                    "SELECT line, custom_id FROM lines WHERE batch = ? AND state = 0 ORDER BY line LIMIT ?"
                )
                undone = self._base.rows(query, batch, _CHUNK)
                self._append(
                    batch,
                    [
                        _Written(r["line"], False, undone_record(batch, r["custom_id"], _UNDONE[reason]))
                        for r in undone
                    ],
                )
                if undone:
                    continue
                self._close(batch, reason)
                db.execute("DELETE FROM lines WHERE batch = ?", (batch,))
                return

    def _close(self, batch: str, reason: EndReason) -> None:
        """Cut the output files at their committed ends, add their rows, and set the final status. Call in a
        transaction."""
        row = self.get(batch)
        assert row is not None
        for name, end in ((row.output, row.output_end), (row.error, row.error_end)):
            if end:
                os.truncate(self._files.path(name), end)
                self._files.add_row(
                    name, row.owner, "batch_output", f"{batch}_{name.split('-')[-1]}.jsonl", end
                )
            else:
                self._files.path(name).unlink(missing_ok=True)
        self._set(row, reason)

    def _append(self, batch: str, records: Sequence[_Written]) -> None:
        """Write records after the committed ends, flush, and update rows and ends. Call in a transaction."""
        # The bytes are on the disk before the commit, so a committed row always has its record.
        row = self.get(batch)
        if row is None or not records:
            return
        db = self._base.db
        for good, name, end in ((True, row.output, row.output_end), (False, row.error, row.error_end)):
            mine = [record for record in records if record.good is good]
            if not mine:
                continue
            write_at(self._files.path(name), end, [record.data for record in mine])
            state = COMPLETED if good else FAILED
            updates = []
            for record in mine:
                updates.append((state, end, len(record.data), digest_of(record.data), batch, record.line))
                end += len(record.data)
            db.executemany(
                "UPDATE lines SET state = ?, at = ?, length = ?, digest = ? WHERE batch = ? AND line = ?",
                updates,
            )
            column, count = ("output_end", "completed") if good else ("error_end", "failed")
            db.execute(
                f"UPDATE batches SET {column} = ?, {count} = {count} + ? WHERE id = ?",
                (end, len(mine), batch),
            )

    def repair(self, batch: str) -> Iterator[int]:
        """Compare each record of a batch with its digest, and set the lines of damaged records to pending.

        Yields numbers of damaged records, so that the caller can do other work in between: see ``repaired``.
        Raises LeaseLost.
        """
        row = self.get(batch)
        if row is None:
            return
        for good, name in ((True, row.output), (False, row.error)):
            yield from repaired(self._base, self._files.path(name), batch, good, self.holder)

    def purge(self, retention: float) -> None:
        """Delete batches and files whose retention has ended. Raises LeaseLost."""
        # A batch ends at `expires` at the latest, so its row lives at least as long as its output files.
        before = int(self._clock() - retention)
        with self._base.transaction(self.holder) as db:
            db.execute(f"DELETE FROM batches WHERE expires < ? AND status NOT IN {_ACTIVE_SQL}", (before,))
            used: Iterable[str] = [
                name for row in self.active() for name in (row.input, row.output, row.error)
            ]
            self._files.purge(set(used))

    def _set(self, row: BatchRow, status: str) -> None:
        """Set the status of a batch, and its time. Call in a transaction."""
        current = self.get(row.id)
        times = {**(row if current is None else current).times, status: int(self._clock())}
        self._base.db.execute(
            "UPDATE batches SET status = ?, times = ? WHERE id = ?", (status, json.dumps(times), row.id)
        )


def _batch(row: Any) -> BatchRow:
    found = {name: row[name] for name in BatchRow._fields}
    for name, default in (("metadata", None), ("errors", []), ("times", {})):
        found[name] = default if found[name] is None else json.loads(found[name])
    return BatchRow(**found)
