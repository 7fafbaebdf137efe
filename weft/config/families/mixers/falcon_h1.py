"""Falcon-H1: Mamba2 and grouped-query attention side by side in every layer, with constant factors.

The caches of a layer's Mamba2 have a layer number of their own, so attention and Mamba2 of a layer are
separate in transfers. Source: arXiv 2507.22448.
"""

from __future__ import annotations

import msgspec

from weft.config.families.common import FULL, Defaults, decoder_spec, layer_count
from weft.config.families.facts import Facts
from weft.config.families.mixers.mamba_fields import mamba_spec
from weft.config.families.mixers.state_caches import mamba_cache
from weft.config.parts.mixers import MambaSpec, ParallelSpec
from weft.config.parts.traits import ScaleSpec
from weft.config.spec import ModelSpec

_DEFAULTS = Defaults(kv_heads=8, max_position=8192, norm_eps=1e-5, intermediate=14336, bos_id=1, eos_ids=(2,))


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec. Raise ConfigError."""
    layers = layer_count(facts, override)
    bias = facts.flag("attention_bias", False)
    gate, down = _factors(facts, "mlp_multipliers", 2)
    result = decoder_spec(
        facts,
        family="falcon_h1",
        layers=layers,
        defaults=_DEFAULTS,
        window=None,
        types=[FULL] * layers,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=facts.flag("mlp_bias", False),
        scales=ScaleSpec(
            embedding=facts.number("embedding_multiplier", 1.0),
            logits=facts.number("lm_head_multiplier", 1.0),
        ),
        parallel=ParallelSpec(
            attention_in=facts.number("attention_in_multiplier", 1.0),
            attention_out=facts.number("attention_out_multiplier", 1.0),
            key=facts.number("key_multiplier", 1.0),
            mamba_out=facts.number("ssm_out_multiplier", 1.0),
            gate=gate,
            down=down,
        ),
    )
    mamba = _mamba(facts, layers)
    return msgspec.structs.replace(result, mamba=mamba, caches=(*result.caches, mamba_cache(mamba)))


def _mamba(facts: Facts, layers: int) -> MambaSpec:
    """Return the Mamba2 spec, with layer numbers behind those of attention. Raise ConfigError."""
    before = facts.flag("mamba_norm_before_gate", True)
    normed = facts.flag("mamba_rms_norm", False)
    # A missing field has a default, an explicit null means a multiple of the hidden size.
    inner = facts.optional_integer("mamba_d_ssm") if "mamba_d_ssm" in facts else 1024
    mamba = mamba_spec(
        facts,
        tuple(range(layers, 2 * layers)),
        inner=inner,
        norm=("normed" if before else "gated") if normed else "none",
    )
    if facts.flag("projectors_bias", False) != mamba.bias:
        raise facts.fail("projectors_bias", "other than mamba_proj_bias is not supported by this version")
    z, x, b, c, step = _factors(facts, "ssm_multipliers", 5)
    return msgspec.structs.replace(
        mamba, input=facts.number("ssm_in_multiplier", 1.0), factors=(z, x, b, c, step)
    )


def _factors(facts: Facts, name: str, count: int) -> list[float]:
    """Return ``count`` factors, all 1 if the field is missing. Raise ConfigError."""
    values = facts.get(name)
    if values is None:
        return [1.0] * count
    numbers = isinstance(values, list) and len(values) == count
    if not numbers or any(isinstance(one, bool) or not isinstance(one, int | float) for one in values):
        raise facts.fail(name, f"must be a list of {count} numbers, not {values!r}")
    return [float(one) for one in values]
