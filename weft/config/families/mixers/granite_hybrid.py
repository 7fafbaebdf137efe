"""Granite 4 (GraniteMoeHybrid): Mamba2 or attention in each layer, then a dense feed-forward, with routed
experts beside it or alone.

Source: the model cards of ibm-granite/granite-4.0-h-tiny and granite-4.0-micro.
"""

from __future__ import annotations

from typing import Any

import msgspec

from weft.config.families.common import FULL, Defaults, decoder_spec, layer_count
from weft.config.families.declared.readers import multipliers
from weft.config.families.facts import MOST_PARTS, Facts
from weft.config.families.mixers.mamba_fields import with_mamba
from weft.config.spec import ModelSpec, MoESpec, RopeSpec

MAMBA = "linear_attention"
_NAMES = {"attention": FULL, FULL: FULL, "mamba": MAMBA, MAMBA: MAMBA}
_DEFAULTS = Defaults(max_position=2048, bos_id=1, eos_ids=(2,))


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec. ``shared_intermediate_size`` is the width of the dense feed-forward. Raise
    ConfigError.
    """
    layers = layer_count(facts, override)
    types = _types(facts, layers)
    shared = facts.integer("shared_intermediate_size", 1024)
    positions = facts.integer("max_position_embeddings", _DEFAULTS.max_position)
    bias = facts.flag("attention_bias", False)
    kind = facts.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise facts.fail("position_embedding_type", f"{kind!r} is not supported; there are: rope, nope")
    rope: dict[str, Any] = {} if kind == "rope" else {"rope": RopeSpec(dim=0, max_position=positions)}
    result = decoder_spec(
        facts,
        family="granite_hybrid",
        layers=layers,
        defaults=_DEFAULTS,
        window=None,
        types=types,
        qkv_bias=bias,
        o_bias=bias,
        moe=_moe(facts, layers, shared),
        **rope,
    )
    result = multipliers(facts, msgspec.structs.replace(result, intermediate=shared))
    return with_mamba(result, facts, (i for i, name in enumerate(types) if name == MAMBA))


def _types(facts: Facts, layers: int) -> list[str]:
    """Return the type of each layer: ``layer_types``, all Mamba2 if missing. Raise ConfigError."""
    names = facts.get("layer_types")
    names = facts.get("layers_block_type") if names is None else names
    if names is None:
        return [MAMBA] * layers
    if not isinstance(names, list) or any(name not in _NAMES for name in names):
        raise facts.fail("layer_types", f"must be a list of {', '.join(_NAMES)}, not {names!r}")
    if len(names) < layers:
        raise facts.fail("layer_types", f"has {len(names)} entries for {layers} layers")
    return [_NAMES[name] for name in names[:layers]]


def _moe(facts: Facts, layers: int, shared: int) -> MoESpec | None:
    """Return the routed experts of every layer, or None without experts. Raise ConfigError."""
    experts = facts.integer("num_local_experts", 8, low=0, high=MOST_PARTS)
    top_k = facts.integer("num_experts_per_tok", 2, low=0)
    if not experts:
        return None
    if not 1 <= top_k <= experts:
        raise facts.fail("num_experts_per_tok", f"{top_k} is not 1 to num_local_experts {experts}")
    return MoESpec(
        experts=experts,
        top_k=top_k,
        intermediate=facts.integer("intermediate_size"),
        renormalize=True,
        layers=tuple(range(layers)),
        shared=shared,
    )
