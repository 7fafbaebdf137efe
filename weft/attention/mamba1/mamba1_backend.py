"""Interface of the core of Mamba 1: the parts of a layer between its projections, per segment.

For a token with channels x, gate z, vectors B and C of the token, and a time step per channel:

    x          silu of a causal convolution over the inputs of the token and of the last tokens before
    dt         softplus(step + bias)
    S          <- e^(-rate dt) S + dt x B          the state of a channel, [state]
    out        = (S C + skip x) * silu(z)

The convolution and the recurrence are two calls, because B, C and the time steps are computed from the
convolved channels of all ranks. A sequence of any length stores only the last inputs of the convolution and
S: the parts of a ``state`` cache.

Source: Gu and Dao 2023, arXiv 2312.00752.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft.attention.base import Backend, SegmentInput

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Weights:
    """Small weights of a layer, wide and contiguous. Counts are of this rank; channels = heads * dim."""

    taps: Tensor
    """[taps, channels], the tap of the oldest input first."""
    conv_bias: Tensor | None
    """[channels]."""
    rate: Tensor
    """[heads, state, dim]: the decay is e^(-rate dt)."""
    step_bias: Tensor
    """[channels]."""
    skip: Tensor
    """[channels]."""


class Mamba1Input(NamedTuple):
    """One segment of a step, with the states and weights of one layer."""

    segment: SegmentInput
    """T tokens; may be empty."""
    state: tuple[Tensor, ...]
    """``[slots + 1, copies, *shape]`` of: convolution inputs [heads, taps - 1, dim], recurrent state [heads,
    state, dim]."""
    weights: Mamba1Weights
    each: bool
    """True to store the state after every token; see ``Mamba1Backend``."""
    prepared: object = None
    """Result of ``Backend.prepare``. None: the backend prepares by itself."""


class Selected(NamedTuple):
    """Inputs of the recurrence for T tokens."""

    x: Tensor
    """[T, channels]: result of the convolution."""
    steps: Tensor
    """[T, channels]: time steps before bias and softplus."""
    b: Tensor
    """[T, state]."""
    c: Tensor
    """[T, state]."""
    z: Tensor
    """[T, channels]: gate."""


class Mamba1Backend(Backend):
    """Convolution and recurrence of one segment.

    Copies of states as in ``DeltaBackend.run``: a row reads copy ``live`` of its slot, or zeros at position
    0. With ``mamba.each``, the state after token j goes to copy j. Otherwise the state after the last token
    goes to copy 0. Nothing else is written; other copies may hold NaN.
    """

    form = "mamba1"

    @abstractmethod
    def convolve(
        self,
        x: Tensor,  # [T, channels] of this segment
        out: Tensor,  # [T, channels], written
        mamba: Mamba1Input,
    ) -> None:
        """Write the activated convolution of every token, and advance the convolution inputs of every row."""

    @abstractmethod
    def scan(
        self,
        inputs: Selected,  # of this segment
        out: Tensor,  # [T, channels], written
        mamba: Mamba1Input,
    ) -> None:
        """Write the gated outputs of the tokens, and advance the recurrent state of every row."""
