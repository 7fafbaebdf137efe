"""KV cache groups of state mixers: the parts of a sequence's state, per layer."""

from __future__ import annotations

from weft.config.mixers import ConvSpec, MambaSpec
from weft.config.spec import CacheSpec, StatePart


def conv_cache(conv: ConvSpec) -> CacheSpec:
    """Return the state group of gated short convolutions: the last products of each channel."""
    return CacheSpec(
        kind="state",
        layers=conv.layers,
        parts=(StatePart(name="conv", shape=(conv.heads, conv.taps - 1, conv.dim), wide=False),),
        form="conv",
    )


def mamba_cache(mamba: MambaSpec) -> CacheSpec:
    """Return the state group of Mamba2 layers: last convolution inputs, and recurrent state."""
    back = mamba.conv - 1
    shared = (mamba.places, back, mamba.state)
    return CacheSpec(
        kind="state",
        layers=mamba.layers,
        parts=(
            # [heads, taps - 1, dim]: inputs of the convolution before the next position
            StatePart(name="conv_x", shape=(mamba.heads, back, mamba.dim), wide=False),
            StatePart(name="conv_b", shape=shared, wide=False),
            StatePart(name="conv_c", shape=shared, wide=False),
            # [heads, dim, state]; float32, because errors would accumulate over positions
            StatePart(name="recurrent", shape=(mamba.heads, mamba.dim, mamba.state), wide=True),
        ),
        form="mamba",
    )
