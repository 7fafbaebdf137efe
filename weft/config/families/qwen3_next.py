"""Qwen3-Next: gated delta net in most layers, gated attention in every fourth; routed experts.

Source: the model card of Qwen/Qwen3-Next-80B-A3B-Instruct; its configuration's defaults.
"""

from __future__ import annotations

from typing import Any

import msgspec

from weft.config.families.common import FULL, Defaults, decoder_spec, layer_count
from weft.config.families.facts import MOST_PARTS, Facts
from weft.config.spec import CacheSpec, DeltaSpec, ModelSpec, MoESpec, StatePart

LINEAR = "linear_attention"
MOST_MODULES = 1
"""Maximum number of modules that predict further tokens. Published checkpoints have a single module, and
tensor names for no second one.
"""

_DEFAULTS = Defaults(kv_heads=2, head_dim=256, partial=0.25)


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec.

    Layer i routes if ``decoder_sparse_step`` divides i + 1 and i is not in ``mlp_only_layers``. Raise
    ConfigError.
    """
    layers = layer_count(facts, override)
    mtp = predicting_modules(facts, "num_nextn_predict_layers")
    step = facts.integer("decoder_sparse_step", 1)
    dense = facts.integers("mlp_only_layers")
    routed = tuple(i for i in range(layers + mtp) if i not in dense and (i + 1) % step == 0)
    return hybrid_spec(
        facts,
        family="qwen3_next",
        layers=layers,
        mtp=mtp,
        defaults=_DEFAULTS,
        moe=moe_spec(facts, routed, facts.integer("num_experts", 512, low=0, high=MOST_PARTS)),
    )


def hybrid_spec(
    facts: Facts, *, family: str, layers: int, mtp: int, defaults: Defaults, matrices: int = 2, **more: Any
) -> ModelSpec:
    """Return the spec of a decoder with delta net layers and gated attention layers, by ``layer_types``.

    Modules that predict further tokens use attention. ``matrices``: see ``DeltaSpec``. ``more``: further
    fields of ``ModelSpec``. Raise ConfigError.
    """
    types = hybrid_types(facts, layers) + [FULL] * mtp
    bias = facts.flag("attention_bias", False)
    result = decoder_spec(
        facts,
        family=family,
        layers=layers,
        defaults=defaults,
        window=None,
        types=types,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        centred_norms=True,
        output_gate=True,
        mtp_layers=mtp,
        **more,
    )
    recurrent = tuple(i for i, kind in enumerate(types) if kind == LINEAR)
    if not recurrent:
        return result
    delta = delta_spec(facts, recurrent, DeltaSizes(matrices=matrices))
    return msgspec.structs.replace(result, delta=delta, caches=(*result.caches, state_cache(delta)))


def predicting_modules(facts: Facts, field: str) -> int:
    """Return the number of modules that predict further tokens: 0 or 1. Raise ConfigError.

    The weights decide: published configurations of Qwen3-Next omit ``field``. Checkpoints saved again by
    transformers keep ``field`` but lack the weights.
    """
    stated = facts.optional_integer(field, low=0)
    if stated is not None and stated > MOST_MODULES:
        raise facts.fail(field, f"must be at most {MOST_MODULES}, not {stated}")
    # Unknown tensor names: trust the field, if present.
    return int(stated != 0 and facts.has_weights("mtp.", default=stated is not None))


def hybrid_types(facts: Facts, layers: int, interval: int | None = None) -> list[str]:
    """Return the type of each layer: ``layer_types``, or attention in every ``interval``-th layer.

    interval: None for the field ``full_attention_interval``. Raise ConfigError.
    """
    types = facts.get("layer_types")
    if types is None:
        interval = facts.integer("full_attention_interval", 4) if interval is None else interval
        return [LINEAR if (i + 1) % interval else FULL for i in range(layers)]
    if not isinstance(types, list) or any(kind not in (FULL, LINEAR) for kind in types):
        raise facts.fail("layer_types", f"must be a list of {FULL} and {LINEAR}, not {types!r}")
    if len(types) < layers:
        raise facts.fail("layer_types", f"has {len(types)} entries for {layers} layers")
    return types[:layers]


class DeltaSizes(msgspec.Struct, frozen=True, kw_only=True):
    """A family's values for missing sizes of delta nets, and its number of ``DeltaSpec.matrices``."""

    k_heads: int = 16
    v_heads: int = 32
    k_dim: int = 128
    v_dim: int = 128
    matrices: int = 2


def delta_spec(facts: Facts, layers: tuple[int, ...], missing: DeltaSizes) -> DeltaSpec:
    """Return the delta net spec for ``layers``. Raise ConfigError."""
    k_heads = facts.integer("linear_num_key_heads", missing.k_heads)
    v_heads = facts.integer("linear_num_value_heads", missing.v_heads)
    if v_heads % k_heads:
        raise facts.fail(
            "linear_num_value_heads", f"{v_heads} is not a multiple of linear_num_key_heads {k_heads}"
        )
    if facts.activation() != "silu":
        raise facts.fail("hidden_act", f"{facts.activation()!r} is not supported in linear_attention layers")
    return DeltaSpec(
        layers=layers,
        k_heads=k_heads,
        v_heads=v_heads,
        k_dim=facts.integer("linear_key_head_dim", missing.k_dim),
        v_dim=facts.integer("linear_value_head_dim", missing.v_dim),
        conv=facts.integer("linear_conv_kernel_dim", 4, low=2, high=64),
        matrices=missing.matrices,
    )


def state_cache(delta: DeltaSpec) -> CacheSpec:
    """Return the state group of delta net layers: last convolution inputs, and recurrent state."""
    back = delta.conv - 1
    return CacheSpec(
        kind="state",
        layers=delta.layers,
        parts=(
            # [heads, taps - 1, dim]: inputs of the convolution before the next position
            StatePart(name="conv_q", shape=(delta.k_heads, back, delta.k_dim), wide=False),
            StatePart(name="conv_k", shape=(delta.k_heads, back, delta.k_dim), wide=False),
            StatePart(name="conv_v", shape=(delta.v_heads, back, delta.v_dim), wide=False),
            # [heads, key dim, value dim]; float32, because errors would accumulate over positions
            StatePart(name="recurrent", shape=(delta.v_heads, delta.k_dim, delta.v_dim), wide=True),
        ),
        form="delta",
    )


def moe_spec(
    facts: Facts, routed: tuple[int, ...], experts: int, *, top_k: int = 10, renormalize: bool | None = None
) -> MoESpec | None:
    """Return routed experts plus a gated shared expert, or None if no layer routes. Raise ConfigError."""
    top_k = facts.integer("num_experts_per_tok", top_k)
    shared = facts.integer("shared_expert_intermediate_size", 512, low=0)
    intermediate = facts.integer("moe_intermediate_size", 512)
    if renormalize is None:
        renormalize = facts.flag("norm_topk_prob", True)
    if not experts or not routed:
        return None
    if top_k > experts:
        raise facts.fail("num_experts_per_tok", f"{top_k} is more than num_experts {experts}")
    return MoESpec(
        experts=experts,
        top_k=top_k,
        intermediate=intermediate,
        renormalize=renormalize,
        layers=routed,
        shared=shared,
        shared_gate=bool(shared),
    )
