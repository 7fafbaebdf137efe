"""Qwen2 and Qwen2.5: biases on queries, keys and values; windows in some layers. Source: arXiv 2407.10671."""

from __future__ import annotations

from weft.config.families.common import Defaults, decoder_spec, layer_count, window_layers
from weft.config.families.facts import Facts
from weft.config.spec import ModelSpec

_DEFAULTS = Defaults(kv_heads=32)


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec. The biases belong to the family; no field switches them off. Raise ConfigError."""
    layers = layer_count(facts, override)
    window, types = window_layers(facts, layers)
    return decoder_spec(
        facts, family="qwen2", layers=layers, defaults=_DEFAULTS, window=window, types=types, qkv_bias=True
    )
