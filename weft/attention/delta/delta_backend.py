"""Interface of the gated delta net's core: the part of a layer between its projections, per segment.

For a token with query q, key k (both of length 1), value v and gates g <= 0, 0 < beta < reach, for each value
head:

    q, k, v    silu of a causal convolution over the inputs of the token and of the last tokens before
    g          = -rate softplus(a + bias)                  one number, or [k_dim, 1]: one per row of S;
               floor sigmoid(rate (a + bias)) with a lower bound
    beta       = reach sigmoid(b)
    S          <- e^g S + k outer beta (v - k e^g S)       the state, [k_dim, v_dim]
    o          = q S / sqrt(k_dim)
    out        = rms norm(o) * silu(z), or rms norm(o) * sigmoid(z)

A sequence of any length stores only the last inputs of the convolution and S: the parts of a ``state`` cache.

Source: Yang et al. 2024, arXiv 2412.06464; one g per row of S (Kimi Delta Attention): arXiv 2510.26692.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft.attention.base import Backend, SegmentInput

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaWeights:
    """Small weights of a layer, wide and contiguous."""

    taps: Tensor
    """[conv, channels]: taps of the convolution, the tap of the oldest input first. Channels: q, k, v
    heads."""
    rate: Tensor
    """[v_heads]."""
    bias: Tensor
    """[v_heads], or [v_heads, k_dim] with a decay for every key channel."""
    norm: Tensor
    """[v_dim]."""
    eps: float
    reach: float = 1.0
    """Upper bound of beta. Above 1, a step may turn a direction of the state around."""
    floor: float = 0.0
    """If below 0, lower bound of g."""
    sigmoid: bool = False
    """True if the output gate is sigmoid(z), False for silu(z)."""


class DeltaInputs(NamedTuple):
    """Results of the projections for T tokens. Rows may have strides, elements of a row are contiguous."""

    qkv: Tensor
    """[T, q heads | k heads | v heads]."""
    z: Tensor
    """[T, v_heads * v_dim]."""
    b: Tensor
    """[T, v_heads]."""
    a: Tensor
    """[T, v_heads], or [T, v_heads * k_dim] with a decay for every key channel."""

    def of(self, rows: slice) -> DeltaInputs:
        """Return the inputs of the tokens ``rows``."""
        return DeltaInputs(*(part[rows] for part in self))


class DeltaInput(NamedTuple):
    """One segment of a step, with the states and weights of one layer."""

    segment: SegmentInput
    """T tokens; may be empty."""
    state: tuple[Tensor, ...]
    """``[slots + 1, copies, *shape]`` of each part of the state (``cache_layout.slot_tensors``)."""
    weights: DeltaWeights
    each: bool
    """True to store the state after every token; see ``DeltaBackend.run``."""
    prepared: object = None
    """Result of ``Backend.prepare``. None: the backend prepares by itself."""


class DeltaBackend(Backend):
    """Convolution, gates, recurrence and gated norm of one segment."""

    form = "delta"

    @abstractmethod
    def run(
        self,
        inputs: DeltaInputs,  # of this segment
        out: Tensor,  # [T, v_heads * v_dim], written
        delta: DeltaInput,
    ) -> None:
        """Advance the state of every row by the row's tokens, and write the outputs of the tokens.

        A row reads copy ``live`` of its slot, or zeros at position 0. With ``delta.each``, the state after
        token j goes to copy j (rows then have at most ``copies`` tokens). Otherwise the state after the last
        token goes to copy 0. Nothing else is written. Rows do not read states written by other rows; other
        copies may hold NaN.
        """
