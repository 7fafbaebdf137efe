"""Pools of one size on all ranks of a group: each says what it has room for, and all get the least.

    rank  ──Loaded: blocks──►  head: least of all  ──Pools──►  rank allocates  ──Ready──►

A rank that is started anew later gets what the others have by then, whatever it has room for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from weft.common.errors import EngineDead
from weft.config.resolved import KVConfig


def blocks_of(kv: KVConfig) -> tuple[int, ...]:
    """Number of blocks of each pool."""
    return tuple(pool.num_blocks for pool in kv.pools)


def sized(kv: KVConfig, blocks: Sequence[int]) -> KVConfig:
    """``kv`` with pools of so many blocks. Raises EngineDead when these are not as many pools."""
    if len(blocks) != len(kv.pools):
        raise EngineDead(f"the head speaks of {len(blocks)} kinds of caches, this rank has {len(kv.pools)}")
    pools = (
        msgspec.structs.replace(pool, num_blocks=count) for pool, count in zip(kv.pools, blocks, strict=True)
    )
    return msgspec.structs.replace(kv, pools=tuple(pools))


def least(own: Sequence[int], rooms: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Blocks of each pool that the head and every rank of ``rooms`` has room for.

    Raises EngineDead when a rank has other kinds of pools than the head.
    """
    for rank, blocks in rooms.items():
        if len(blocks) != len(own):
            raise EngineDead(f"rank {rank} has {len(blocks)} kinds of caches, the head {len(own)}")
    return tuple(min(blocks) for blocks in zip(own, *rooms.values(), strict=True))
