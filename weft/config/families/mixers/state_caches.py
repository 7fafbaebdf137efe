"""Facts that families with state mixers share: KV cache groups, and bounds of Mamba2's time step."""

from __future__ import annotations

import math
from typing import Any

from weft.config.families.facts import Facts
from weft.config.parts.mixers import ConvSpec, Mamba1Spec, MambaSpec
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


def mamba1_cache(mamba: Mamba1Spec) -> CacheSpec:
    """Return the state group of Mamba 1 layers: last convolution inputs, and a state for each channel."""
    return CacheSpec(
        kind="state",
        layers=mamba.layers,
        parts=(
            # [heads, taps - 1, dim]: inputs of the convolution before the next position
            StatePart(name="conv_x", shape=(mamba.heads, mamba.conv - 1, mamba.dim), wide=False),
            # [heads, state, dim], so that neighbouring channels are neighbours in memory; float32, because
            # errors would accumulate over positions
            StatePart(name="recurrent", shape=(mamba.heads, mamba.state, mamba.dim), wide=True),
        ),
        form="mamba1",
    )


_UNBOUNDED = 1e300
"""A bound of the time step from this number on is no bound: some files have 1e308 for infinity."""


def time_step_limits(facts: Facts) -> tuple[float, float]:
    """Return the bounds of the time step: ``time_step_limit``, (0, inf) if missing. Raise ConfigError."""
    limits = facts.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    bounds = [_number(one) for one in limits] if isinstance(limits, list) else []
    if len(bounds) != 2 or bounds[0] is None or bounds[1] is None or not 0 <= bounds[0] < bounds[1]:
        raise facts.fail("time_step_limit", f"must be two numbers, 0 <= low < high, not {limits!r}")
    return bounds[0], math.inf if bounds[1] >= _UNBOUNDED else bounds[1]


def _number(value: Any) -> float | None:
    """Return a number of a JSON file, or None for anything else. transformers writes infinity as an
    object.
    """
    if isinstance(value, dict) and set(value) == {"__float__"} and value["__float__"] == "Infinity":
        return math.inf
    return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
