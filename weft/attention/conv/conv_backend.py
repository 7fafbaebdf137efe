"""Interface of the core of a gated short convolution: the part of a layer between its projections, per
segment.

For a token with gate B, output gate C and input x, all [channels]:

    y = C * (causal convolution of B * x over the token and the last tokens before)

A sequence of any length stores only the last products B * x: the part of a ``state`` cache.

Source: LFM2, arXiv 2511.23404, section 2.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft.attention.base import Backend, SegmentInput

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvWeights:
    """Small weights of a layer, wide and contiguous."""

    taps: Tensor
    """[taps, channels], the tap of the oldest input first."""
    bias: Tensor | None
    """[channels]."""


class ConvInput(NamedTuple):
    """One segment of a step, with the states and weights of one layer."""

    segment: SegmentInput
    """T tokens; may be empty."""
    state: tuple[Tensor, ...]
    """One tensor ``[slots + 1, copies, heads, taps - 1, dim]``."""
    weights: ConvWeights
    each: bool
    """True to store the state after every token; see ``ConvBackend.run``."""
    prepared: object = None
    """Result of ``Backend.prepare``. None: the backend prepares by itself."""


class ConvBackend(Backend):
    """Gates and convolution of one segment."""

    form = "conv"

    @abstractmethod
    def run(
        self,
        bcx: Tensor,  # [T, B | C | x] of this segment
        out: Tensor,  # [T, channels], written
        conv: ConvInput,
    ) -> None:
        """Advance the state of every row by the row's tokens, and write the outputs of the tokens.

        Copies of states as in ``DeltaBackend.run``: a row reads copy ``live`` of its slot, or zeros at
        position 0. With ``conv.each``, the state after token j goes to copy j. Otherwise the state after the
        last token goes to copy 0. Nothing else is written; other copies may hold NaN.
        """
