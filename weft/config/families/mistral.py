"""Mistral: Llama with grouped queries and, in the first version, a window over all layers.

Source: Jiang et al. 2023, arXiv 2310.06825.
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

_DEFAULTS = Defaults(kv_heads=8, max_position=131072, bos_id=1, eos_ids=(2,))


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec.

    A null ``sliding_window`` (from version 0.2) means full attention; a missing field means 4096. Raise
    ConfigError.
    """
    refuse_sliding_types(facts)
    layers = layer_count(facts, override)
    window = facts.optional_integer("sliding_window") if "sliding_window" in facts else 4096
    window, types = uniform_window(window, layers)
    return decoder_spec(
        facts, family="mistral", layers=layers, defaults=_DEFAULTS, window=window, types=types
    )
