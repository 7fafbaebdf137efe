"""Cache kinds one by one, and together."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from weft.common.errors import ConfigError
from weft.config.resolved import KVConfig, PoolSpec
from weft.config.spec import CacheSpec
from weft.kv.cache_groups import CacheGroup, FullGroup, WindowGroup
from weft.kv.caches import Caches, make_cache_groups
from weft.kv.chunk_group import ChunkGroup
from weft.kv.hashing import HashChain, salted_root
from weft.kv.tier_kinds import TierKind
from weft.types.plan import AppendBlocks, AppendEach, SlotUpdate

BLOCK = 4


def pool(kind: str = "full", blocks: int = 20, window: int = 0, block: int = BLOCK) -> PoolSpec:
    cache = CacheSpec(kind=kind, layers=(0,), window=window, kv_heads=1, head_dim=1)  # type: ignore[arg-type]
    return PoolSpec(cache=cache, block_size=block, num_blocks=blocks)


def full(blocks: int = 20, block: int = BLOCK) -> FullGroup:
    return FullGroup(0, pool(blocks=blocks, block=block), BLOCK)


def windowed(window: int, blocks: int = 20, max_chunk: int = 16) -> WindowGroup:
    return WindowGroup(0, pool("window", blocks, window), BLOCK, max_chunk)


def chunked(chunk: int, blocks: int = 20, max_chunk: int = 16) -> ChunkGroup:
    return ChunkGroup(0, pool("chunk", blocks, chunk), BLOCK, max_chunk)


def hashes_of(length: int) -> list[bytes]:
    return HashChain(salted_root(""), BLOCK).grow(array("i", range(length)), length)


def blocks_of(ops: Sequence[SlotUpdate]) -> list[int]:
    assert all(isinstance(op, AppendBlocks) for op in ops)
    return [b for op in ops if isinstance(op, AppendBlocks) for b in op.blocks.tolist()]


def cached(kind: CacheGroup, length: int) -> list[bytes]:
    """A kind in which a sequence of ``length`` tokens has been and gone."""
    hashes = hashes_of(length)
    kind.committed(0)
    kind.acquire(0, hashes, 0, length)
    kind.insert(0, length, hashes)
    kind.release(0, 0)
    return hashes


def test_full_takes_and_gives_whole_blocks() -> None:
    kind = full()
    assert kind.needed(3, 9) == 3
    assert blocks_of(kind.acquire(3, [], 0, 9)) == [1, 2, 3]
    assert kind.needed(3, 12) == 0
    assert kind.reserve(3, 12) == []
    assert kind.needed(3, 13) == 1
    assert blocks_of(kind.reserve(3, 13)) == [4]
    kind.release(3, 2)
    assert (kind.available(), kind.pending()) == (16, 4)
    kind.committed(2)
    assert kind.available() == 20


def test_full_hits_leading_blocks_up_to_the_limit() -> None:
    kind = full()
    hashes = cached(kind, 18)
    assert [kind.hit(hashes, limit) for limit in (0, 3, 4, 17, 100)] == [0, 0, 4, 16, 16]
    other = HashChain(salted_root("x"), BLOCK).grow(array("i", range(18)), 18)
    assert kind.hit(other, 18) == 0


def test_hits_are_shared_and_count_as_needed_while_nobody_pins_them() -> None:
    kind = full()
    hashes = cached(kind, 16)
    assert kind.needed(1, 17, 16, hashes) == 5
    first = blocks_of(kind.acquire(1, hashes, 16, 17))
    assert kind.available() == 15
    assert kind.needed(2, 17, 16, hashes) == 1
    second = blocks_of(kind.acquire(2, hashes, 16, 17))
    assert first[:4] == second[:4]
    assert first[4] != second[4]
    assert kind.available() == 14
    kind.release(1, 0)
    assert kind.available() == 15
    assert kind.hit(hashes, 100) == 16


def test_acquire_never_evicts_its_own_hit() -> None:
    kind = full(blocks=5)
    hashes = cached(kind, 16)
    assert kind.needed(1, 20, 8, hashes) == 5
    blocks = blocks_of(kind.acquire(1, hashes, 8, 20))
    assert len(dict.fromkeys(blocks)) == 5


def test_inserted_is_what_is_committed_and_named() -> None:
    kind = full()
    hashes = hashes_of(16)
    kind.acquire(0, hashes, 0, 16)
    kind.insert(0, 7, hashes)
    assert kind.hit(hashes, 16) == 4
    kind.insert(0, 16, hashes[:3])
    assert kind.hit(hashes, 16) == 12


def test_a_kinds_block_is_a_whole_number_of_base_blocks() -> None:
    kind = full(block=8)
    hashes = cached(kind, 20)
    assert kind.hit(hashes, 20) == 16
    assert kind.hit(hashes, 15) == 8
    with pytest.raises(ConfigError):
        full(block=6)


def test_window_slides_by_committed_length() -> None:
    kind = windowed(6)
    kind.acquire(0, [], 0, 12)
    kind.slide(0, 8, 3)  # position 8 reads 3 .. 8
    assert kind.pending() == 0
    kind.slide(0, 9, 3)  # position 9 reads 4 .. 9
    assert kind.pending() == 1
    kind.committed(3)
    assert kind.available() == 18
    kind.slide(0, 9, 4)
    assert kind.available() == 18
    kind.release(0, 3)
    assert kind.available() == 20


@pytest.mark.parametrize(
    ("window", "lost", "hit"),
    [
        (6, [], 16),
        (6, [0, 1], 16),
        (6, [2], 8),
        (6, [3], 12),
        (5, [2], 16),
        (1, [0, 1, 2, 3], 16),
        (6, [2, 1], 4),
    ],
)
def test_window_hit_needs_only_the_blocks_in_the_window(window: int, lost: list[int], hit: int) -> None:
    """A hit of 16 with window 6 reads 11 .. 15, with window 5 reads 12 .. 15, with window 1 nothing."""
    kind = windowed(window)
    hashes = cached(kind, 16)
    for entry in lost:
        block = kind.pool._index.pop(hashes[entry])
        kind.pool._key[block] = None
        del kind.pool._cached[block]
        kind.pool._free.append(block)
    assert kind.hit(hashes, 100) == hit
    blocks = blocks_of(kind.acquire(1, hashes, hit, hit + 1))
    first = max(0, hit - window + 1) // BLOCK
    assert blocks[:first] == [0] * first
    assert 0 not in blocks[first:]


@pytest.mark.parametrize(
    ("chunk", "lost", "hit"),
    [
        (8, [], 16),
        (8, [0, 1, 2, 3], 16),  # a chunk begins at 16: no block is read
        (6, [0, 1, 2], 16),  # position 16 reads from 12 on
        (6, [3], 12),  # position 12 begins a chunk
        (5, [3], 12),
        (100, [1], 4),
    ],
)
def test_chunk_hit_needs_only_the_blocks_of_the_last_chunk(chunk: int, lost: list[int], hit: int) -> None:
    kind = chunked(chunk)
    hashes = cached(kind, 16)
    for entry in lost:
        kind.pool.forget(hashes[entry])
    assert kind.hit(hashes, 100) == hit
    blocks = blocks_of(kind.acquire(1, hashes, hit, hit + 1))
    first = (hit - hit % chunk) // BLOCK
    assert blocks[:first] == [0] * first
    assert 0 not in blocks[first:]


def test_chunk_releases_the_blocks_before_the_chunk() -> None:
    kind = chunked(8)
    kind.acquire(0, [], 0, 20)
    kind.slide(0, 7, 3)
    assert kind.pending() == 0
    kind.slide(0, 8, 3)  # position 8 begins a chunk
    assert kind.pending() == 2
    assert kind.needed(1, 1000) == kind.most(1000) == 7


def test_a_tier_loads_the_blocks_of_the_last_chunk_alone() -> None:
    kind = TierKind(chunked(8), pool("chunk", 20, 8), BLOCK)
    hashes = hashes_of(24)
    assert [list(kind.needed(hashes, end)) for end in (4, 8, 20)] == [hashes[:1], [], hashes[4:5]]
    assert kind.hit(hashes, {hashes[4]}, 20) == 20
    assert kind.hit(hashes, {hashes[0]}, 20) == 16  # a chunk begins at 16: no block is read


def test_window_never_needs_more_than_it_and_a_chunk() -> None:
    kind = windowed(6, blocks=20, max_chunk=8)
    assert kind.needed(0, 1000) == kind.most(1000) == 4
    kind.acquire(0, [], 0, 8)
    assert kind.needed(0, 1000) == 2
    assert kind.needed(0, 12) == 1


def test_cut_makes_a_chunk_fit_the_pool() -> None:
    kind = windowed(6, blocks=3, max_chunk=100)
    assert kind.cut(0, 40) == 12
    assert kind.cut(12, 40) == 16  # position 12 reads 7 .. 12: blocks 1, 2, 3
    assert kind.cut(12, 13) == 13
    assert full().cut(3, 17) == 17


def make(kv_pools: tuple[PoolSpec, ...], max_model_len: int = 40) -> Caches:
    kv = KVConfig(
        pools=kv_pools, block_size=BLOCK, enable_prefix_caching=True, max_model_len=max_model_len, num_slots=4
    )
    return Caches(make_cache_groups(kv, 16), max_model_len)


def test_a_hit_is_one_that_every_kind_has() -> None:
    caches = make((pool(), pool("window", window=6)))
    hashes = hashes_of(24)
    caches.acquire(0, hashes, 0, 24)
    caches.kinds[0].insert(0, 24, hashes)
    caches.kinds[1].insert(0, 13, hashes)
    assert caches.hit(hashes, 23) == 12
    assert caches.hit(hashes, 11) == 8
    assert caches.hit([], 11) == 0


def test_every_kind_is_asked_before_any_changes() -> None:
    caches = make((pool(blocks=20), pool("window", blocks=5, window=6)))
    assert caches.fits(caches.needed(0, 20))
    caches.acquire(0, [], 0, 16)
    assert caches.free_blocks() == (16, 1)
    assert caches.needed(1, 8) == [2, 2]
    assert not caches.fits(caches.needed(1, 8))
    assert not caches.will_fit(caches.needed(1, 8))
    caches.release(0, 5)
    assert caches.will_fit(caches.needed(1, 8))
    assert caches.usage() == pytest.approx(0.8)


def test_the_smallest_pools() -> None:
    make((pool(blocks=10), pool("window", blocks=3, window=6)))
    for pools in ((pool(blocks=9),), (pool(blocks=10), pool("window", blocks=2, window=6))):
        with pytest.raises(ConfigError, match="--kv-cache-memory"):
            make(pools)


def test_guarantee_counts_whole_lengths() -> None:
    caches = make((pool(blocks=15),))
    assert caches.guaranteed([40])
    assert caches.guaranteed([40, 20])
    assert not caches.guaranteed([40, 21])


def test_many_slots_grow_at_once() -> None:
    kind = full()
    for slot, length in ((2, 4), (5, 12), (7, 8)):
        kind.acquire(slot, [], 0, length)
    assert kind.short([2, 5, 7], [9, 12, 9]) == [2, 0, 1]
    ops = kind.grow([2, 5, 7], [2, 0, 1])
    assert [(op.slots.tolist(), op.blocks.tolist()) for op in ops if isinstance(op, AppendEach)] == [
        ([2, 7], [7, 8]),
        ([2], [9]),
    ]
    assert kind.short([2, 5, 7], [9, 12, 9]) == [0, 0, 0]
    assert kind.grow([2, 5, 7], [0, 0, 0]) == []


def test_caches_grow_all_or_nothing() -> None:
    caches = make((pool(blocks=20), pool("window", blocks=5, window=6)))
    for slot in range(2):
        caches.acquire(slot, [], 0, 8)
    slots, upto = np.array([0, 1]), np.array([9, 9])
    assert caches.grow(slots, upto) is None
    assert caches.free_blocks() == (16, 1)
    grown = caches.grow(slots[1:], upto[1:])
    assert grown is not None
    assert len(grown[0]) == 2
    assert grown[1].tolist() == [12]
    assert caches.free_blocks() == (15, 0)


@pytest.mark.parametrize("make_group", [windowed, chunked])
@pytest.mark.parametrize("window", [6, 8])
def test_windows_slide_together_as_they_do_alone(make_group: Callable[..., WindowGroup], window: int) -> None:
    one, many = make_group(window, blocks=30), make_group(window, blocks=30)
    for kind in (one, many):
        for slot in range(4):
            kind.acquire(slot, [], 0, 20)
    for committed in range(1, 20):
        lengths = np.arange(4) + committed - 3
        for slot, length in enumerate(lengths.tolist()):
            one.slide(slot, max(length, 0), committed)
        many.slide_each(np.arange(4), np.maximum(lengths, 0), np.full(4, committed))
        assert one.pending() == many.pending()
        assert {s: t.blocks for s, t in one._tables.items()} == {s: t.blocks for s, t in many._tables.items()}
