"""The interface of the gated delta net's core: what a layer does between its projections, per segment.

Of a token with query q, key k (both of length 1), value v, gates g <= 0 and 0 < b < 1, for each value head:

    q, k, v    silu of a causal convolution over the token's inputs and those of the last tokens before it
    S          <- e^g S + k outer b (v - k e^g S)          the state, [k_dim, v_dim]
    o          = q S / sqrt(k_dim)
    out        = rms norm(o) * silu(z)

The convolution's inputs and S are what a sequence keeps, whatever its length: the parts of a ``state`` cache.

Source: Yang et al. 2024, arXiv 2412.06464.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from weft.attention.base import Backend, SegmentInput

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaWeights:
    """A layer's small weights, wide and contiguous."""

    taps: Tensor
    """[conv, channels]: the convolution's weights, the oldest input's first. Channels: q, k, v heads."""
    rate: Tensor
    """[v_heads]: g = -rate * softplus(a + bias)."""
    bias: Tensor
    """[v_heads]."""
    norm: Tensor
    """[v_dim]."""
    eps: float


class DeltaBackend(Backend):
    """Convolution, gates, recurrence and gated norm of one segment."""

    form = "delta"

    @abstractmethod
    def run(
        self,
        qkvz: Tensor,  # [T, q heads | k heads | v heads | z heads] of this segment
        gates: Tensor,  # [T, b | a], one of each for a value head
        out: Tensor,  # [T, v_heads * v_dim], written
        state: tuple[Tensor, ...],
        segment: SegmentInput,
        weights: DeltaWeights,
        *,
        each: bool,
        prepared: object = None,
    ) -> None:
        """Moves every row's state on by its tokens and writes their outputs.

        state: this layer's, ``[slots + 1, copies, *shape]`` of the parts that ``state_parts`` names. A row
        reads copy ``live`` of its slot, or zeros if it starts at position 0. It writes the state after its
        token j to copy j if ``each`` (at most ``copies`` tokens), else the state after its last token to
        copy 0. Nothing else is written, and no row reads what another wrote; other copies may hold NaN.
        """
