"""The host level: eviction by last use, and flushes by owner."""

from __future__ import annotations

import numpy as np

from weft.store.host import HostLevel
from weft.store.layout import owner_hashes
from weft.store.records import Owner


def level(slots: int = 4) -> HostLevel:
    return HostLevel(np.zeros(slots * 8, np.uint8), [8, 0], [1, 1])


def key(number: int) -> bytes:
    return bytes([number]) * 16


def test_a_full_level_evicts_the_least_recently_used_record() -> None:
    host = level()
    for number in range(4):
        assert host.put(0, key(number), np.full(6, number, np.uint8))
    assert host.get(0, key(0)) is not None
    assert host.put(0, key(9), np.full(8, 9, np.uint8))
    assert host.take_changes().gone == [(0, key(1))]
    assert not host.take_changes().gone
    assert (host.stats().blocks, host.nbytes, host.evicted) == (4, 6 * 3 + 8, 1)
    found = host.get(0, key(9))
    assert found is not None
    assert found.tolist() == [9] * 8


def test_records_without_room_are_refused() -> None:
    host = level()
    assert not host.put(0, key(0), np.zeros(9, np.uint8))
    assert not host.put(1, key(0), np.zeros(0, np.uint8)), "a group without records"
    assert not level(0).put(0, key(0), np.zeros(1, np.uint8))
    assert (host.stats().blocks, host.nbytes) == (0, 0)


def test_a_flush_removes_the_records_of_an_owner_and_their_bytes() -> None:
    host = level()
    for number, owner in enumerate((Owner(salt="a"), Owner(salt="a", session="s"), Owner(salt="b"), Owner())):
        host.put(0, key(number), np.full(8, 7, np.uint8), owner_hashes(owner))
    assert host.flush(None, "a", "s") == 1
    assert host.take_changes().gone == [(0, key(1))]
    assert host.flush(None, "", None) == 1, "records without a salt"
    assert host.flush(None, "a", None) == 1
    assert host.nbytes == 8
    assert np.count_nonzero(np.concatenate([part.ravel() for part in host._parts])) == 8
    assert host.flush(None, None, None) == 1
    assert not host.stats().blocks
