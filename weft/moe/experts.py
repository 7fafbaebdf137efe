"""What one rank does for a block whose experts are divided: the parts between which rows travel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch

from weft.ops.coded import Codes, as_bytes
from weft.ops.moe import Pieces, Routed, choose_experts, combine, count_of
from weft.ops.torch_ops import Int8Weight

Tensor = torch.Tensor


class RankExperts(Protocol):
    """The op ``moe_pieces``. ``weights``: what its ``pack`` made of the whole router and this rank's experts.

    exact: experts answer one by one; else a rank's are summed. Rows don't depend on each other where the op
    is invariant.
    """

    def route(self, x: Tensor, ids: Tensor | None, weights: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """(experts int64 [T, k] of all, their weights wide [T, k], for ``shared``) of x [T, hidden]."""

    def answer(self, x: Tensor, places: Tensor, scales: Tensor | None, weights: Any, exact: bool) -> Tensor:
        """What this rank's experts make of x [R, hidden], whose pairs are ``places`` int64 [R, k] (-1: none).

        ``exact``: [R, k, hidden], zeros where there is none. Else [R, 1, hidden], summed in top-k order by
        scales (wide [R, k]) and rounded.
        """

    def answers(self, dtype: torch.dtype, exact: bool) -> torch.dtype:
        """In which ``answer`` is, of x in ``dtype``: what travels home."""

    def shared(self, x: Tensor, share: Tensor | None, weights: Any) -> Any:
        """The shared expert of x [T, hidden], for ``finish``."""

    def finish(self, total: Tensor, scales: Tensor, shared: Any, dtype: torch.dtype, exact: bool) -> Tensor:
        """[T, hidden] in ``dtype``. total: [T, A, hidden], all ranks' answers summed; scales: wide [T, k]."""

    def tensors(self, weights: Any) -> Iterable[Tensor]:
        """All that belongs to this rank's experts; the first dim is their places."""


class ByPieces(NamedTuple):
    """In torch: of one implementation's pieces."""

    pieces: Pieces

    def route(self, x: Tensor, ids: Tensor | None, weights: Routed) -> tuple[Tensor, Tensor, Tensor | None]:
        return choose_experts(x, ids, weights, self.pieces.multiply)

    def answer(
        self, x: Tensor, places: Tensor, scales: Tensor | None, weights: Routed, exact: bool
    ) -> Tensor:
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
        for one in (weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias):
            if isinstance(one, Codes):
                yield from map(as_bytes, one.tensors())  # rows of them are taken by number
            elif isinstance(one, Int8Weight):
                yield one.values
                yield one.scales
            elif one is not None:
                yield one

    def _pairs(self, x: Tensor, places: Tensor, weights: Routed) -> Tensor:
        if x.device.type != "cpu":  # nothing may depend on how many pairs there are
            none = places < 0
            result = self.pieces.experts(x, torch.where(none, count_of(weights), places), weights)
            return result.masked_fill_(none.unsqueeze(2), 0.0)
        row, choice = (places >= 0).nonzero(as_tuple=True)
        result = x.new_zeros(*places.shape, x.shape[1])
        if len(row):
            ids = places[row, choice].unsqueeze(1)
            result[row, choice] = self.pieces.experts(x[row], ids, weights).squeeze(1)
        return result


def rank_experts(op: Any) -> RankExperts:
    """The experts of a rank, from what an implementation of the op ``moe_pieces`` returns."""
    return ByPieces(op) if isinstance(op, Pieces) else op
