"""Mixtral: Mistral with eight routed experts in every layer. Source: Jiang et al. 2024, arXiv 2401.04088."""

from __future__ import annotations

from weft.config.families.common import (
    Defaults,
    decoder_spec,
    layer_count,
    refuse_sliding_types,
    uniform_window,
)
from weft.config.families.facts import MOST_PARTS, Facts
from weft.config.spec import ModelSpec, MoESpec

_DEFAULTS = Defaults(kv_heads=8, max_position=131072, norm_eps=1e-5, theta=1e6, bos_id=1, eos_ids=(2,))


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec. The weights of the chosen experts always sum to 1. Raise ConfigError."""
    refuse_sliding_types(facts)
    layers = layer_count(facts, override)
    window, types = uniform_window(facts.optional_integer("sliding_window"), layers)
    experts = facts.integer("num_local_experts", 8, high=MOST_PARTS)
    top_k = facts.integer("num_experts_per_tok", 2)
    if top_k > experts:
        raise facts.fail("num_experts_per_tok", f"{top_k} is more than num_local_experts {experts}")
    moe = MoESpec(
        experts=experts,
        top_k=top_k,
        intermediate=facts.integer("intermediate_size"),
        renormalize=True,
        layers=tuple(range(layers)),
    )
    return decoder_spec(
        facts, family="mixtral", layers=layers, defaults=_DEFAULTS, window=window, types=types, moe=moe
    )
