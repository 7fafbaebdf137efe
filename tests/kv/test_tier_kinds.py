"""A tier reads the same blocks as the KV cache group."""

from __future__ import annotations

import itertools

import pytest

from tests.kv.test_cache_groups import BLOCK, cached, chunked, full, pool, windowed
from weft.kv.cache_groups import FullGroup
from weft.kv.tier_kinds import TierKind

GROUPS = {
    "full": (lambda: full(), pool()),
    "window": (lambda: windowed(7), pool("window", window=7)),
    "chunk": (lambda: chunked(7), pool("chunk", window=7)),
    "chunk of whole blocks": (lambda: chunked(8), pool("chunk", window=8)),
}


@pytest.mark.parametrize("name", GROUPS)
def test_hits_without_a_store_are_those_of_the_group(name: str) -> None:
    """Whatever blocks are lost: both find the same prefix, and the pool has every block that is needed."""
    make, spec = GROUPS[name]
    for count in range(3):
        for lost in itertools.combinations(range(6), count):
            group: FullGroup = make()
            hashes = cached(group, 6 * BLOCK)
            for number in lost:
                group.pool.forget(hashes[number])
            tier = TierKind(group, spec, BLOCK)
            for limit in (3 * BLOCK, 6 * BLOCK):
                hit = group.hit(hashes, limit)
                assert tier.hit(hashes, set(), limit) == hit
                assert all(tier.has(key) for key in tier.needed(hashes, hit))
