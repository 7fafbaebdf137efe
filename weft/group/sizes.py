"""Equal pool sizes on all ranks of a group: all ranks report capacities, and all get the minimum.

    rank  ──Loaded: blocks──►  engine: least of all  ──Pools──►  rank allocates  ──Ready──►

A restarted rank gets the present sizes of the other ranks, whatever the restarted rank's capacity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from weft.common.errors import EngineDead
from weft.config.resolved import KVConfig


def blocks_of(kv: KVConfig) -> tuple[int, ...]:
    """Return the number of blocks of each pool."""
    return tuple(pool.num_blocks for pool in kv.pools)


def sized(kv: KVConfig, blocks: Sequence[int]) -> KVConfig:
    """Return ``kv`` with ``blocks`` as pool sizes. Raises EngineDead if the number of pools differs."""
    if len(blocks) != len(kv.pools):
        raise EngineDead(f"the engine has {len(blocks)} KV cache groups, this rank has {len(kv.pools)}")
    pools = (
        msgspec.structs.replace(pool, num_blocks=count) for pool, count in zip(kv.pools, blocks, strict=True)
    )
    return msgspec.structs.replace(kv, pools=tuple(pools))


def least(own: Sequence[int], rooms: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return the minimum number of blocks of each pool over the engine process and all ``rooms``.

    Raises EngineDead if a rank has a different number of pools than the engine process.
    """
    for rank, blocks in rooms.items():
        if len(blocks) != len(own):
            raise EngineDead(f"rank {rank} has {len(blocks)} KV cache groups, the engine has {len(own)}")
    return tuple(min(blocks) for blocks in zip(own, *rooms.values(), strict=True))
