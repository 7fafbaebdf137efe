"""Tables of sequences with a transferred cache: shared blocks, new blocks, and later hits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kv.test_cache_groups import cached, chunked, full, hashes_of, pool, windowed
from weft.kv.cache_groups import ids_of
from weft.kv.caches import Caches
from weft.kv.pool import NULL_BLOCK
from weft.kv.snapshots import StateGroup
from weft.types.plan import AppendBlocks, LoadState

HASHES = hashes_of(40)


def test_a_fetch_shares_its_hit_and_becomes_a_slots_table() -> None:
    kind = full()
    cached(kind, 18)
    assert [kind.fetch_hit(HASHES, limit, 22) for limit in (3, 15, 16, 22)] == [0, 12, 16, 16]
    assert kind.fetch_needed(HASHES, 16, 22, 25) == 7
    new = kind.fetch(-2, HASHES, 16, 22, 25, 4)
    assert (new.first, len(ids_of(new))) == (4, 3)
    assert kind.available() == 20 - 7
    kind.insert(-2, 22, HASHES)
    assert kind.fetch_hit(HASHES, 40, 40) == 20
    (op,) = kind.adopt(-2, 3)
    assert isinstance(op, AppendBlocks)
    assert op.blocks.tolist()[4:] == ids_of(new)
    assert (kind.needed(3, 28), kind.needed(3, 29)) == (0, 1)
    kind.release(3, 0)
    assert kind.available() == 20


@pytest.mark.parametrize(
    ("window", "position", "start", "sent_block", "whole"),
    [
        (6, 20, 0, 4, 3),  # reads 15 .. : block 3 is sent whole
        (6, 20, 0, 1, 4),  # 15 .. are sent: block 3 lacks 12 .. 14
        (6, 20, 0, 8, 3),  # the sender's block reaches further back than ours
        (5, 20, 16, 1, 4),  # goes on behind the hit
        (100, 20, 0, 1, 0),
    ],
)
def test_a_windows_first_block_is_found_only_if_it_is_whole(
    window: int, position: int, start: int, sent_block: int, whole: int
) -> None:
    kind = windowed(window)
    if start:
        cached(kind, start)
    new = kind.fetch(-2, HASHES, start, position, position + 1, sent_block)
    first = max(0, position - window + 1) // 4
    assert new.first == max(first, start // 4)
    kind.insert(-2, position, HASHES)
    found = [number for number in range(position // 4) if kind.pool.find(HASHES[number]) != NULL_BLOCK]
    assert found == list(range(0 if start else whole, position // 4))
    table = kind._tables[-2].blocks
    assert all(block == NULL_BLOCK for block in table[:first])
    assert all(table[first:])


def test_the_first_block_of_a_chunk_is_found_only_if_it_is_whole() -> None:
    for chunk, sent_block, whole in ((6, 4, 4), (6, 1, 5), (8, 1, 4), (20, 4, 5)):
        kind = chunked(chunk)
        new = kind.fetch(-2, HASHES, 0, 20, 21, sent_block)
        assert new.first == (20 - 20 % chunk) // 4
        kind.insert(-2, 20, HASHES)
        found = [number for number in range(5) if kind.pool.find(HASHES[number]) != NULL_BLOCK]
        assert found == list(range(whole, 5)), chunk


def test_a_window_is_hit_where_what_is_read_before_the_hit_is_there() -> None:
    kind = windowed(6)
    cached(kind, 16)
    kind.pool.forget(HASHES[3])
    assert kind.fetch_hit(HASHES, 12, 40) == 12  # far before the window: no block is read
    assert kind.fetch_hit(HASHES, 20, 20) == 12  # reads block 3, which is missing
    assert kind.fetch_hit(HASHES, 16, 16) == 8 + 4


def test_a_state_comes_into_a_block_of_its_own_and_is_given_back_once_loaded() -> None:
    state = StateGroup(1, pool("state", blocks=2), 4)
    caches = Caches((full(), state), 40)
    cached(caches.kinds[0], 16)
    assert caches.fetch_hit(HASHES, 16) == 12  # a state is sent with a position at least
    assert caches.fetch_needed(HASHES, 12, 16, 17) == [5 - 3 + 3, 1]
    blocks = caches.fetch(-2, HASHES, 12, 16, 17, [4, 4])
    op = caches.adopt(-2, 0)[-1]
    assert op == LoadState(slot=0, kind=1, block=ids_of(blocks[1])[0])
    assert state.available() == 1
    state.committed(5)
    state.slide_each(np.array([0]), np.array([17]), np.array([5]))
    assert state.available() == 2
    caches.fetch(-3, [], 0, 16, 17, [4, 4])
    caches.release(-3, -1)
    assert state.available() == 2
