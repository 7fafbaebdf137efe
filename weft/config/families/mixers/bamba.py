"""Bamba: Mamba2 in most layers, grouped-query attention in the others, half of each head rotates.

Source: the model card of ibm-ai-platform/Bamba-9B-v2.
"""

from __future__ import annotations

from weft.config.families.common import FULL, Defaults, decoder_spec, layer_count
from weft.config.families.facts import Facts
from weft.config.families.mixers.mamba_fields import with_mamba
from weft.config.spec import ModelSpec

MAMBA = "linear_attention"

_DEFAULTS = Defaults(
    kv_heads=8, max_position=262144, norm_eps=1e-5, intermediate=14336, partial=0.5, bos_id=1, eos_ids=(2,)
)


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec. The layers ``attn_layer_indices`` attend. Raise ConfigError."""
    layers = layer_count(facts, override)
    attending = set(facts.integers("attn_layer_indices"))
    types = [FULL if i in attending else MAMBA for i in range(layers)]
    if facts.get("partial_rotary_factor") not in (None, _DEFAULTS.partial):
        raise facts.fail("partial_rotary_factor", "other than 0.5 is not supported for this architecture")
    bias = facts.flag("attention_bias", False)
    result = decoder_spec(
        facts,
        family="bamba",
        layers=layers,
        defaults=_DEFAULTS,
        window=None,
        types=types,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=facts.flag("mlp_bias", False),
    )
    return with_mamba(result, facts, (i for i, kind in enumerate(types) if kind == MAMBA))
