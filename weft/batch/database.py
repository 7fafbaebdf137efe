"""The database of a batch folder: tables, transactions, and the lease of the API server that runs batches.

    DIR/batches.sqlite      rows of files, batches and lines (WAL)
    DIR/files/ID            contents: inputs, and outputs that grow while their batch runs

Every file has mode 0600, and every folder 0700. Several processes of one host may open the same folder. All
times are seconds since 1970.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.common.errors import ConfigError

LEASE_S = 10.0
"""Seconds of a lease after its last renewal. No other API server takes the lease before."""
BUSY_S = 10.0
"""Seconds for which a transaction waits for another process."""
VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    purpose TEXT NOT NULL, name TEXT NOT NULL, bytes INTEGER NOT NULL, created INTEGER NOT NULL,
    expires INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS files_of ON files (owner, number);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    endpoint TEXT NOT NULL, input TEXT NOT NULL, metadata TEXT, status TEXT NOT NULL, seed INTEGER NOT NULL,
    ends TEXT, errors TEXT, created INTEGER NOT NULL, expires INTEGER NOT NULL, times TEXT NOT NULL,
    output TEXT NOT NULL, error TEXT NOT NULL, output_end INTEGER NOT NULL DEFAULT 0,
    error_end INTEGER NOT NULL DEFAULT 0, total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS batches_of ON batches (owner, number);
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT NOT NULL, line INTEGER NOT NULL, place INTEGER NOT NULL, start INTEGER NOT NULL,
    size INTEGER NOT NULL, custom_id TEXT NOT NULL, state INTEGER NOT NULL DEFAULT 0,
    at INTEGER, length INTEGER, digest BLOB, model TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (batch, line)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lease (one INTEGER PRIMARY KEY CHECK (one = 1), holder TEXT NOT NULL,
    until REAL NOT NULL);
"""


class LeaseLost(Exception):
    """Another API server runs the batches now."""


class BatchDatabase:
    """Connection of one process. Used from one thread at a time."""

    def __init__(self, folder: Path) -> None:
        """Open the folder and the database. Makes missing ones. Raises ConfigError for an unusable folder,
        and for a folder of a later release."""
        self.files = folder / "files"
        try:
            self.files.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            path = folder / "batches.sqlite"
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self.db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            # Files beside the database (-wal, -shm) get the mode of the database.
            self.db.execute("PRAGMA journal_mode = WAL")
            self.db.execute("PRAGMA synchronous = FULL")
            self.db.row_factory = sqlite3.Row
            version = self.db.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise ConfigError(
                    "--batch-dir was written by a later release; name another folder", param="--batch-dir"
                )
            # `executescript` commits by itself, so the tables come before any transaction.
            self.db.executescript(_TABLES)
            self._add_models()
            self.db.execute(f"PRAGMA user_version = {VERSION}")
        except (OSError, sqlite3.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(f"--batch-dir cannot be used: {reason}", param="--batch-dir") from None

    def _add_models(self) -> None:
        """Add the column ``model`` to a table of an earlier release. Old lines have the model ""."""
        with self.transaction() as db:
            names = [row["name"] for row in db.execute("PRAGMA table_info(lines)")]
            if "model" not in names:
                db.execute("ALTER TABLE lines ADD COLUMN model TEXT NOT NULL DEFAULT ''")

    def close(self) -> None:
        """Close the connection."""
        self.db.close()

    @contextlib.contextmanager
    def transaction(self, holder: str | None = None) -> Iterator[sqlite3.Connection]:
        """Open an exclusive write transaction. Commit at the end, or roll back after an exception.

        ``holder``: raise LeaseLost unless ``holder`` has the lease. A process that lost the lease during a
        suspension therefore writes no byte of an output.
        """
        self.db.execute("BEGIN IMMEDIATE")
        try:
            if holder is not None:
                row = self.db.execute("SELECT holder FROM lease").fetchone()
                if row is None or row["holder"] != holder:
                    raise LeaseLost
            yield self.db
            self.db.execute("COMMIT")
        except BaseException:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            raise

    def rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """Return all rows of a query."""
        return self.db.execute(query, values).fetchall()

    def row(self, query: str, *values: Any) -> sqlite3.Row | None:
        """Return the first row of a query; None without rows."""
        found: sqlite3.Row | None = self.db.execute(query, values).fetchone()
        return found

    # -- the lease

    def take_lease(self, holder: str, now: float) -> bool:
        """Take or renew the lease. Return False while another holder has the lease.

        A lease that ends more than ``2 * LEASE_S`` from now counts as ended: a clock was set back.
        """
        row = self.row("SELECT holder, until FROM lease")
        if row is not None and row["holder"] != holder and now < row["until"] <= now + 2 * LEASE_S:
            return False
        with self.transaction() as db:
            row = self.row("SELECT holder, until FROM lease")
            if row is not None and row["holder"] != holder and now < row["until"] <= now + 2 * LEASE_S:
                return False
            db.execute("INSERT OR REPLACE INTO lease VALUES (1, ?, ?)", (holder, now + LEASE_S))
        return True

    def release_lease(self, holder: str) -> None:
        """End the lease of the holder, so that another API server takes it at once."""
        with self.transaction() as db:
            db.execute("DELETE FROM lease WHERE holder = ?", (holder,))
