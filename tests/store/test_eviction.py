"""Budget, shares of payers, flush."""

from __future__ import annotations

import os

import pytest

from tests.store.stores import MIB, Clock, files, get, open_store, put, record
from weft.store import eviction
from weft.store.errors import RecordGone
from weft.store.records import Owner

SIZE = 250_000  # four records fill a segment of 1 MiB, with the page of each header


def used(folder) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def test_the_coldest_segments_go(tmp_path):
    clock = Clock()
    store = open_store(tmp_path, clock=clock)
    for number in range(75):
        clock.seconds += 10
        assert put(store, record(number), SIZE) == ""
        assert get(store, record(0), SIZE)  # always in use
        store.maintain()
        assert used(tmp_path) <= 16 * MIB
    stats = store.stats()
    there = [n for n in range(75) if store.has(record(n))]
    assert 0 in there
    assert there[-40:] == list(range(35, 75))
    assert stats.evicted == 75 - len(there)
    assert stats.nbytes == used(tmp_path)
    gone = store.take_changes().gone
    assert not gone or len(gone) == stats.evicted


def test_the_budget_counts_other_namespaces_and_spares_living_writers(tmp_path):
    other = open_store(tmp_path, namespace="a" * 32)
    for number in range(20):
        put(other, record(number), SIZE)
    held = files(tmp_path, "a" * 32)
    store = open_store(tmp_path)
    for number in range(66):
        assert put(store, record(number), SIZE) == ""
    assert used(tmp_path) <= 16 * MIB
    assert [file for file in held if file.exists()] == [other._writer.segment.path]
    other.scan()
    assert [n for n in range(20) if other.has(record(n))] == [16, 17, 18, 19]


def test_a_payer_over_its_share_loses_first(tmp_path):
    store = open_store(tmp_path)
    small, large = Owner(payer="small"), Owner(payer="large")
    for number in range(8):  # the coldest records are those of the small payer
        put(store, record(number), SIZE, small)
    for number in range(8, 75):
        assert put(store, record(number), SIZE, large) == ""
        assert used(tmp_path) <= 16 * MIB
    assert all(get(store, record(n), SIZE) for n in range(8))
    assert store.stats().evicted >= 8
    assert store.has(record(74))
    again = open_store(tmp_path)
    assert all(again.has(record(n)) == store.has(record(n)) for n in range(72))


@pytest.mark.parametrize("sealed", [True, False])
def test_flush_by_owner(tmp_path, sealed):
    store, namesake = open_store(tmp_path), open_store(tmp_path, namespace="b" * 32)
    owners = [Owner("p", "s", "x"), Owner("p", "", "y"), Owner("q", "s", ""), Owner()]
    for number in range(8):
        put(store, record(number), 9000, owners[number % 4])
    put(namesake, record(0), 9000, owners[0])
    if sealed:
        store.seal()
        namesake.seal()
    before = [file.read_bytes() for file in files(tmp_path)]
    assert store.flush(session="x") == 3
    assert [n for n in range(8) if store.has(record(n))] == [1, 2, 3, 5, 6, 7]
    # The bytes are gone from the files.
    with pytest.raises(RecordGone):
        get(namesake, record(0), 9000)
    assert namesake.stats().gone == 1
    text = b"".join(file.read_bytes() for file in files(tmp_path))
    assert before[0][8192 : 8192 + 9000] not in text
    assert before[0][24576:30000] in text
    assert store.flush(payer="q", salt="s") == 2
    assert store.flush(payer="q") == 0
    assert store.flush(payer="", salt="", session="") == 2
    assert [n for n in range(8) if store.has(record(n))] == [1, 5]
    store.close()
    again = open_store(tmp_path)
    assert get(again, record(1), 9000)
    assert [n for n in range(8) if again.has(record(n))] == [1, 5]
    assert again.flush() == 2
    assert files(tmp_path) == []


def test_flush_reaches_the_segment_that_another_process_writes(tmp_path):
    one, two = open_store(tmp_path), open_store(tmp_path)
    for number in range(4):
        put(one, record(number), 9000, Owner(session="s" if number % 2 else "t"))
    assert two.flush(session="s") == 2
    with pytest.raises(RecordGone):
        get(one, record(1), 9000)
    assert get(one, record(2), 9000)
    two.flush()
    assert put(one, record(9), 9000) == ""
    assert get(one, record(9), 9000)
    assert [n for n in range(10) if one.has(record(n))] == [9]


def test_files_that_processes_left_behind_are_removed(tmp_path):
    clock = Clock()
    store = open_store(tmp_path, clock=clock)
    left = store._folder / ("0" * 16 + "-" + "0" * 8 + ".new")
    left.write_bytes(bytes(100))
    os.utime(left, (clock.seconds, clock.seconds))
    store.maintain()
    assert left.exists()
    clock.seconds += 700
    store.maintain()
    assert not left.exists()


def test_folders_of_other_users_are_left_out(tmp_path, monkeypatch):
    """Several users may share a root such as /tmp: nobody counts, reads or removes the files of others."""
    put(open_store(tmp_path), record(1))
    assert len(list(eviction.files_of(tmp_path))) == 1
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert not list(eviction.files_of(tmp_path))
