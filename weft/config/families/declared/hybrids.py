"""OLMo Hybrid: gated delta nets in most layers, attention as in OLMo 3 in the others.

Layers with delta nets have norms before their parts, layers with attention have norms behind their parts.
Source: the model card of allenai/Olmo-Hybrid-7B.
"""

from __future__ import annotations

import msgspec

from weft.config.families.common import FULL
from weft.config.families.declared.ropes import RopeInput, RopeTraits, one_rope
from weft.config.families.facts import Facts
from weft.config.families.qwen3_next import DeltaSizes, delta_spec, hybrid_types, state_cache
from weft.config.spec import ModelSpec, RopeSpec

_NORM_EPS = 1e-5
"""Epsilon of the norm of a delta net. No field of config.json states this number."""


def hybrid_layers(facts: Facts, layers: int) -> tuple[int | None, list[str]]:
    """Return (None, type of each of the first ``layers`` layers). Raise ConfigError.

    Without ``layer_types``, every fourth layer attends, or the last layer of a model of fewer layers.
    """
    if facts.get("layer_types") is not None:
        return None, hybrid_types(facts, layers)
    count = facts.integer("num_hidden_layers")
    types = hybrid_types(facts, count, 4)
    if count < 4:
        types[-1] = FULL
    return None, types[:layers]


def rope_or_none(facts: Facts, given: RopeInput) -> RopeTraits:
    """Return the rotary embedding; none if ``rope_theta`` is null. Raise ConfigError."""
    parameters = facts.get("rope_scaling") or facts.get("rope_parameters")
    inside = isinstance(parameters, dict) and "rope_theta" in parameters
    stated = Facts(parameters) if inside else facts
    if "rope_theta" in stated and stated.get("rope_theta") is None:
        return RopeTraits(rope=RopeSpec(dim=0, max_position=given.max_position))
    return one_rope(facts, given)


def with_delta_nets(facts: Facts, spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with the delta nets of the layers without attention. Raise ConfigError."""
    attending = {layer for cache in spec.caches for layer in cache.layers}
    recurrent = tuple(layer for layer in range(spec.layers) if layer not in attending)
    spec = msgspec.structs.replace(spec, family="olmo_hybrid")
    k_heads = facts.optional_integer("linear_num_key_heads") or spec.heads
    k_dim = facts.optional_integer("linear_key_head_dim") or int(0.75 * spec.hidden / k_heads)
    sizes = DeltaSizes(k_heads=k_heads, v_heads=spec.heads, k_dim=k_dim, v_dim=2 * k_dim, matrices=6)
    delta = msgspec.structs.replace(
        delta_spec(facts, recurrent, sizes),
        reach=2.0 if facts.flag("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=_NORM_EPS,
    )
    if not recurrent:
        return spec
    return msgspec.structs.replace(spec, delta=delta, caches=(*spec.caches, state_cache(delta)))
