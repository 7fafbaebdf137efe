"""The block pool: references, LRU, index, deferred frees."""

from __future__ import annotations

import pytest

from weft.common.errors import EngineDead
from weft.kv.pool import NULL_BLOCK, BlockPool


def test_ids_start_after_the_null_block() -> None:
    pool = BlockPool(3)
    assert [pool.take() for _ in range(3)] == [1, 2, 3]
    assert pool.available() == 0
    with pytest.raises(EngineDead):
        pool.take()


def test_unpublished_blocks_are_free_again_at_once() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.committed(0)
    pool.release(block, 0)
    assert pool.available() == 2
    with pytest.raises(EngineDead):
        pool.release(block, 0)


def test_release_waits_for_the_last_plan_that_names_the_block() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.release(block, 3)
    assert (pool.available(), pool.pending()) == (1, 1)
    pool.committed(2)
    assert (pool.available(), pool.pending()) == (1, 1)
    pool.committed(3)
    assert (pool.available(), pool.pending()) == (2, 0)


def test_shared_blocks_stay_until_every_holder_is_done() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.insert(block, b"k")
    pool.share(block)
    pool.release(block, 5)
    assert pool.pending() == 0  # another reference remains
    pool.committed(3)
    pool.release(block, 3)
    assert (pool.available(), pool.pending()) == (1, 1)
    pool.committed(5)
    assert pool.available() == 2
    assert pool.find(b"k") == block


def test_eviction_takes_the_least_recently_used_and_forgets_it() -> None:
    pool = BlockPool(3)
    pool.committed(0)
    blocks = [pool.take() for _ in range(3)]
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.insert(block, key)
    for block in blocks:
        pool.release(block, 0)
    pool.share(pool.find(b"a"))
    pool.release(pool.find(b"a"), 0)  # used most recently now
    assert pool.take() == blocks[1]
    assert [pool.find(key) for key in (b"a", b"b", b"c")] == [blocks[0], NULL_BLOCK, blocks[2]]
    assert pool.available() == 2


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(2)
    pool.committed(0)
    block = pool.take()
    pool.insert(block, b"a")
    pool.release(block, 0)
    assert pool.take() != block
    assert pool.find(b"a") == block


def test_a_content_has_one_block() -> None:
    pool = BlockPool(3)
    pool.committed(0)
    first, second = pool.take(), pool.take()
    pool.insert(first, b"a")
    pool.insert(second, b"a")
    assert pool.find(b"a") == first
    pool.release(second, 0)
    pool.release(first, 0)
    assert pool.find(b"a") == first
    assert pool.available() == 3


def test_only_held_blocks_are_inserted_and_only_inserted_ones_shared() -> None:
    pool = BlockPool(2)
    with pytest.raises(EngineDead):
        pool.insert(1, b"a")
    block = pool.take()
    with pytest.raises(EngineDead):
        pool.share(block)


def test_leading_and_held_keys() -> None:
    pool = BlockPool(4)
    pool.committed(0)
    for key in (b"a", b"b", b"c"):
        pool.insert(pool.take(), key)
    pool.release(pool.find(b"b"), 0)
    assert [pool.leading(keys) for keys in ([], [b"a", b"b"], [b"a", b"x", b"b"], [b"x"])] == [0, 2, 1, 0]
    assert pool.held([b"a", b"b", b"c"]) == 2


def test_a_block_on_hold_is_free_after_its_last_step_and_its_last_hold() -> None:
    for pin_ends_first in (True, False):
        pool = BlockPool(2)
        block = pool.take()
        pool.pin(block)
        pool.pin(block)
        pool.release(block, 3)
        assert (pool.available(), pool.pending(), pool.num_pinned()) == (1, 0, 1)
        ends = [lambda: pool.unpin(block), lambda: pool.committed(3)]  # noqa: B023
        pool.unpin(block)
        for end in ends if pin_ends_first else ends[::-1]:
            assert pool.available() == 1
            end()
        assert (pool.available(), pool.num_pinned()) == (2, 0)


def test_a_inserted_block_on_hold_can_be_shared_and_is_not_evicted() -> None:
    pool = BlockPool(2)
    pool.committed(0)
    block = pool.take()
    pool.insert(block, b"a")
    pool.pin(block)
    pool.release(block, 0)
    assert (pool.find(b"a"), pool.held([b"a"]), pool.available()) == (block, 1, 1)
    pool.forget(b"a")
    assert pool.find(b"a") == block
    pool.share(block)
    pool.unpin(block)
    assert pool.available() == 1
    pool.release(block, 0)
    assert (pool.available(), pool.held([b"a"])) == (2, 0)


def test_a_reset_leaves_pins_and_nothing_else() -> None:
    pool = BlockPool(4)
    held, cached, _ = (pool.take() for _ in range(3))
    pool.insert(held, b"a")
    pool.insert(cached, b"b")
    pool.release(cached, -1)
    pool.release(held, 7)
    pool.pin(held)
    pool.reset()
    assert (pool.available(), pool.pending(), pool.num_pinned()) == (3, 0, 1)
    assert pool.find(b"a") == pool.find(b"b") == NULL_BLOCK
    pool.committed(7)  # nothing of before is due
    assert held not in [pool.take() for _ in range(3)]
    with pytest.raises(EngineDead):
        pool.take()
    pool.unpin(held)
    assert pool.take() == held


def test_a_forgotten_block_in_use_is_free_after_its_last_reference() -> None:
    pool = BlockPool(3)
    log = pool.follow()
    cached, retained, used = (pool.take() for _ in range(3))
    for block, key in ((cached, b"a"), (retained, b"b"), (used, b"c")):
        pool.insert(block, key)
    pool.retain(b"b")
    pool.release(cached, -1)
    pool.release(retained, -1)
    assert pool.forget_all() == 3
    assert pool.forget_all() == 0
    assert list(log.keys) == []
    assert [pool.find(key) for key in (b"a", b"b", b"c")] == [NULL_BLOCK] * 3
    assert pool.available() == 2
    pool.release(used, -1)
    assert sorted(pool.take() for _ in range(3)) == [1, 2, 3]


def test_pins_need_a_used_block_and_end_once() -> None:
    pool = BlockPool(1)
    with pytest.raises(EngineDead, match="without references"):
        pool.pin(1)
    block = pool.take()
    pool.pin(block)
    pool.unpin(block)
    with pytest.raises(EngineDead, match="without a pin"):
        pool.unpin(block)
