"""Records come back with the same bytes, in this process, after a restart, and in other processes."""

from __future__ import annotations

import os
import stat

import numpy as np
import pytest

from tests.store.stores import MIB, NAMESPACE, Clock, files, get, open_store, payload, put, record
from weft.common.errors import ConfigError
from weft.store import disk, layout
from weft.store.errors import RecordGone
from weft.store.records import Owner, RecordBuffer

SIZES = (1, 4095, 4096, 65_536, 65_537, 300_000)


def test_records_of_every_size_come_back(tmp_path):
    store = open_store(tmp_path)
    for number, size in enumerate(SIZES):
        assert put(store, record(number), size) == ""
        assert get(store, record(number), size)
    store.close()
    again = open_store(tmp_path)
    assert all(get(again, record(number), size) for number, size in enumerate(SIZES))
    assert again.stats().records == len(SIZES)
    assert again.stats().damaged == 0
    assert list(again.take_changes().added) == [(0, record(n).key) for n in range(len(SIZES))]


def test_a_reused_buffer_leaves_nothing_of_an_earlier_record(tmp_path):
    store, buffer = open_store(tmp_path), RecordBuffer(9000)
    buffer.payload[:] = 0xAA
    store.write(record(1), buffer, 9000)
    buffer.payload[:] = 0xBB
    store.write(record(2), buffer, 10)
    store.close()
    data = files(tmp_path)[0].read_bytes()
    begin = 4096 + 4096 + 12288 + 4096
    assert data[begin : begin + 4096] == b"\xbb" * 10 + bytes(4086)


def test_a_record_is_written_once_and_parts_make_a_block(tmp_path):
    store = open_store(tmp_path)
    one, two = record(1, part=0, parts=2), record(1, part=1, parts=2)
    assert put(store, one) == ""
    assert put(store, one) == "there"
    assert store.has(one)
    assert store.find(0, one.key) is None
    assert store.take_changes().added == []
    assert put(store, two, 500) == ""
    found = store.find(0, one.key)
    assert found is not None
    assert (found.parts, found.nbytes) == (2, 10_500)
    assert store.take_changes().added == [(0, one.key)]
    assert store.find(1, one.key) is None
    assert get(store, two, 500)
    assert store.stats().skipped == {"there": 1}


def test_segments_are_filled_sealed_and_private(tmp_path):
    store = open_store(tmp_path)
    for number in range(12):
        assert put(store, record(number), 200_000) == ""
    assert len(files(tmp_path)) == 3
    assert all(get(store, record(n), 200_000) for n in range(12))
    store.close()
    assert stat.S_IMODE((tmp_path / NAMESPACE).stat().st_mode) == 0o700
    for file in files(tmp_path):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.stat().st_size <= MIB
    # A sealed segment gives the unused space back.
    assert sum(file.stat().st_blocks * 512 for file in files(tmp_path)) < 12 * 210_000


def test_two_stores_share_a_folder(tmp_path):
    one, two = open_store(tmp_path), open_store(tmp_path)
    put(one, record(1))
    put(two, record(2))
    two.scan()
    assert not two.has(record(1))  # not sealed yet
    one.seal()
    two.scan()
    assert get(two, record(1))
    assert get(two, record(2))
    assert two.take_changes().added == [(0, record(2).key), (0, record(1).key)]
    two.flush(payer="")
    assert not two.has(record(1))
    assert not two.has(record(2))
    with pytest.raises(RecordGone):
        get(one, record(1))
    put(one, record(3))
    one.seal()
    one.scan()
    assert one.take_changes() == ([(0, record(3).key)], [(0, record(1).key)], False)
    assert not one.stats().corrupt


def test_a_segment_of_a_dead_writer_is_sealed_by_the_next_process(tmp_path):
    store = open_store(tmp_path)
    put(store, record(1))
    put(store, record(2))
    store._leave()  # the descriptor is closed, as by the end of the process
    again = open_store(tmp_path)
    assert get(again, record(1))
    assert get(again, record(2))
    assert again.stats().damaged == 0
    size = files(tmp_path)[0].stat().st_size
    assert size < MIB, "no footer was written"
    third = open_store(tmp_path)
    assert get(third, record(2))


def test_a_quiet_folder_is_listed_only_now_and_then(tmp_path):
    clock = Clock()
    one, two = open_store(tmp_path), open_store(tmp_path, clock=clock)
    folder = tmp_path / NAMESPACE
    put(one, record(1))
    two.scan()
    one.seal()
    put(one, record(2))  # a new file, at a time of the folder that two scans have seen
    os.utime(folder, (1, 1))
    two.scan()
    assert two.has(record(1))
    one.seal()
    os.utime(folder, (1, 1))
    two.scan()
    assert two.has(record(2))
    put(one, record(3))
    one.seal()
    os.utime(folder, (1, 1))
    two.scan()
    assert not two.has(record(3))
    clock.seconds += 11
    two.scan()
    assert two.has(record(3))


def test_other_namespaces_and_versions_are_not_read(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    put(store, record(1))
    store.close()
    other = open_store(tmp_path, namespace="f" * 32)
    assert not other.has(record(1))
    # A file of another namespace under this name is refused by the bytes, too.
    os.link(files(tmp_path)[0], tmp_path / ("f" * 32) / ("0" * 16 + "-" + "0" * 8 + ".kv"))
    other.scan()
    assert not other.has(record(1))
    assert other.stats().damaged == 1
    other.scan()
    assert other.stats().damaged == 1  # looked at once
    monkeypatch.setattr(layout, "VERSION", 2)
    later = open_store(tmp_path)
    assert not later.has(record(1))
    assert later.stats().damaged == 1


def test_records_end_with_their_time(tmp_path):
    clock = Clock()
    store = open_store(tmp_path, clock=clock, ttl=100.0)
    put(store, record(1))
    clock.seconds += 60
    put(store, record(2))
    clock.seconds += 60
    assert store.find(0, record(1).key) is None
    assert store.find(0, record(2).key) is not None
    with pytest.raises(RecordGone):
        get(store, record(1))
    store.maintain()
    assert store.stats().expired == 1
    assert not store.has(record(1))
    assert store.has(record(2))
    clock.seconds += 60
    store.maintain()
    assert store.stats().records == 0
    assert files(tmp_path) == []


def test_a_limit_of_writes_skips(tmp_path):
    clock = Clock()
    store = open_store(tmp_path, clock=clock, write_rate=10_000.0)
    assert [put(store, record(n), 8000) for n in range(3)] == ["", "", "rate"]
    clock.seconds += 1.0
    assert put(store, record(3), 8000) == ""
    assert put(store, record(4), 2 * MIB) == "large"


def test_only_private_folders_of_local_disks(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / NAMESPACE).symlink_to("/tmp")
    with pytest.raises(ConfigError, match="no folder"):
        open_store(tmp_path)
    (tmp_path / NAMESPACE).unlink()
    (tmp_path / NAMESPACE).mkdir(mode=0o755)
    open_store(tmp_path)
    assert stat.S_IMODE((tmp_path / NAMESPACE).stat().st_mode) == 0o700
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "22 1 0:21 / / rw - ext4 /dev/vda rw\n"
        f"23 22 0:22 / {str(tmp_path).replace(' ', chr(92) + '040')} rw shared:1 - nfs4 host:/x rw\n"
    )
    monkeypatch.setattr(disk, "_MOUNTS", mounts)
    with pytest.raises(ConfigError, match=r"network file system \(nfs4\).*--kv-disk-shared"):
        open_store(tmp_path)
    put(open_store(tmp_path, shared=True), record(1))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match=r"another user|other users"):
        open_store(tmp_path, shared=True)


def test_an_existing_root_keeps_its_permissions_and_other_contents(tmp_path):
    """A user may name a folder with other files: nothing of them is removed, however old."""
    root, clock = tmp_path / "root", Clock()
    root.mkdir(mode=0o755)
    for name in ("empty", "photos", NAMESPACE):
        (root / name).mkdir(mode=0o755)
    others = [root / "note.kv", root / "photos" / "old.kv", root / NAMESPACE / "old.txt"]
    others += [root / NAMESPACE / "mine.kv", root / "photos" / ("0" * 16 + "-" + "0" * 8 + ".kv")]
    for file in others:
        file.write_bytes(bytes(1000))
        os.utime(file, (1, 1))
    store = open_store(root, clock=clock, ttl=100.0)
    assert [put(store, record(number), 200_000) for number in range(90)] == [""] * 90
    clock.seconds += 10_000
    store.maintain()
    store.flush(payer="")
    store.flush()
    store.close()
    assert all(file.stat().st_size == 1000 for file in others)
    assert (root / "empty").is_dir()
    assert stat.S_IMODE(root.stat().st_mode) == 0o755
    root.chmod(0o777)
    with pytest.raises(ConfigError, match="other users can change"):
        open_store(root)
    root.chmod(0o1777)
    open_store(root)
    with pytest.raises(ConfigError, match="no folder"):
        open_store(others[0])


def test_a_small_budget_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least 16M"):
        open_store(tmp_path, budget=MIB)


def test_long_payloads_have_longer_spans():
    spans = layout.spans_of(200 << 20)
    assert len(spans) <= 470
    assert spans[:, 1].sum() == 200 << 20
    assert len(layout.spans_of(0)) == 0
    assert len(layout.spans_of(65_537)) == 2


def test_owners_reach_the_disk_as_hashes(tmp_path):
    store = open_store(tmp_path)
    put(store, record(1), owner=Owner("payer-name", "salt-name", "session-name"))
    store.close()
    data = files(tmp_path)[0].read_bytes()
    assert not any(name in data for name in (b"payer-name", b"salt-name", b"session-name"))
    assert payload(record(1), 10_000).tobytes() in data
    assert np.frombuffer(data[-4096:], np.uint8).any()


def test_an_open_segment_is_published(tmp_path):
    """Other processes read the records of an open segment, and later records of the same file."""
    clock = Clock()
    one, two = open_store(tmp_path, clock=clock), open_store(tmp_path, clock=clock)
    for number in range(1, 4):
        put(one, record(number))
        two.scan()
        assert not two.has(record(number))
        clock.seconds += 11
        one.maintain()
        two.scan()
        assert get(two, record(number))
        assert [block[1] for block in two.take_changes().added] == [
            record(n).key for n in range(1, number + 1)
        ]
    put(one, record(4))
    two.scan()
    assert get(two, record(1))  # the footer is overwritten: what was read before stays
    assert len(files(tmp_path)) == 1
    one._leave()  # as by the end of the process, without a footer for the last record
    third = open_store(tmp_path)
    assert all(get(third, record(number)) for number in range(1, 5))
    assert third.stats().damaged == 0


def test_a_published_segment_that_another_process_removes(tmp_path):
    """The next footer of a removed file does not turn the store off."""
    clock = Clock()
    one, two = open_store(tmp_path, clock=clock), open_store(tmp_path, clock=clock)
    put(one, record(1))
    two.flush()
    clock.seconds += 11
    one.maintain()
    assert not one.off
    assert not one.has(record(1))
    put(one, record(1))
    assert get(one, record(1))


def test_a_segment_with_new_and_removed_records(tmp_path):
    """The writer removes as many records as it adds before the next look of another process."""
    clock = Clock()
    one, two = open_store(tmp_path, clock=clock), open_store(tmp_path, clock=clock)
    for number in (1, 2):
        put(one, record(number), owner=Owner(salt=f"s{number}"))
    clock.seconds += 11
    one.maintain()
    two.scan()
    assert two.has(record(2))
    one.flush(salt="s1")
    put(one, record(3))
    one.seal()
    clock.seconds += 11
    two.scan()
    assert not two.has(record(1))
    assert get(two, record(2))
    assert get(two, record(3))
