"""Models whose feed-forward layers need all replicas: the next replica computes the tokens.

The exchange is a minimal form of expert parallelism: two exchanges in a layer, of exact sizes, with equal
numbers. A replica that does not take part leaves the others waiting.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from weft.layers.build import FeedForward
from weft.models.decoder import Block, Decoder
from weft.ops.low_rank import AdapterRows
from weft.ops.row_routes import RowRoutes
from weft.parallel.comm import Comm, Pending
from weft.types.exchange import UNAGREED, Exchange

Tensor = torch.Tensor


class Elsewhere(FeedForward):
    """``inner``, computed by the next rank of ``ep``."""

    def __init__(self, inner: FeedForward, ep: Comm) -> None:
        super().__init__()
        self.inner, self.ep = inner, ep
        self.reads_ids = inner.reads_ids
        self.calls = self.empty = 0

    def steps(
        self,
        comm: Comm,
        x: Tensor,
        ids: Tensor | None,
        exchange: Exchange = UNAGREED,
        adapters: AdapterRows | None = None,
        routes: RowRoutes | None = None,
    ) -> Generator[Pending, None, Tensor]:
        self.calls += 1
        self.empty += not len(x)
        size, rank = self.ep.size, self.ep.rank
        pending = self.ep.all_gather(torch.tensor([len(x)]))
        yield pending
        counts = pending.result().view(-1).tolist()
        after, before = (rank + 1) % size, (rank - 1) % size
        there = [len(x) if to == after else 0 for to in range(size)]
        here = [counts[before] if of == before else 0 for of in range(size)]
        pending = self.ep.all_to_all(x, there, here)
        yield pending
        theirs = pending.result()
        if ids is not None:
            pending = self.ep.all_to_all(ids, there, here)
            yield pending
            ids = pending.result()
        made = self.inner.forward(theirs, ids)
        pending = self.ep.all_to_all(made, here, there)
        yield pending
        return pending.result()


def spread_out(model: Decoder, ep: Comm) -> list[Elsewhere]:
    """Change ``model``. Return its feed-forward layers."""
    made = []
    blocks: list[Any] = [*model.blocks, *(module.block for module in model.mtp)]
    for block in blocks:
        assert isinstance(block, Block)
        assert isinstance(block.feed_forward, nn.Module)
        block.feed_forward = Elsewhere(block.feed_forward, ep)
        made.append(block.feed_forward)
    return made
