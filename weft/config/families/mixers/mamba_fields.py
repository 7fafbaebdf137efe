"""Mamba2's fields of config.json as Bamba, Granite 4 and Falcon-H1 name them: ``mamba_n_heads`` and so on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from weft.config.families.facts import Facts
from weft.config.families.mixers.state_caches import mamba_cache, time_step_limits
from weft.config.parts.mixers import MambaSpec
from weft.config.spec import ModelSpec


def mamba_spec(
    facts: Facts,
    layers: tuple[int, ...],
    *,
    inner: int | None = None,
    norm: Literal["gated", "normed", "none"] = "gated",
) -> MambaSpec:
    """Return the Mamba2 spec for ``layers``. Raise ConfigError.

    inner: channels of all heads; None: ``mamba_expand`` times the hidden size.
    """
    if inner is None:
        inner = facts.integer("mamba_expand", 2) * facts.integer("hidden_size")
    facts.get("mamba_expand")
    heads = facts.integer("mamba_n_heads", 128)
    groups = facts.integer("mamba_n_groups", 1)
    if heads % groups:
        raise facts.fail("mamba_n_heads", f"{heads} is not a multiple of mamba_n_groups {groups}")
    if inner % heads:
        raise facts.fail("mamba_n_heads", f"{heads} does not divide the {inner} channels of all heads")
    if facts.get("mamba_d_head") not in (None, "auto", inner // heads):
        raise facts.fail("mamba_d_head", f"times mamba_n_heads must be {inner}")
    if facts.activation() != "silu":
        raise facts.fail("hidden_act", f"{facts.activation()!r} is not supported in Mamba layers")
    low, high = time_step_limits(facts)
    return MambaSpec(
        layers=layers,
        heads=heads,
        dim=inner // heads,
        groups=groups,
        state=facts.integer("mamba_d_state", 256),
        conv=facts.integer("mamba_d_conv", 4, low=2, high=64),
        conv_bias=facts.flag("mamba_conv_bias", True),
        bias=facts.flag("mamba_proj_bias", False),
        norm=norm,
        norm_groups=groups,
        low=low,
        high=high,
    )


def with_mamba(spec: ModelSpec, facts: Facts, layers: Iterable[int]) -> ModelSpec:
    """Return ``spec`` with Mamba2 mixers and their states in ``layers``. Raise ConfigError."""
    if not (recurrent := tuple(layers)):
        return spec
    mamba = mamba_spec(facts, recurrent)
    return msgspec.structs.replace(spec, mamba=mamba, caches=(*spec.caches, mamba_cache(mamba)))
