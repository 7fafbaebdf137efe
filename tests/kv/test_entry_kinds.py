"""Latent and compressed groups: retention decides the behavior, not the content of entries."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from weft.common.errors import ConfigError
from weft.config.resolved import KVConfig, PoolSpec
from weft.config.spec import CacheSpec
from weft.kv.cache_groups import FullGroup, WindowGroup
from weft.kv.caches import Caches, make_cache_groups
from weft.kv.hashing import HashChain, salted_root

BLOCK = 4


def pool(kind: str, blocks: int = 20, block: int = BLOCK, **facts: Any) -> PoolSpec:
    cache = CacheSpec(kind=kind, layers=(0,), **facts)  # type: ignore[arg-type]
    return PoolSpec(cache=cache, block_size=block, num_blocks=blocks)


def make(*pools: PoolSpec, max_model_len: int = 60) -> Caches:
    kv = KVConfig(
        pools=pools, block_size=BLOCK, enable_prefix_caching=True, max_model_len=max_model_len, num_slots=4
    )
    return Caches(make_cache_groups(kv, 16), max_model_len)


def hashes_of(length: int) -> list[bytes]:
    return HashChain(salted_root(""), BLOCK).grow(array("i", range(length)), length)


def test_retention_makes_the_kind() -> None:
    caches = make(
        pool("latent", width=8),
        pool("latent", width=8, window=6),
        pool("compressed", block=12, width=8, ratio=6),
    )
    assert [type(kind) for kind in caches.kinds] == [FullGroup, WindowGroup, FullGroup]
    assert [kind.block_size for kind in caches.kinds] == [4, 4, 12]


@pytest.mark.parametrize("block", [4, 6, 16])
def test_a_compressed_block_is_whole_in_base_blocks_and_in_groups(block: int) -> None:
    with pytest.raises(ConfigError, match="multiple"):
        make(pool("compressed", block=block, width=8, ratio=6))


def test_a_compressed_hit_ends_with_a_full_block() -> None:
    caches = make(pool("compressed", block=12, width=8, ratio=6))
    hashes = hashes_of(40)
    caches.acquire(0, hashes, 0, 40)
    caches.insert(0, 23, hashes)
    assert [caches.hit(hashes, limit) for limit in (11, 12, 23, 40)] == [0, 12, 12, 12]
    caches.insert(0, 24, hashes)
    assert [caches.hit(hashes, limit) for limit in (23, 24, 40)] == [12, 24, 24]


def test_lines_of_every_sort_agree_on_a_hit() -> None:
    """Full, compressed and sliding latent entries each lose different positions."""
    caches = make(
        pool("latent", width=8),
        pool("compressed", block=12, width=8, ratio=6),
        pool("latent", width=8, window=6),
    )
    latent, compressed, sliding = caches.kinds
    hashes = hashes_of(52)
    caches.acquire(0, hashes, 0, 52)
    latent.insert(0, 44, hashes)
    compressed.insert(0, 52, hashes)
    sliding.insert(0, 39, hashes)
    assert caches.hit(hashes, 51) == 36  # 44 -> 36 (compressed) -> 36
    assert caches.hit(hashes, 35) == 24
    caches.release(0, -1)
    assert caches.free_blocks() == (20, 20, 20)
    needed = caches.needed(1, 37, 36, hashes)
    # One new block each, the blocks of the hit (of the sliding entries those of positions 31 .. 35).
    assert needed == [10, 4, 3]
    caches.acquire(1, hashes, 36, 37)
    assert caches.free_blocks() == (10, 16, 17)
    assert caches.hit(hashes, 51) == 36


def test_a_sliding_latent_needs_little_of_its_pool() -> None:
    caches = make(pool("latent", blocks=15, width=8), pool("latent", blocks=3, width=8, window=6))
    assert [kind.most(60) for kind in caches.kinds] == [15, 3]
    assert [kind.least(60) for kind in caches.kinds] == [15, 3]
    assert caches.cut(0, 60) == 12
