"""Pools of one size on all ranks of a group: each says what it has room for, and all get the least.

    rank  ──Loaded: blocks──►  head: least of all  ──Pools──►  rank allocates  ──Ready──►

A rank that is started anew later gets what the others have by then, whatever it has room for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from weft.common.errors import EngineDead
from weft.common.log import get_logger
from weft.config.resolved import KVConfig
from weft.parallel.control import RankChannel
from weft.types import frames as f

log = get_logger(__name__)

_TURN = 0.5
"""Seconds of one wait for a frame."""


class Sizes:
    """The head's side."""

    def __init__(self, tell: Callable[[int, f.ToRank], None]) -> None:
        """``tell(rank, frame)`` sends."""
        self._tell = tell
        self._room: dict[int, tuple[int, ...]] = {}
        self._agreed: tuple[int, ...] | None = None

    def __contains__(self, rank: object) -> bool:
        """Whether it said what it has room for."""
        return rank in self._room

    def take(self, loaded: f.Loaded) -> None:
        """A rank has loaded its weights."""
        self._room[loaded.rank] = loaded.blocks
        if self._agreed is not None:
            if any(has < all_have for has, all_have in zip(loaded.blocks, self._agreed, strict=False)):
                log.warning("rank %d has less room than the ranks' caches take", loaded.rank)
            self._tell(loaded.rank, f.Pools(blocks=self._agreed))

    def agree(self, kv: KVConfig, ranks: Sequence[int]) -> KVConfig:
        """The head's ``kv`` with the least of each pool that anybody has room for; tells ``ranks``, of which
        all have spoken. Raises EngineDead when one speaks of other pools.
        """
        own = tuple(pool.num_blocks for pool in kv.pools)
        for rank in ranks:
            if len(self._room[rank]) != len(own):
                raise EngineDead(
                    f"rank {rank} has {len(self._room[rank])} kinds of caches, the head {len(own)}"
                )
        rooms = [own, *(self._room[rank] for rank in ranks)]
        self._agreed = tuple(min(blocks) for blocks in zip(*rooms, strict=True))
        if self._agreed != own:
            log.info("the ranks' caches have %s blocks, which all have room for", list(self._agreed))
        for rank in ranks:
            self._tell(rank, f.Pools(blocks=self._agreed))
        return sized(kv, self._agreed)


def sized(kv: KVConfig, blocks: Sequence[int]) -> KVConfig:
    """``kv`` with pools of so many blocks. Raises EngineDead when these are not as many pools."""
    if len(blocks) != len(kv.pools):
        raise EngineDead(f"the head speaks of {len(blocks)} kinds of caches, this rank has {len(kv.pools)}")
    pools = (
        msgspec.structs.replace(pool, num_blocks=count) for pool, count in zip(kv.pools, blocks, strict=True)
    )
    return msgspec.structs.replace(kv, pools=tuple(pools))


def ask(
    channel: RankChannel, rank: int, kv: KVConfig, timeout: float, orphan: Callable[[], bool]
) -> KVConfig | None:
    """The rank's side: says what it has room for, and waits for what it gets; None: it was told to end.

    Raises EngineDead when the head is gone, refuses it or says nothing for ``timeout`` seconds.
    """
    channel.send(f.encode(f.Loaded(rank=rank, blocks=tuple(pool.num_blocks for pool in kv.pools))))
    until = time.monotonic() + timeout
    while (left := until - time.monotonic()) > 0:
        if orphan():
            raise EngineDead("the head of the group is gone")
        data = channel.receive(min(left, _TURN))
        if data is None:
            continue
        frame = f.decode_to_rank(data)
        if isinstance(frame, f.Pools):
            return sized(kv, frame.blocks)
        if isinstance(frame, f.Shutdown):
            return None
        if isinstance(frame, f.Refused):
            raise EngineDead(f"this rank was refused: {frame.error.message}")
    raise EngineDead(f"the head told no sizes of caches within {timeout:g} s")
