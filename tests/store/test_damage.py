"""Damaged files: a record comes back with the written bytes, or not at all."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from tests.store.stores import Unsynced, files, get, open_store, put, record
from weft.store.disk import Disk
from weft.store.errors import RecordCorrupt, RecordError, StoreOff

COUNT, SIZE = 3, 3000
_RECORD = 4096 + 4096
END = 4096 + COUNT * _RECORD  # place of the footer


@pytest.fixture
def whole(tmp_path) -> Path:
    """Return a sealed segment with three records."""
    store = open_store(tmp_path)
    for number in range(COUNT):
        put(store, record(number), SIZE)
    store.close()
    return files(tmp_path)[0]


def readable(folder: Path) -> tuple[set[int], int]:
    """Return the numbers of the records that come back, and the damage counted. Fails for wrong bytes."""
    store, right = open_store(folder, disk=Unsynced()), set()
    for number in range(COUNT):
        try:
            assert get(store, record(number), SIZE), f"record {number} has wrong bytes"
            right.add(number)
        except RecordError:
            assert not store.has(record(number)), "a record that cannot be read is still there"
    assert not store.off
    stats = store.stats()
    return right, stats.damaged + stats.corrupt + stats.gone


def test_cuts_at_every_512_bytes(tmp_path, whole):
    data = whole.read_bytes()
    assert len(data) == END + 2 * 4096
    for size in range(0, len(data), 512):
        whole.write_bytes(data[:size])
        right, damage = readable(tmp_path)
        # Records whose bytes are all there come back: a cut costs what it cuts off.
        assert right == {n for n in range(COUNT) if size >= 4096 + (n + 1) * _RECORD}, size
        # A cut between two records, or between footer and trailer, looks like a writer that died.
        assert damage or size in range(4096, len(data) + 1, _RECORD), size


def test_flips_everywhere(tmp_path, whole):
    data, draw = whole.read_bytes(), random.Random(1)
    header, body = range(4096, 8192), range(8192, 8192 + SIZE)
    places = [*draw.sample(range(4096), 8), *draw.sample(header, 16), *draw.sample(body, 16)]
    places += draw.sample(range(END, len(data)), 24)
    caught = 0
    for at in places:
        flipped = bytearray(data)
        flipped[at] ^= 1 << draw.randrange(8)
        whole.write_bytes(flipped)
        right, damage = readable(tmp_path)
        if at < 4096:
            assert right == set()
            assert damage == 1
        elif at < END:
            assert right == {1, 2}, at
            assert damage, at
            caught += 1
        else:
            assert right == {0, 1, 2}, at  # the headers hold all that a footer has
    assert caught == 32


def test_flips_of_a_segment_without_footer(tmp_path, whole):
    data, draw = whole.read_bytes()[:END], random.Random(2)
    for at in [*draw.sample(range(4096, 8192), 8), *draw.sample(range(8192, 8192 + SIZE), 8)]:
        flipped = bytearray(data)
        flipped[at] ^= 1 << draw.randrange(8)
        whole.write_bytes(flipped)
        right, damage = readable(tmp_path)
        assert right == {1, 2}, at
        assert damage, at


def test_records_at_another_place_or_in_another_segment_do_not_count(tmp_path, whole):
    data = whole.read_bytes()
    one, two = data[4096 : 4096 + _RECORD], data[4096 + _RECORD : 4096 + 2 * _RECORD]
    whole.write_bytes(data[:4096] + two + one + data[4096 + 2 * _RECORD :])
    assert readable(tmp_path)[0] == {2}
    other = open_store(tmp_path)
    put(other, record(7), SIZE)
    other.close()
    strange = next(file for file in files(tmp_path) if file != whole)
    whole.write_bytes(strange.read_bytes()[:4096] + data[4096:])
    assert readable(tmp_path)[0] == set()


def test_a_payload_of_another_record_is_found(tmp_path, whole):
    """The header is right, and the payload is that of another record of equal size."""
    data = bytearray(whole.read_bytes())
    data[8192 : 8192 + SIZE] = data[8192 + _RECORD : 8192 + _RECORD + SIZE]
    whole.write_bytes(data)
    store = open_store(tmp_path)
    with pytest.raises(RecordCorrupt):
        get(store, record(0), SIZE)
    assert store.stats().corrupt == 1
    assert store.take_changes().gone == [(0, record(0).key)]
    assert get(store, record(1), SIZE)


class Failing(Disk):
    """A disk whose calls fail from the n-th on."""

    def __init__(self, call: str, number: int, times: int) -> None:
        super().__init__(direct=False)
        self.call, self.number, self.times = call, number, times

    def _fail(self, call: str) -> None:
        if call == self.call:
            self.times -= 1
            if self.times < 0:
                raise OSError(self.number, "the disk failed")

    def write(self, *args) -> None:
        self._fail("write")
        super().write(*args)

    def read(self, *args) -> int:
        self._fail("read")
        return super().read(*args)

    def allocate(self, *args) -> None:
        self._fail("allocate")
        super().allocate(*args)

    def sync(self, *args) -> None:
        self._fail("sync")
        super().sync(*args)


@pytest.mark.parametrize(
    ("call", "number"),
    [("write", errno.ENOSPC), ("allocate", errno.ENOSPC), ("sync", errno.EIO), ("write", errno.EIO)],
)
def test_a_failing_disk_turns_the_store_off(tmp_path, caplog, call, number):
    store = open_store(tmp_path, disk=Failing(call, number, 1 if call == "sync" else 0))
    answers = [put(store, record(n), 300_000) for n in range(8)]
    assert answers[-1] == "off"
    assert store.off.startswith("the disk failed: ")
    assert store.find(0, record(0).key) is None
    assert put(store, record(9)) == "off"
    with pytest.raises(StoreOff):
        get(store, record(0), 300_000)
    store.scan()
    store.maintain()
    store.close()
    assert [line.message for line in caplog.records if "disk tier is off" in line.message] != []
    assert len([line for line in caplog.records if "disk tier is off" in line.message]) == 1
    assert not list(tmp_path.rglob("*.new"))
    # What was stored before is there for the next process.
    again = open_store(tmp_path)
    assert all(get(again, record(n), 300_000) for n, why in enumerate(answers) if not why)


def test_a_failing_read_turns_the_store_off(tmp_path):
    store = open_store(tmp_path, disk=Failing("read", errno.EIO, 1))
    put(store, record(1))
    assert get(store, record(1))
    with pytest.raises(StoreOff):
        get(store, record(1))
    assert store.off
    assert store.find(0, record(1).key) is None


def test_a_vanished_folder_is_made_again(tmp_path):
    store = open_store(tmp_path)
    put(store, record(1))
    store.flush()
    (tmp_path / store._folder.name).rmdir()
    assert put(store, record(2)) == ""
    assert get(store, record(2))
    assert not store.off
