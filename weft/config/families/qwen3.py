"""Qwen3, dense: RMSNorm on the heads of queries and keys instead of biases. Source: arXiv 2505.09388."""

from __future__ import annotations

from weft.config.families.common import Defaults, decoder_spec, layer_count, window_layers
from weft.config.families.facts import Facts
from weft.config.spec import ModelSpec

_DEFAULTS = Defaults(kv_heads=32, head_dim=128)


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec. ``attention_bias`` adds a bias to all four projections. Raise ConfigError."""
    layers = layer_count(facts, override)
    window, types = window_layers(facts, layers)
    bias = facts.flag("attention_bias", False)
    return decoder_spec(
        facts,
        family="qwen3",
        layers=layers,
        defaults=_DEFAULTS,
        window=window,
        types=types,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )
