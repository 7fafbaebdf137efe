"""Transfers of image embeddings on a rank: embeddings that may leave, and shares of rows joined between
ranks.

SendMedia      the embedding was encoded or received earlier in stream order: it may leave
GatherMedia    each rank has received its share of the rows; ranks exchange shares in equal padded pieces

rows of rank 0      1      2          piece of each rank: ceil(rows / ranks), padded
     [ 0 1 2 | 3 4 5 | 6 7 ]          [ 0 1 2 ] [ 3 4 5 ] [ 6 7 7 ]
"""

from __future__ import annotations

import torch

from weft.common.errors import EngineDead
from weft.config.resolved import MediaLimits
from weft.config.sharding import balanced_share
from weft.models.decoder import Model
from weft.parallel.comm import Comm
from weft.runner.exports import RankTransfers, TransferThread
from weft.runner.images.image_store import ImageTower, MediaStore
from weft.types.media_item import BLOCK_ROWS
from weft.types.plan import SendMedia
from weft.types.transfer import Blocks

Tensor = torch.Tensor

MOST_BYTES = 32 << 20
"""Maximum bytes that one collective brings to a rank. Longer embeddings take several collectives."""


class Departures:
    """Notifies ``transfer`` of embeddings that may leave. Used from the compute thread."""

    def __init__(self, transfer: TransferThread, levels: int) -> None:
        """``levels``: number of levels of an embedding, including the main level."""
        self._transfer = transfer
        self._levels = tuple(range(levels))

    def send(self, op: SendMedia) -> None:
        """Announce an embedding that earlier launched work has made. Raises EngineDead if rows and blocks
        disagree.

        INVARIANT: call from the thread that launched the work, with the same current stream. ``computed``
        marks the present place of the stream, and the transfer reads the embedding behind the mark. On a CPU
        the embedding is complete at the call.
        """
        if op.count < 1 or len(op.blocks) != 4 * -(-op.count // BLOCK_ROWS):
            raise EngineDead(f"an embedding of {op.count} rows is sent out of {len(op.blocks) // 4} blocks")
        self._transfer.grow(op.key, (Blocks(first=0, ids=op.blocks),))
        self._transfer.computed(op.key, self._levels, 0, op.count)


class Shares:
    """Joins shares of embedding rows between the ranks of ``comm``."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def gather(self, pool: Tensor, index: Tensor, count: int) -> None:
        """Exchange shares of ``count`` rows. On return, this rank has all rows in every level of ``pool``.

        pool: [levels, rows, width]; index: int64 [count], rows of the pool. All ranks must call with the same
        count, at the same place in their order of collectives.
        """
        ranks, mine = self._comm.size, self._comm.rank
        # (begin, end) of each rank's rows, and the padded rows per rank
        shares = [balanced_share(count, rank, ranks) for rank in range(ranks)]
        each = -(-count // ranks)
        row_bytes = pool.shape[0] * pool.shape[2] * pool.element_size()
        step = max(MOST_BYTES // (ranks * row_bytes), 1)
        for at in range(0, each, step):
            first, last = shares[mine][0] + at, shares[mine][0] + min(at + step, each)
            # Shorter shares repeat the last row, so that every rank sends equal pieces.
            rows = torch.arange(first, last, device=index.device).clamp_(max=count - 1)
            # [ranks, levels, rows of a piece, width]
            made = self._comm.all_gather(pool.index_select(1, index[rows])).result()
            for rank, (begin, end) in enumerate(shares):
                piece = index[begin + at : min(begin + at + step, end)]
                if rank != mine and len(piece):
                    pool.index_copy_(1, piece, made[rank, :, : len(piece)])

    def warm_up(self, pool: Tensor) -> None:
        """Run a first collective of an epoch without effect, because the first call makes connections and
        buffers."""
        self.gather(pool, torch.zeros(1, dtype=torch.int64, device=pool.device), 1)


def media_store(
    model: Model,
    tower: ImageTower | None,
    limits: MediaLimits | None,
    device: torch.device,
    dtype: torch.dtype,
    transfers: RankTransfers | None,
) -> MediaStore:
    """Build the store of embeddings of a rank, in the memory of ``transfers`` if transfers take part.
    ``tower``: the tower of ``model``, or its captured form.

    If the group receives shares of rows, its ranks run one exchange whenever the group has formed. The first
    collective of an epoch makes connections and buffers, and no request should wait for the setup.
    """
    if transfers is None:
        return MediaStore(tower, limits, device, dtype)
    ((memory,),) = transfers.memory
    gather = None
    if transfers.transfer.dims.kinds[0].shards:
        shares = Shares(model.mesh.tp)
        model.mesh.formed.append(lambda: shares.warm_up(memory.flatten(1, 2)))
        gather = shares.gather
    send = Departures(transfers.transfer, len(memory)).send
    return MediaStore(tower, limits, device, dtype, memory=memory, send=send, gather=gather)
