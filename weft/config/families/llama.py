"""Llama 2 and 3.x.

Source: Touvron et al. 2023, arXiv 2307.09288; Grattafiori et al. 2024, arXiv 2407.21783.
"""

from __future__ import annotations

from weft.config.families.common import (
    Defaults,
    decoder_spec,
    layer_count,
    refuse_sliding_types,
    uniform_window,
)
from weft.config.families.facts import Facts
from weft.config.spec import ModelSpec

_DEFAULTS = Defaults(max_position=2048, bos_id=1, eos_ids=(2,))


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec.

    ``attention_bias`` adds a bias to all four projections, ``mlp_bias`` to all three. Raise ConfigError.
    """
    refuse_sliding_types(facts)
    layers = layer_count(facts, override)
    window, types = uniform_window(None, layers)
    bias = facts.flag("attention_bias", False)
    return decoder_spec(
        facts,
        family="llama",
        layers=layers,
        defaults=_DEFAULTS,
        window=window,
        types=types,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=facts.flag("mlp_bias", False),
    )
