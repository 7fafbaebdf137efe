"""Two attention results over disjoint keys into one over both."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def merge(out: Tensor, mass: Tensor, other_out: Tensor, other_mass: Tensor) -> tuple[Tensor, Tensor]:
    """(out, mass) of the keys of both: each out [..., n] is a weighted mean of values, each mass [...] the
    logarithm of the sum of the weights' exponentials.

    A query that saw nothing has the mass -inf, and nothing of its out enters. If both saw nothing, the result
    is 0 and -inf, never NaN.
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
    """``out * weight``, and 0 where the weight is 0, whatever out holds."""
    weight = weight.unsqueeze(-1)
    return (out * weight).masked_fill_(weight == 0, 0.0)
