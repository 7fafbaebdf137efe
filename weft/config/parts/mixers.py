"""Specs of state mixers: layers with a recurrent state in place of attention, or beside attention."""

from __future__ import annotations

import math
from typing import Literal

import msgspec


class ConvSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Gated short convolution over all channels of the hidden size. Source: LFM2, arXiv 2511.23404."""

    layers: tuple[int, ...]
    heads: int
    """Equal parts of the channels, which ranks divide. Heads have no other meaning here."""
    dim: int
    """Channels per head."""
    taps: int
    """Taps of the causal convolution."""
    bias: bool = False
    """True if convolution and projections have biases."""


class MambaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Mamba2. Source: Dao and Gu 2024, arXiv 2405.21060."""

    layers: tuple[int, ...]
    """Layers of the caches. In models with a Mamba2 beside every attention (Falcon-H1), numbers from
    ``ModelSpec.layers`` on: number ``ModelSpec.layers + i`` is the Mamba2 of layer i."""
    heads: int
    dim: int
    """Channels per head."""
    groups: int
    """Groups of heads; each group shares its input and output vectors B and C."""
    state: int
    """Elements of B and of C."""
    conv: int
    """Taps of the causal convolution."""
    conv_bias: bool = True
    bias: bool = False
    """True if the projections have biases."""
    norm: Literal["gated", "normed", "none"] = "gated"
    """RMSNorm and gate of the output y: norm(y * silu(z)), norm(y) * silu(z), or y * silu(z)."""
    norm_groups: int = 1
    """Equal groups of channels with a separate RMSNorm each."""
    low: float = 0.0
    """Lower bound of the time step."""
    high: float = math.inf
    """Upper bound of the time step."""

    input: float = 1.0
    """Factor of the layer's input."""
    factors: tuple[float, float, float, float, float] = (1.0,) * 5
    """Factors of z, x, B, C and the time step, behind the input projection."""

    @property
    def places(self) -> int:
        """Number of equal parts in which ranks divide the groups: a multiple of ``groups``, a divisor of
        ``heads``.

        The state has the last inputs of B and C for each place. So up to eight ranks divide a state with
        fewer groups, and the layout of the state does not depend on the number of ranks.
        """
        return math.gcd(self.heads, math.lcm(self.groups, 8))


class Mamba1Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Mamba 1: a state for each channel. Source: Gu and Dao 2023, arXiv 2312.00752."""

    layers: tuple[int, ...]
    heads: int
    """Equal parts of the channels, which ranks divide. Heads have no other meaning here."""
    dim: int
    """Channels per head."""
    state: int
    """Elements of the state of a channel, of B and of C."""
    rank: int
    """Elements of the vector from which the time steps of all channels are computed."""
    conv: int
    """Taps of the causal convolution."""
    conv_bias: bool = True
    bias: bool = False
    """True if the first and the last projection have biases."""
    norm: Literal["none", "unit", "weighted"] = "none"
    """RMSNorm of the time step vector, of B and of C, each: none, without weights, or with weights."""
    norm_eps: float = 1e-6

    @property
    def inner(self) -> int:
        """Number of channels."""
        return self.heads * self.dim

    @property
    def selected(self) -> int:
        """Elements computed from the channels of a token: time step vector, B and C."""
        return self.rank + 2 * self.state


class ParallelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Factors of Falcon-H1, whose layers have Mamba2 and attention side by side. arXiv 2507.22448."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    key: float = 1.0
    """Factor of the keys, before the rotation."""
    mamba_out: float = 1.0
    gate: float = 1.0
    """Factor of the gate of the feed-forward, before the activation."""
    down: float = 1.0
    """Factor of the output of the feed-forward."""
