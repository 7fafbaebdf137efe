"""The experts of one rank, computed for rows of any rank."""

from __future__ import annotations

import torch

from weft.ops.moe import Pieces, Routed, combine, count_of

Tensor = torch.Tensor


def answer(
    x: Tensor, places: Tensor, scales: Tensor | None, weights: Routed, pieces: Pieces, exact: bool
) -> Tensor:
    """What this rank's experts make of x [R, hidden], whose pairs are ``places`` int64 [R, k] (-1: none).

    ``exact``: [R, k, hidden], zeros where there is none. Else [R, 1, hidden], summed in top-k order by scales
    (wide [R, k]) and rounded.
    """
    made = _pairs(x, places, weights, pieces)
    if exact:
        return made
    assert scales is not None
    return combine(made, scales).to(x.dtype).unsqueeze(1)


def _pairs(x: Tensor, places: Tensor, weights: Routed, pieces: Pieces) -> Tensor:
    if x.device.type != "cpu":  # nothing may depend on how many pairs there are
        none = places < 0
        made = pieces.experts(x, torch.where(none, count_of(weights), places), weights)
        return made.masked_fill_(none.unsqueeze(2), 0.0)
    row, choice = (places >= 0).nonzero(as_tuple=True)
    made = x.new_zeros(*places.shape, x.shape[1])
    if len(row):
        ids = places[row, choice].unsqueeze(1)
        made[row, choice] = pieces.experts(x[row], ids, weights).squeeze(1)
    return made
