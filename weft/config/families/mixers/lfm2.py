"""LFM2, LFM2.5 and LFM2-MoE: gated short convolutions in most layers, grouped-query attention in the others.

Source: LFM2, arXiv 2511.23404; the model cards of LiquidAI/LFM2-1.2B and LFM2-8B-A1B.
"""

from __future__ import annotations

from typing import Any

import msgspec

from weft.config.families.common import FULL, Defaults, decoder_spec, layer_count
from weft.config.families.facts import MOST_PARTS, Facts
from weft.config.families.mixers.state_caches import conv_cache
from weft.config.parts.mixers import ConvSpec
from weft.config.spec import ModelSpec, MoESpec

CONV = "conv"

_DEFAULTS = Defaults(kv_heads=8, max_position=128_000, theta=1e6, bos_id=1, eos_ids=(2,), intermediate=12288)
_MOE_DEFAULTS = msgspec.structs.replace(_DEFAULTS, intermediate=7168)


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec of LFM2. Raise ConfigError."""
    return _spec(facts, override, _DEFAULTS, intermediate=_intermediate(facts))


def build_moe_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec of LFM2-MoE: the layers from ``num_dense_layers`` on route. Raise ConfigError."""
    layers = layer_count(facts, override)
    experts = facts.integer("num_experts", 32, high=MOST_PARTS)
    top_k = facts.integer("num_experts_per_tok", 4)
    if top_k > experts:
        raise facts.fail("num_experts_per_tok", f"{top_k} is more than num_experts {experts}")
    routed = tuple(range(facts.integer("num_dense_layers", 2, low=0), layers))
    moe = MoESpec(
        experts=experts,
        top_k=top_k,
        intermediate=facts.integer("moe_intermediate_size", 1792),
        renormalize=facts.flag("norm_topk_prob", True),
        layers=routed,
        scoring="sigmoid",
        correction=facts.flag("use_expert_bias", True),
        scale=facts.number("routed_scaling_factor", 1.0),
    )
    return _spec(facts, override, _MOE_DEFAULTS, moe=moe if routed else None)


def _spec(facts: Facts, override: int | None, defaults: Defaults, **more: Any) -> ModelSpec:
    """Return the common part of both specs. ``more``: further fields of ``ModelSpec``. Raise ConfigError."""
    layers = layer_count(facts, override)
    types = _types(facts, layers)
    # The publisher's own configurations say ``tie_embedding``.
    tied = facts.flag("tie_embedding", facts.flag("tie_word_embeddings", True))
    result = decoder_spec(
        facts,
        family="lfm2",
        layers=layers,
        defaults=defaults,
        window=None,
        types=types,
        qk_norm=True,
        norm_eps=facts.number("norm_eps", 1e-5),
        tied=tied,
        **more,
    )
    convs = tuple(i for i, kind in enumerate(types) if kind == CONV)
    if not convs:
        return result
    if result.hidden % result.heads:
        raise facts.fail("hidden_size", f"{result.hidden} is not a multiple of num_attention_heads")
    conv = ConvSpec(
        layers=convs,
        heads=result.heads,
        dim=result.hidden // result.heads,
        taps=facts.integer("conv_L_cache", 3, low=2, high=64),
        bias=facts.flag("conv_bias", False),
    )
    return msgspec.structs.replace(result, conv=conv, caches=(*result.caches, conv_cache(conv)))


def _types(facts: Facts, layers: int) -> list[str]:
    """Return the type of each layer: ``layer_types``, or attention in the layers ``full_attn_idxs``.

    Raise ConfigError.
    """
    types = facts.get("layer_types")
    if types is None:
        attending = (
            facts.integers("full_attn_idxs") if facts.get("full_attn_idxs") is not None else range(layers)
        )
        return [FULL if i in attending else CONV for i in range(layers)]
    if not isinstance(types, list) or any(kind not in (FULL, CONV) for kind in types):
        raise facts.fail("layer_types", f"must be a list of {FULL} and {CONV}, not {types!r}")
    if len(types) < layers:
        raise facts.fail("layer_types", f"has {len(types)} entries for {layers} layers")
    return types[:layers]


def _intermediate(facts: Facts) -> int:
    """Return the width of the feed-forward blocks: two thirds of the stated width, times a factor, rounded up
    to a multiple; with ``block_auto_adjust_ff_dim`` false the stated width. Raise ConfigError.
    """
    stated = facts.integer("block_ff_dim", facts.integer("intermediate_size", 12288))
    multiple = facts.integer("block_multiple_of", 256)
    factor = facts.optional_number("block_ffn_dim_multiplier")
    if not facts.flag("block_auto_adjust_ff_dim", True):
        return stated
    width = int(2 * stated / 3)
    if factor is not None or "block_ffn_dim_multiplier" not in facts:
        width = int((factor or 1.0) * width)
        width = -(-width // multiple) * multiple
    return width
