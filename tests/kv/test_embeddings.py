"""The cache of embeddings: blocks, order of eviction, and no block lost or given twice."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weft.common.errors import EngineDead
from weft.kv.embeddings import BLOCK_ROWS, Embedded, EmbeddingCache, ids
from weft.types.plan import MoveMedia


def key(name: int) -> bytes:
    return name.to_bytes(16, "little")


def add(cache: EmbeddingCache, name: int, blocks: int = 1) -> Embedded:
    held = cache.add(key(name), blocks * cache.block_rows)
    assert held is not None
    return held


def names(cache: EmbeddingCache, *, on_host: bool = False) -> list[int]:
    return [held.key[0] for held in cache if held.on_host == on_host]


@pytest.mark.requirement("D7")
def test_rows_are_counted_in_whole_blocks_and_all_or_nothing() -> None:
    cache = EmbeddingCache(4, row_bytes=10)
    one = cache.add(key(1), BLOCK_ROWS + 1)
    assert one is not None
    assert (len(one.blocks), cache.available, cache.nbytes) == (2, 2, 650)
    assert np.frombuffer(one.ids, "<i4").tolist() == one.blocks
    assert 0 not in one.blocks
    cache.pin(one)
    assert cache.add(key(2), 2 * BLOCK_ROWS + 1) is None
    assert (cache.find(key(2)), cache.available) == (None, 2)
    assert cache.ever_fits(4 * BLOCK_ROWS)
    assert not cache.ever_fits(4 * BLOCK_ROWS + 1)
    with pytest.raises(EngineDead, match="that has it"):
        cache.add(key(1), 1)


@pytest.mark.requirement("D7")
@pytest.mark.parametrize("sizes", [(-1, 0), (1, -1)])
def test_sizes_that_cannot_be_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least 0 blocks"):
        EmbeddingCache(*sizes)


@pytest.mark.requirement("D7")
def test_the_least_recently_used_goes_and_a_pinned_one_stays() -> None:
    gone: list[int] = []
    cache = EmbeddingCache(3, dropped=lambda held: gone.append(held.key[0]))
    one, two, _ = (add(cache, name) for name in (1, 2, 3))
    cache.pin(two)
    cache.touch(one)
    add(cache, 4)
    assert (gone, names(cache)) == ([3], [2, 1, 4])
    add(cache, 5, 2)
    assert (gone, names(cache)) == ([3, 1, 4], [2, 5])
    assert cache.add(key(6), 3 * BLOCK_ROWS) is None
    cache.unpin(two)
    add(cache, 6, 3)
    assert names(cache) == [6]
    with pytest.raises(EngineDead, match="no pin"):
        cache.unpin(two)


@pytest.mark.requirement("D7")
def test_evicted_embeddings_move_to_the_host_and_back() -> None:
    cache = EmbeddingCache(2, 3, row_bytes=1)
    add(cache, 1, 2)
    two = add(cache, 2)
    assert (names(cache), names(cache, on_host=True)) == ([2], [1])
    assert (cache.nbytes, cache.host_nbytes) == (64, 128)
    one = cache.find(key(1))
    assert one is not None
    far = one.blocks
    assert cache.lift(one)
    assert (names(cache), names(cache, on_host=True)) == ([1], [2])
    ops = cache.take_ops(7)
    down, down_too, up = ops
    assert isinstance(down, MoveMedia)
    assert isinstance(up, MoveMedia)
    assert down == MoveMedia(blocks=down.blocks, host=ids(far), up=False)
    assert down_too == MoveMedia(blocks=down_too.blocks, host=two.ids, up=False)  # type: ignore[union-attr]
    assert up == MoveMedia(blocks=one.ids, host=ids(far), up=True)
    assert not cache.asks


@pytest.mark.requirement("D7")
def test_wanted_embeddings_stay_on_the_host() -> None:
    wanted = {1}
    cache = EmbeddingCache(1, 2, wanted=lambda name: name[0] in wanted)
    for name in range(1, 5):
        add(cache, name)
    assert (names(cache), names(cache, on_host=True)) == ([4], [1, 3])
    wanted.add(3)
    add(cache, 5)  # 4 is gone
    assert (names(cache), names(cache, on_host=True)) == ([5], [1, 3])
    wanted.add(5)
    add(cache, 6)  # all of them are requested again: the oldest is evicted
    assert (names(cache), names(cache, on_host=True)) == ([6], [3, 5])


@pytest.mark.requirement("D7")
def test_a_full_host_tier_forgets_its_oldest() -> None:
    gone: list[int] = []
    cache = EmbeddingCache(1, 2, dropped=lambda held: gone.append(held.key[0]))
    for name in range(1, 6):
        add(cache, name)
    assert (names(cache), names(cache, on_host=True), gone) == ([5], [3, 4], [1, 2])
    small = EmbeddingCache(2, 1, dropped=lambda held: gone.append(held.key[0]))
    add(small, 8, 2)
    add(small, 9)
    assert gone[-1] == 8  # larger than the whole host tier


@pytest.mark.requirement("D7")
def test_a_pinned_one_that_is_dropped_keeps_its_blocks_until_the_last_pin() -> None:
    cache = EmbeddingCache(2)
    one = add(cache, 1)
    cache.pin(one)
    cache.pin(one)
    cache.drop(one)
    cache.drop(one)
    assert cache.find(key(1)) is None
    assert (cache.available, cache.nbytes) == (1, 0)
    again = add(cache, 1)
    assert again.blocks != one.blocks
    cache.unpin(one)
    assert cache.available == 0
    cache.unpin(one)
    assert cache.available == 1


@pytest.mark.requirement("D7")
def test_a_writer_from_outside_gets_blocks_that_no_plan_touches() -> None:
    cache = EmbeddingCache(1)
    one = add(cache, 1)
    cache.take_ops(4)
    cache.touch(one, 4)
    assert cache.add(key(2), 1, settled=True) is None
    assert (len(cache), cache.available, cache.settled) == (0, 1, 0)
    cache.committed(3)
    assert cache.add(key(2), 1, settled=True) is None
    cache.committed(4)
    assert cache.add(key(2), 1, settled=True) is not None


@pytest.mark.requirement("D7")
def test_a_writer_from_outside_waits_for_what_is_moved_to_the_host() -> None:
    cache = EmbeddingCache(1, 1)
    add(cache, 1)
    assert cache.add(key(2), 1, settled=True) is None
    assert cache.asks
    cache.committed(0)  # of a plan before
    cache.next_step = 1
    cache = EmbeddingCache(1, 1)
    cache.take_ops(0)
    cache.committed(0)
    add(cache, 1)
    assert cache.add(key(2), 1, settled=True) is None
    cache.take_ops(1)
    assert cache.add(key(2), 1, settled=True) is None
    cache.committed(1)
    assert cache.add(key(2), 1, settled=True) is not None


def test_plans_may_write_at_once_where_earlier_ones_read() -> None:
    cache = EmbeddingCache(1)
    cache.touch(add(cache, 1), 4)
    assert cache.add(key(2), 1) is not None


def test_new_ranks_have_nothing_and_pinned_blocks_stay_out_of_use() -> None:
    cache = EmbeddingCache(4, 2)
    one = add(cache, 1)
    cache.pin(one)
    cache.touch(add(cache, 2, 2), 5)
    add(cache, 3, 2)
    cache.clear()
    assert (len(cache), cache.asks, cache.settled) == (0, False, 3)
    assert (cache.nbytes, cache.host_nbytes) == (0, 0)
    cache.unpin(one)
    assert cache.settled == 4


@pytest.mark.requirement("D7")
@pytest.mark.parametrize("seed", range(20))
def test_no_block_is_lost_or_given_twice(seed: int) -> None:
    """Random changes, executed as by ranks: each lookup finds the stored content."""
    rng = random.Random(seed)
    cache = EmbeddingCache(rng.choice([3, 8]), rng.choice([0, 2, 6]), block_rows=2)
    near: dict[int, bytes] = {}
    far: dict[int, bytes] = {}
    pinned: list[Embedded] = []
    step = 0

    def carry_out() -> None:
        for op in cache.take_ops(step):
            assert isinstance(op, MoveMedia)
            pairs = zip(np.frombuffer(op.blocks, "<i4"), np.frombuffer(op.host, "<i4"), strict=True)
            for here, there in pairs:
                if op.up:
                    near[int(here)] = far[int(there)]
                else:
                    far[int(there)] = near[int(here)]

    for _ in range(400):
        name = key(rng.randrange(9))
        held = cache.find(name)
        choice = rng.random()
        if held is None:
            settled = rng.random() < 0.3
            held = cache.add(name, rng.randint(1, 8), settled=settled)
            carry_out()
            if held is not None:
                near.update(dict.fromkeys(held.blocks, name))
        elif choice < 0.2:
            cache.drop(held)
        elif held.on_host:
            cache.lift(held)
        elif choice < 0.5:
            cache.touch(held, step)
        elif choice < 0.7:
            cache.pin(held)
            pinned.append(held)
        if pinned and rng.random() < 0.3:
            cache.unpin(pinned.pop(rng.randrange(len(pinned))))
        if rng.random() < 0.3:
            carry_out()
            step += 1
        if rng.random() < 0.2:
            cache.committed(step - rng.randint(1, 2))
        if rng.random() < 0.01:
            cache.clear()
        carry_out()
        for held in cache:
            assert {(far if held.on_host else near)[block] for block in held.blocks} == {held.key}
        alive = {id(held): held for held in [*cache, *pinned] if not held.on_host}
        taken = [block for held in alive.values() for block in held.blocks]
        assert len(set(taken)) == len(taken) == cache.blocks - cache.available
    for held in pinned:
        cache.unpin(held)
    carry_out()
    cache.committed(step + 1)
    for held in list(cache):
        cache.drop(held)
    assert cache.settled == cache.blocks
    assert (cache.nbytes, cache.host_nbytes) == (0, 0)
