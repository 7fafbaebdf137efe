"""Merge of two attention results over disjoint keys."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def merge(out: Tensor, mass: Tensor, other_out: Tensor, other_mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, mass) over the keys of both inputs.

    out [..., n] is a weighted mean of values; mass [...] is the log of the sum of the exponentials of the
    weights. A query without visible keys has mass -inf, and its out is ignored. If both masses are -inf, the
    result is 0 and -inf, never NaN.
    """
    nothing = float("-inf")
    top = torch.maximum(mass, other_mass)
    base = top.masked_fill(top == nothing, 0.0)  # -inf - -inf is NaN
    mine = (mass - base).exp()
    theirs = (other_mass - base).exp()
    total = mine + theirs
    merged = _times(out, mine) + _times(other_out, theirs)
    return merged / total.masked_fill(total == 0, 1.0).unsqueeze(-1), base + total.log()


def _times(out: Tensor, weight: Tensor) -> Tensor:
    """Return ``out * weight``, with exact zeros where the weight is 0, even if ``out`` contains NaN."""
    weight = weight.unsqueeze(-1)
    return (out * weight).masked_fill_(weight == 0, 0.0)
