"""The store of batches: outputs exactly once after a crash at any write, the lease, and owners."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.slow import mostly_slow
from weft.batch import records
from weft.batch import store as store_module
from weft.batch.database import LEASE_S, BatchDatabase, LeaseLost
from weft.batch.files import BatchFiles
from weft.batch.lines import CHAT, BatchAnswer, Checks
from weft.batch.runner import LineOutput
from weft.batch.store import DAY, BatchStore
from weft.common.errors import ConfigError, Overloaded

CHECKS = Checks(CHAT, {"m"}.__contains__)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Place:
    """An open batch folder."""

    def __init__(self, folder: Path, clock: Callable[[], float] | None = None) -> None:
        self.clock = clock or Clock()
        self.base = BatchDatabase(folder)
        # The tests end processes, not the machine: no flush is needed, and flushes are slow.
        self.base.db.execute("PRAGMA synchronous = OFF")
        self.files = BatchFiles(self.base, self.clock, 7 * DAY)
        self.store = BatchStore(self.base, self.files, self.clock)
        assert self.base.take_lease(self.store.holder, self.clock())

    def upload(self, count: int, owner: str = "me") -> str:
        incoming = self.files.incoming()
        for number in range(count):
            body = {"model": "m", "messages": [{"role": "user", "content": f"{number}"}]}
            one = {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body}
            incoming.write(json.dumps(one).encode() + b"\n")
        return self.files.keep(incoming, owner, "in.jsonl").id

    def begin(self, count: int) -> str:
        batch = self.store.create("me", CHAT, self.upload(count), {"k": "v"})
        self.store.validate(batch, CHECKS, 1000)
        return batch

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self.base.release_lease(self.store.holder)
        self.base.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "batches")
    yield made
    made.close()


def outputs(batch: str, *lines: int) -> list[LineOutput]:
    """Return an answer of each line. Line 2 fails."""
    return [
        LineOutput(batch, n, n != 2, BatchAnswer(400 if n == 2 else 200, "r", b'{"n":%d}' % n)) for n in lines
    ]


def contents(place: Place, batch: str) -> tuple[list[str], list[str]]:
    """Return the ids in the output file and in the error file."""
    row = place.store.get(batch)
    assert row is not None
    found = []
    for name in (row.output, row.error):
        path = place.files.path(name)
        lines = path.read_text().splitlines() if path.exists() else []
        found.append([json.loads(line)["custom_id"] for line in lines])
    return found[0], found[1]


def test_a_batch_runs_from_upload_to_its_files(place: Place) -> None:
    batch = place.begin(5)
    row = place.store.get(batch)
    assert row is not None
    assert (row.status, row.total, row.metadata) == ("in_progress", 5, {"k": "v"})
    assert place.store.pending(batch) == (0, 1, 2, 3, 4)
    assert place.store.line(batch, 3).custom_id == "c3"
    place.store.record(outputs(batch, 0, 1, 2))
    place.store.record(outputs(batch, 2, 3, 0))  # a second output of a line is dropped
    assert place.store.pending(batch) == (4,)
    place.store.record(outputs(batch, 4))
    place.store.finalize(batch, "completed")
    row = place.store.get(batch)
    assert row is not None
    assert (row.status, row.completed, row.failed) == ("completed", 4, 1)
    assert contents(place, batch) == (["c0", "c1", "c3", "c4"], ["c2"])
    assert [place.files.get(name, "me").bytes for name in (row.output, row.error)] == [  # type: ignore[union-attr]
        row.output_end,
        row.error_end,
    ]
    for path in [*place.base.files.iterdir(), *place.base.files.parent.glob("batches*")]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 or path.is_dir(), path


@pytest.mark.parametrize(("how", "code"), [("expired", "batch_expired"), ("cancelled", "batch_cancelled")])
def test_undone_lines_are_in_the_error_file(place: Place, how: Any, code: str) -> None:
    batch = place.begin(4)
    place.store.record(outputs(batch, 1))
    if how == "cancelled":
        assert place.store.cancel(batch)
    place.store.finalize(batch, how)
    assert contents(place, batch) == (["c1"], ["c0", "c2", "c3"])
    row = place.store.get(batch)
    assert row is not None
    assert (row.status, row.failed) == (how, 3)
    found = json.loads(place.files.path(row.error).read_text().splitlines()[0])
    assert (found["response"], found["error"]["code"]) == (None, code)
    assert not place.store.cancel(batch)


def test_a_wrong_file_fails_the_batch(place: Place) -> None:
    batch = place.store.create("me", "/v1/completions", place.upload(3), None)
    place.store.validate(batch, CHECKS._replace(endpoint="/v1/completions"), 1000)
    row = place.store.get(batch)
    assert row is not None
    assert row.status == "failed"
    assert [(error["code"], error["line"]) for error in row.errors] == [("invalid_url", n) for n in (1, 2, 3)]
    many = place.store.create("me", CHAT, place.upload(3), None)
    place.store.validate(many, CHECKS, 2)
    assert place.store.get(many).errors[0]["code"] == "token_limit_exceeded"  # type: ignore[union-attr]


# -- crashes


class Dying:
    """Ends the process at write number ``last``: before the write, or in its middle."""

    def __init__(self, last: int, torn: bool) -> None:
        self.count, self.last, self.torn = 0, last, torn
        self.active = False

    def look(self, half: Callable[[], object] | None = None) -> None:
        if not self.active:
            return
        self.count += 1
        if self.count == self.last:
            if self.torn and half is not None:
                half()
            os._exit(9)


def dying_process(dying: Dying, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every write of this process go through ``dying``."""
    pwrite, cut, move = os.pwrite, os.truncate, os.replace

    class Connection(sqlite3.Connection):
        def execute(self, query: str, *values: Any) -> sqlite3.Cursor:  # type: ignore[override]
            if not query.startswith(("SELECT", "PRAGMA")):
                dying.look()
            return super().execute(query, *values)

        def executemany(self, query: str, *values: Any) -> sqlite3.Cursor:  # type: ignore[override]
            dying.look()
            return super().executemany(query, *values)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, factory=Connection, **k))

    def write(file: int, data: memoryview, at: int) -> int:
        dying.look(lambda: pwrite(file, data[: len(data) // 2], at))
        return pwrite(file, data, at)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "fdatasync", lambda file: dying.look())
    monkeypatch.setattr(os, "truncate", lambda *a: (dying.look(), cut(*a)))
    monkeypatch.setattr(os, "replace", lambda *a: (dying.look(), move(*a)))


def work(place: Place, batch: str, dying: Dying | None = None) -> None:
    """Run a batch to its end, as the holder of the lease does after a start."""
    if dying is not None:
        dying.active = True
    place.store.validate(batch, CHECKS, 1000)
    sum(place.store.repair(batch))
    pending = place.store.pending(batch)
    for at in range(0, len(pending), 3):
        place.store.record(outputs(batch, *pending[at : at + 3]))
    place.store.finalize(batch, "completed")


@mostly_slow("torn", [False, True], [True])
def test_a_crash_at_any_write_loses_and_repeats_nothing(
    tmp_path: Path, torn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child process dies at each write in turn. The next process finishes the batch."""
    monkeypatch.setattr(os, "fdatasync", lambda file: None)
    number, died = 0, True
    while died:
        number += 1
        folder = tmp_path / str(number)
        first = Place(folder)
        batch = first.store.create("me", CHAT, first.upload(7), None)
        first.close()
        child = os.fork()
        if child == 0:
            with monkeypatch.context() as patched:
                dying = Dying(number, torn)
                dying_process(dying, patched)
                work(Place(folder), batch, dying)
            os._exit(0)
        died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        clock = Clock()
        clock.now += LEASE_S + 1
        second = Place(folder, clock)
        if second.store.get(batch).status != "completed":  # type: ignore[union-attr]
            work(second, batch)
        good, bad = contents(second, batch)
        assert sorted(good) == [f"c{n}" for n in (0, 1, 3, 4, 5, 6)], number
        assert bad == ["c2"]
        row = second.store.get(batch)
        assert row is not None
        assert (row.status, row.completed, row.failed) == ("completed", 6, 1)
        second.close()
    assert number > 20


def test_a_damaged_record_runs_again(place: Place) -> None:
    batch = place.begin(5)
    place.store.record(outputs(batch, 0, 1, 2, 3))
    row = place.store.get(batch)
    assert row is not None
    path = place.files.path(row.output)
    data = bytearray(path.read_bytes())
    data[data.index(b'"c1"') + 2] ^= 1
    path.write_bytes(data)
    assert sum(place.store.repair(batch)) == 1
    assert sum(place.store.repair(batch)) == 0
    assert place.store.pending(batch) == (1, 4)
    place.store.record(outputs(batch, 1, 4))
    place.store.finalize(batch, "completed")
    assert sorted(contents(place, batch)[0]) == ["c0", "c1", "c3", "c4"]


@pytest.mark.parametrize("slice_", [1, 64 << 20])
def test_a_record_damaged_after_the_last_line_runs_again(
    place: Place, slice_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash between the begin of the end and the end, and then a damaged disk."""
    monkeypatch.setattr(records, "SLICE", slice_)
    batch = place.begin(5)
    place.store.record(outputs(batch, 0, 1, 2, 3, 4))
    place.base.db.execute("UPDATE batches SET ends = 'completed', status = 'finalizing'")
    row = place.store.get(batch)
    assert row is not None
    path = place.files.path(row.output)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'{"n":3}', b'{"n":7}'))
    found = list(place.store.repair(batch))
    assert sum(found) == 1
    assert len(found) == (5 if slice_ == 1 else 2)
    assert place.store.pending(batch) == (3,)
    # A process that believes that all lines are done ends nothing.
    with pytest.raises(LeaseLost):
        place.store.finalize(batch, "completed")
    place.store.record(outputs(batch, 3))
    place.store.finalize(batch, "completed")
    assert sorted(contents(place, batch)[0]) == ["c0", "c1", "c3", "c4"]
    row = place.store.get(batch)
    assert row is not None
    assert (row.status, row.completed, row.failed) == ("completed", 4, 1)


def test_a_full_disk_keeps_no_part_of_an_upload(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    incoming = place.files.incoming()
    incoming.write(b"x")
    opened = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(OSError, match="No space"):
        place.files.keep(incoming, "me", "in.jsonl")
    assert not incoming.path.exists()
    assert len(os.listdir("/proc/self/fd")) == opened - 1
    assert place.files.load("me") == (0, 0)


def test_outputs_of_a_running_batch_count_for_its_key(place: Place) -> None:
    batch = place.begin(3)
    count, size = place.files.load("me")
    place.store.record(outputs(batch, 0, 2))
    row = place.store.get(batch)
    assert row is not None
    assert place.files.load("me") == (count, size + row.output_end + row.error_end)
    place.store.finalize(batch, "cancelled")
    row = place.store.get(batch)
    assert row is not None
    used = place.files.load("me")
    assert used == (count + 2, size + row.output_end + row.error_end)
    for most in ((used[0], 1 << 30), (10, used[1])):
        incoming = place.files.incoming()
        incoming.write(b"x")
        with pytest.raises(Overloaded, match="batch-max"):
            place.files.keep(incoming, "me", "in.jsonl", most=most)
        assert not incoming.path.exists()


def test_batches_of_a_key_are_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    file = place.upload(1)
    first = place.store.create("me", CHAT, file, None, 2)
    assert first is not None
    assert place.store.create("me", CHAT, file, None, 2) is not None
    assert place.store.create("me", CHAT, file, None, 2) is None
    assert place.files.delete(file) is not None
    assert place.files.get(file, "me") is not None
    monkeypatch.setattr(store_module, "MOST_ENDED", 3)
    last = []
    for _ in range(8):
        made = place.store.create("me", CHAT, file, None)
        assert made is not None
        place.store.finalize(made, "cancelled")
        last.append(made)
    rows, more = place.store.list("me", None, 20)  # type: ignore[misc]
    assert not more
    assert [row.id for row in rows][:3] == last[:-4:-1]
    assert len(rows) < 8
    assert first in [row.id for row in rows]


# -- the lease


def test_the_lease_has_one_holder_and_ends_after_10_s(place: Place, tmp_path: Path) -> None:
    batch = place.begin(3)
    other = BatchDatabase(tmp_path / "batches")
    now = place.clock()
    assert not other.take_lease("other", now + LEASE_S - 0.1)
    assert place.base.take_lease(place.store.holder, now + 5)
    assert not other.take_lease("other", now + LEASE_S + 1)
    assert other.take_lease("other", now + 5 + LEASE_S)
    before = contents(place, batch)
    with pytest.raises(LeaseLost):  # a process that was stopped writes no byte
        place.store.record(outputs(batch, 0))
    assert contents(place, batch) == before
    assert other.take_lease("other", now - 100_000)
    assert place.base.take_lease(place.store.holder, now - 200_000)  # the clock was set back
    place.base.release_lease(place.store.holder)
    assert other.take_lease("other", now - 200_000)
    other.close()


# -- files


def test_files_belong_to_their_key(place: Place) -> None:
    mine, theirs = place.upload(1), place.upload(2, owner="other")
    assert place.files.get(mine, "me") is not None
    assert place.files.get(theirs, "me") is None
    batch = place.store.create("other", CHAT, theirs, None)
    assert place.store.get(batch, "me") is None
    assert place.store.list("me", None, 10) == ([], False)
    assert place.store.list("me", batch, 10) is None
    assert place.files.list("me", None, theirs, 10, True) is None
    assert place.files.users(theirs) == batch
    assert place.store.load("other") == (1, 0)


def test_lists_have_pages(place: Place) -> None:
    ids = [place.upload(1) for _ in range(5)]
    found = place.files.list("me", "batch", None, 2, True)
    assert found is not None
    assert ([row.id for row in found[0]], found[1]) == ([ids[4], ids[3]], True)
    found = place.files.list("me", None, ids[2], 5, False)
    assert found is not None
    assert ([row.id for row in found[0]], found[1]) == ([ids[3], ids[4]], False)


def test_files_end_after_their_retention(tmp_path: Path) -> None:
    clock = Clock()
    place = Place(tmp_path / "b", clock)
    old = place.begin(2)
    unused = place.upload(1)
    orphan = place.files.incoming()
    orphan.write(b"x")
    os.utime(orphan.path, (0, 0))
    clock.now += 7 * DAY + 1
    assert place.base.take_lease(place.store.holder, clock.now)
    place.store.purge(7 * DAY)
    row = place.store.get(old)
    assert row is not None  # the batch has not ended
    assert place.files.path(row.input).exists()
    assert not place.files.path(unused).exists()
    assert not orphan.path.exists()
    place.store.finalize(old, "expired")
    row = place.store.get(old)
    assert row is not None
    place.store.purge(7 * DAY)
    # The batch names its output files for as long as these exist.
    assert place.store.get(old) is not None
    assert place.files.get(row.error, "me") is not None
    clock.now += 7 * DAY
    assert place.base.take_lease(place.store.holder, clock.now)
    place.store.purge(7 * DAY)
    assert place.store.get(old) is None
    assert place.files.get(row.error, "me") is None
    assert not place.files.path(row.input).exists()
    place.close()


def test_a_folder_of_a_later_release_is_refused(tmp_path: Path) -> None:
    base = BatchDatabase(tmp_path)
    base.db.execute("PRAGMA user_version = 99")
    base.close()
    with pytest.raises(ConfigError, match="later release"):
        BatchDatabase(tmp_path)


_OLD_LINES = """
CREATE TABLE lines (
    batch TEXT NOT NULL, line INTEGER NOT NULL, place INTEGER NOT NULL, start INTEGER NOT NULL,
    size INTEGER NOT NULL, custom_id TEXT NOT NULL, state INTEGER NOT NULL DEFAULT 0,
    at INTEGER, length INTEGER, digest BLOB, PRIMARY KEY (batch, line)) WITHOUT ROWID;
"""
"""Table of lines before lines had a column for their model."""
_OLD_COLUMNS = "batch, line, place, start, size, custom_id, state, at, length, digest"


def test_a_running_batch_of_an_earlier_release_goes_on(tmp_path: Path) -> None:
    place = Place(tmp_path)
    old = place.begin(4)
    place.store.record(outputs(old, 1))
    place.base.db.executescript(
        f"ALTER TABLE lines RENAME TO newer; {_OLD_LINES}"
        f"INSERT INTO lines ({_OLD_COLUMNS}) SELECT {_OLD_COLUMNS} FROM newer; DROP TABLE newer;"
    )
    place.close()
    place = Place(tmp_path)
    try:
        assert place.store.models(old) == {0: "m", 2: "m", 3: "m"}, "named by the input file"
        # An API server of the earlier release may still write: the column has a default.
        values = "'other', 0, 0, 0, 1, 'x', 1, 0, 1, ''"
        place.base.db.execute(f"INSERT INTO lines ({_OLD_COLUMNS}) VALUES ({values})")
        assert place.store.models(place.begin(2)) == {0: "m", 1: "m"}
        place.store.record(outputs(old, 0, 2, 3))
        place.store.finalize(old, "completed")
        assert contents(place, old) == (["c1", "c0", "c3"], ["c2"])
        place.close()
        place = Place(tmp_path)  # the second opening finds the column
        assert place.store.load("me") == (1, 2)
    finally:
        place.close()
