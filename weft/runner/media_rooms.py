"""Embeddings of images between groups, on a rank: what may leave, and shares of rows that become whole.

SendMedia      behind the tower that made the embedding, or with one that was there: it may leave
GatherMedia    each rank has received its share of the rows: they exchange them, in equal padded pieces

rows of rank 0      1      2          piece of each rank: ceil(rows / ranks), padded
     [ 0 1 2 | 3 4 5 | 6 7 ]          [ 0 1 2 ] [ 3 4 5 ] [ 6 7 7 ]
"""

from __future__ import annotations

import torch

from weft.common.errors import EngineDead
from weft.config.resolved import MediaLimits
from weft.config.sharding import balanced_share
from weft.models.base import Model
from weft.parallel.comm import Comm
from weft.runner.exports import RankRooms, Transfer
from weft.runner.media import MediaStore
from weft.types.media import BLOCK_ROWS
from weft.types.plan import SendMedia
from weft.types.rooms import Blocks

Tensor = torch.Tensor

MOST_BYTES = 32 << 20
"""Of what one collective brings to a rank: longer embeddings take several."""


class Departures:
    """Tells ``transfer`` of what may leave, from the thread that computes."""

    def __init__(self, transfer: Transfer, levels: int) -> None:
        """``levels``: of each embedding, the main one among them."""
        self._transfer = transfer
        self._levels = tuple(range(levels))

    def send(self, op: SendMedia) -> None:
        """What was launched before this call has made the embedding.

        INVARIANT: this is the thread that launched it, on the stream that computes it: ``computed`` marks
        that place of the stream, and the read of the embedding waits for it. On a CPU it is there already.
        """
        if op.count < 1 or len(op.blocks) != 4 * -(-op.count // BLOCK_ROWS):
            raise EngineDead(f"an embedding of {op.count} rows is sent out of {len(op.blocks) // 4} blocks")
        self._transfer.grow(op.key, (Blocks(first=0, ids=op.blocks),))
        self._transfer.computed(op.key, self._levels, 0, op.count)


class Shares:
    """Makes shares of rows whole, between the ranks of ``comm``."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def gather(self, pool: Tensor, index: Tensor, count: int) -> None:
        """Every rank has its share of ``count`` rows, and has all of them when this returns, in every level.

        pool: [levels, rows, width]; index: int64 [count], where in the pool the rows are. All ranks call it
        with the same count, at the same point among their collectives.
        """
        ranks, mine = self._comm.size, self._comm.rank
        shares = [balanced_share(count, rank, ranks) for rank in range(ranks)]
        each = -(-count // ranks)
        row_bytes = pool.shape[0] * pool.shape[2] * pool.element_size()
        step = max(MOST_BYTES // (ranks * row_bytes), 1)
        for at in range(0, each, step):
            first, last = shares[mine][0] + at, shares[mine][0] + min(at + step, each)
            rows = torch.arange(first, last, device=index.device).clamp_(max=count - 1)
            made = self._comm.all_gather(pool.index_select(1, index[rows])).result()
            for rank, (begin, end) in enumerate(shares):
                piece = index[begin + at : min(begin + at + step, end)]
                if rank != mine and len(piece):
                    pool.index_copy_(1, piece, made[rank, :, : len(piece)])

    def warm_up(self, pool: Tensor) -> None:
        """The first collective of an epoch makes connections and buffers: it is one that moves nothing."""
        self.gather(pool, torch.zeros(1, dtype=torch.int64, device=pool.device), 1)


def media_store(
    model: Model,
    limits: MediaLimits | None,
    device: torch.device,
    dtype: torch.dtype,
    rooms: RankRooms | None,
) -> MediaStore:
    """The embeddings of a rank, in the memory of ``rooms`` where these move them between groups.

    Where the group takes shares of rows, its ranks exchange some whenever they have formed: the first
    collective of an epoch makes connections and buffers, and no request is to wait for that.
    """
    if rooms is None:
        return MediaStore(model.vision, limits, device, dtype)
    ((memory,),) = rooms.memory
    gather = None
    if rooms.transfer.dims.kinds[0].shards:
        shares = Shares(model.mesh.tp)
        model.mesh.formed.append(lambda: shares.warm_up(memory.flatten(1, 2)))
        gather = shares.gather
    send = Departures(rooms.transfer, len(memory)).send
    return MediaStore(model.vision, limits, device, dtype, memory=memory, send=send, gather=gather)
