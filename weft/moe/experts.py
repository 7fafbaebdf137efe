"""Work of one rank in a block with divided experts: the parts between two transfers of rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from weft.moe.products import PieceProducts, Products
from weft.ops.coded import Codes, as_bytes
from weft.ops.moe import Pieces, Routed, combine, count_of
from weft.ops.row_routes import RowRoutes
from weft.ops.torch_ops import Int8Weight

Tensor = torch.Tensor


class RankExperts(Protocol):
    """The op ``moe_pieces``. ``weights`` is the packed router and this rank's packed experts.

    ``exact``: experts answer one by one; otherwise a rank's experts are summed. Rows do not affect each other
    if the op is invariant.
    """

    def route(self, x: Tensor, ids: Tensor | None, weights: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (experts int64 [T, k] of all experts, weights wide [T, k], factor for ``shared``) of x."""

    def with_table(self, weights: Any, table: Tensor) -> Any:
        """Return ``weights`` with experts from ``table``, int64 [rows, k]: ``route`` and the op of the whole
        block then take row numbers as ids. Shares all other memory."""

    def answer(self, x: Tensor, places: Tensor, scales: Tensor | None, weights: Any, exact: bool) -> Tensor:
        """Return the output of this rank's experts for x [R, hidden] and ``places`` int64 [R, k] (-1: none).

        ``exact``: [R, k, hidden], zeros for -1. Otherwise [R, 1, hidden], summed in top-k order by scales
        (wide [R, k]) and rounded.
        """

    def answers(self, dtype: torch.dtype, exact: bool) -> torch.dtype:
        """Return the dtype of ``answer`` for x in ``dtype``: the dtype that travels home."""

    def shared(self, x: Tensor, share: Tensor | None, weights: Any) -> Any:
        """Return the shared expert's output for x [T, hidden], as input of ``finish``."""

    def finish(self, total: Tensor, scales: Tensor, shared: Any, dtype: torch.dtype, exact: bool) -> Tensor:
        """Return [T, hidden] in ``dtype``. total: [T, A, hidden], sum of all ranks; scales: wide [T, k]."""

    def tensors(self, weights: Any) -> Iterable[Tensor]:
        """Return all tensors of this rank's experts. The first dim is the expert's place."""

    def products(self, weights: Any) -> Products:
        """Return the products with single matrices, for rows with adapters of experts."""


class ByPieces(NamedTuple):
    """Implementation in torch, from the pieces of one implementation."""

    pieces: Pieces

    def route(self, x: Tensor, ids: Tensor | None, weights: Routed) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.pieces.route(x, ids, weights)

    def with_table(self, weights: Routed, table: Tensor) -> Routed:
        return replace(weights, table=table)

    def answer(
        self, x: Tensor, places: Tensor, scales: Tensor | None, weights: Routed, exact: bool
    ) -> Tensor:
        """Return the answers of this rank: [n, k, hidden] if ``exact``, else the weighted sum [n, 1, hidden].

        Places of -1 add 0.
        """
        result = self._pairs(x, places, weights)
        if exact:
            return result
        assert scales is not None
        return combine(result, scales).to(x.dtype).unsqueeze(1)

    def answers(self, dtype: torch.dtype, exact: bool) -> torch.dtype:
        return dtype

    def shared(self, x: Tensor, share: Tensor | None, weights: Routed) -> Tensor | None:
        return self.pieces.shared(x, share, weights)

    def finish(
        self, total: Tensor, scales: Tensor, shared: Tensor | None, dtype: torch.dtype, exact: bool
    ) -> Tensor:
        made = combine(total, scales) if exact else total[:, 0].to(scales.dtype)
        return (made if shared is None else made + shared).to(dtype)

    def tensors(self, weights: Routed) -> Iterable[Tensor]:
        """Yield every tensor of the experts, first dim expert. Codes come as bytes."""
        for one in (weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias):
            if isinstance(one, Codes):
                yield from map(as_bytes, one.tensors())  # indexing needs bytes
            elif isinstance(one, Int8Weight):
                yield one.values
                yield one.scales
            elif one is not None:
                yield one

    def products(self, weights: Routed) -> Products:
        return PieceProducts(self.pieces, weights)

    def _pairs(self, x: Tensor, places: Tensor, weights: Routed) -> Tensor:
        """Return the output of each row and place, [n, k, hidden], with zeros for places of -1."""
        if x.device.type != "cpu":  # no sync, and no shape that depends on the number of pairs
            none = places < 0
            result = self.pieces.experts(x, torch.where(none, count_of(weights), places), weights)
            return result.masked_fill_(none.unsqueeze(2), 0.0)
        row, choice = (places >= 0).nonzero(as_tuple=True)
        result = x.new_zeros(*places.shape, x.shape[1])
        if len(row):
            ids = places[row, choice].unsqueeze(1)
            result[row, choice] = self.pieces.experts(x[row], ids, weights).squeeze(1)
        return result


def settled(
    mine: RankExperts, x: Tensor, ids: Tensor | None, weights: Any, layer: int, routes: RowRoutes
) -> tuple[Tensor, Any]:
    """Return (row numbers int64 [T], weights) with which the block uses the experts that ``routes`` settles.

    The weights of the experts still come from the router's scores. ``layer``: number of the routed layer.
    """
    chosen = routes.settle(layer, mine.route(x, ids, weights)[0])
    return torch.arange(len(x), device=x.device), mine.with_table(weights, chosen)


def rank_experts(op: Any) -> RankExperts:
    """Return the experts of a rank, from the result of an implementation of the op ``moe_pieces``."""
    return ByPieces(op) if isinstance(op, Pieces) else op
