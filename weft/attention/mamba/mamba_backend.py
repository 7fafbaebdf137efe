"""Interface of the core of Mamba2: the part of a layer between its projections, per segment.

For a token with gate z, input x, vectors B and C of a group of heads, and a time step per head:

    x, B, C    silu of a causal convolution over the inputs of the token and of the last tokens before
    dt         softplus(step + bias), within the bounds of the model
    S          <- e^(-rate dt) S + dt x outer B          the state of a head, [dim, state]
    y          = S C + skip x
    out        = rms norm(y * silu(z)), or as the model says

A sequence of any length stores only the last inputs of the convolution and S: the parts of a ``state`` cache.

Source: Dao and Gu 2024, arXiv 2405.21060.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch

from weft.attention.base import Backend, SegmentInput

Tensor = torch.Tensor
Finish: TypeAlias = Literal["gated", "normed", "none", "later"]
"""Function from y and z to the output.

gated       norm(y * silu(z))
normed      norm(y) * silu(z)
none        y * silu(z)
later       y: the layer computes the rest, because a norm reads channels of other ranks
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaWeights:
    """Small weights of a layer, wide and contiguous. Counts are of this rank."""

    groups: int
    """Groups of heads with a B and C each."""
    taps: Tensor
    """[taps, x channels | B channels | C channels], the tap of the oldest input first."""
    conv_bias: Tensor | None
    """[channels], as ``taps``."""
    rate: Tensor
    """[heads]: decay is e^(-rate dt)."""
    step_bias: Tensor
    """[heads]."""
    skip: Tensor
    """[heads]."""
    low: float
    """Bounds of the time step."""
    high: float
    finish: Finish
    norm: Tensor | None
    """[heads * dim]; None for ``none`` and ``later``."""
    norm_groups: int
    eps: float


class MambaInput(NamedTuple):
    """One segment of a step, with the states and weights of one layer."""

    segment: SegmentInput
    """T tokens; may be empty."""
    state: tuple[Tensor, ...]
    """``[slots + 1, copies, *shape]`` of: x inputs [heads, taps - 1, dim], B and C inputs [places, taps - 1,
    state], recurrent state [heads, dim, state]. All places of a group are equal."""
    weights: MambaWeights
    each: bool
    """True to store the state after every token; see ``MambaBackend.run``."""
    prepared: object = None
    """Result of ``Backend.prepare``. None: the backend prepares by itself."""


class MambaBackend(Backend):
    """Convolution, time steps, recurrence and gated norm of one segment."""

    form = "mamba"

    @abstractmethod
    def run(
        self,
        zxbcdt: Tensor,  # [T, z | x | B | C | steps] of this segment
        out: Tensor,  # [T, heads * dim], written
        mamba: MambaInput,
    ) -> None:
        """Advance the state of every row by the row's tokens, and write the outputs of the tokens.

        Copies of states as in ``DeltaBackend.run``: a row reads copy ``live`` of its slot, or zeros at
        position 0. With ``mamba.each``, the state after token j goes to copy j. Otherwise the state after the
        last token goes to copy 0. Nothing else is written; other copies may hold NaN.
        """

    def sum(self, x: Tensor, dim: int) -> Tensor:
        """Return the sum over ``dim``, with ``dim`` kept as size 1. Invariant in an invariant backend."""
        return x.sum(dim, keepdim=True)
