"""Bailing hybrid (Ling 3): Kimi Delta Attention with bounded decays in most layers, latent attention with a
gate for each head in the others; experts as in DeepSeek V3.

Published files name ``BailingMoeV3ForCausalLM``, and have fields that the class of transformers lacks.
Source: the configuration class of transformers; arXiv 2510.26692 (Kimi Delta Attention).
"""

from __future__ import annotations

from typing import Any

import msgspec

from weft.config.families.common import FULL, Defaults, decoder_spec, layer_count
from weft.config.families.declared.build import refuse_others
from weft.config.families.declared.row import Row
from weft.config.families.deepseek import latent_attention, routed_experts, v3_routing
from weft.config.families.facts import Facts
from weft.config.families.qwen3_next import LINEAR, hybrid_types, state_cache
from weft.config.families.rope_settings import rope_spec
from weft.config.spec import CacheSpec, DeltaSpec, ModelSpec, MoESpec, RopeSpec

_DEFAULTS = Defaults(max_position=262144, theta=6e6, eos_ids=(156895,))
_MISSING: dict[str, Any] = {
    "n_group": 8,
    "topk_group": 4,
    "n_routed_experts": 512,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "routed_scaling_factor": 2.5,
    "layer_group_size": 6,
}
"""Values of missing fields, as in the configuration class."""
_ROW = Row(
    config="BailingHybridConfig",
    renamed={
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "num_nextn_predict_layers": "num_mtp_layers",
    },
    only={
        "score_function": ("sigmoid", None),
        "scoring_func": ("sigmoid", None),
        "use_bias": (False, None),
        "use_qkv_bias": (False, None),
        "gated_attention_proj_granularity_type": ("head_wise",),
        "group_norm_size": (1,),
        "linear_silu": (True, None),
        "no_kda_lora": (True, None),
        "num_kv_heads_for_linear_attn": (0, None),
        "use_mla_nope": (False, None),
        "use_nGPT": (False, None),
        "use_qk_norm": (True, None),
        "rope_interleave": (True, None),
        "moe_router_enable_expert_bias": (True, None),
    },
    # The modules that predict further tokens are skipped. No layer has a window.
    unused=(
        "num_mtp_layers|mtp_loss_scaling_factor|mtp_use_kda",
        "qk_head_dim|router_dtype|max_window_layers",
    ),
)
_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


def build_spec(given: Facts, override: int | None) -> ModelSpec:
    """Return the spec. Raise ConfigError."""
    facts = given.completed(_MISSING, _ROW.renamed)
    layers = layer_count(facts, override)
    types = hybrid_types(facts, layers, facts.integer("layer_group_size"))
    nope = facts.integer("qk_nope_head_dim", 128)
    rotated = facts.integer("qk_rope_head_dim", 64)
    recurrent = tuple(i for i, kind in enumerate(types) if kind == LINEAR)
    latent = tuple(i for i, kind in enumerate(types) if kind == FULL)
    delta = _delta(facts, recurrent)
    _refuse_limits(facts)
    spec = decoder_spec(
        facts,
        family="bailing_hybrid",
        layers=layers,
        defaults=_DEFAULTS,
        window=None,
        types=(),
        rope=_rope(facts, rotated),
        head_dim=nope + rotated,
        o_bias=facts.flag("attention_bias", False),
        moe=_experts(facts, layers),
        delta=delta if recurrent else None,
    )
    if spec.kv_heads != spec.heads:
        raise facts.fail("num_key_value_heads", f"{spec.kv_heads} is not num_attention_heads {spec.heads}")
    mla = latent_attention(facts, spec.rope, nope, rotated, None)
    mla = msgspec.structs.replace(mla, head_gate=True)
    cache = CacheSpec(kind="latent", layers=latent, width=mla.kv_lora + mla.rope, form="latent")
    refuse_others(_ROW, facts, {})
    caches = (*((cache,) if latent else ()), *((state_cache(delta),) if recurrent else ()))
    return msgspec.structs.replace(spec, mla=mla, caches=caches)


def _rope(facts: Facts, rotated: int) -> RopeSpec:
    """Return the rotary embedding of ``rotated`` dims. Raise ConfigError.

    ``partial_rotary_factor`` of published files is a share of ``head_dim``, the size of a delta net's head.
    """
    old, new = facts.get("rope_scaling"), facts.get("rope_parameters")
    parameters = old or new or {}
    stated = [facts.get("partial_rotary_factor")]
    if isinstance(parameters, dict):
        stated.append(parameters.get("partial_rotary_factor"))
        parameters = {name: value for name, value in parameters.items() if name != "partial_rotary_factor"}
    dim = facts.integer("linear_head_dim", facts.integer("head_dim", 128))
    for share in stated:
        if share not in (None, 1, 1.0, rotated / dim):
            raise facts.fail("partial_rotary_factor", f"= {share!r} is not supported by this version")
    if facts.integer("rotary_dim", rotated) != rotated:
        raise facts.fail("rotary_dim", f"{facts.get('rotary_dim')} is not qk_rope_head_dim {rotated}")
    theta = facts.number("rope_theta", _DEFAULTS.theta, above=1.0)
    positions = facts.integer("max_position_embeddings", _DEFAULTS.max_position)
    return rope_spec(Facts({"rope_parameters": parameters}, file=facts.file), rotated, positions, theta)


def _refuse_limits(facts: Facts) -> None:
    """Raise ConfigError for limits of activations in experts. 0 means no limit."""
    for name in _LIMITS:
        limits = facts.get(name)
        if limits is not None and (not isinstance(limits, list) or any(limits)):
            raise facts.fail(name, "limits activations of experts, which this version does not support")


def _experts(facts: Facts, layers: int) -> MoESpec | None:
    """Return the routed experts. The shared expert may have a width of its own. Raise ConfigError."""
    moe = routed_experts(facts, _routed(facts, layers), v3_routing)
    width = facts.optional_integer("moe_shared_expert_intermediate_size")
    if moe is None or width is None:
        return moe
    return msgspec.structs.replace(moe, shared=width * facts.integer("n_shared_experts", low=0))


def _delta(facts: Facts, layers: tuple[int, ...]) -> DeltaSpec:
    """Return the spec of Kimi Delta Attention in ``layers``. Raise ConfigError."""
    if layers and facts.activation() != "silu":
        raise facts.fail("hidden_act", f"{facts.activation()!r} is not supported in {LINEAR} layers")
    # transformers saves the sizes of delta nets in fields of their own, and other numbers in the first ones.
    heads = facts.integer("linear_num_heads", facts.integer("num_attention_heads"))
    dim = facts.integer("linear_head_dim", facts.integer("head_dim", 128))
    taps = facts.integer("short_conv_kernel_size", 4, low=2, high=64)
    bound = facts.get("kda_lower_bound")
    bound = -5.0 if bound is None else bound
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not -1e6 < bound < 0:
        raise facts.fail("kda_lower_bound", f"must be a number below 0, not {bound!r}")
    return DeltaSpec(
        layers=layers,
        k_heads=heads,
        v_heads=heads,
        k_dim=dim,
        v_dim=dim,
        conv=facts.integer("linear_conv_kernel_dim", taps, low=2, high=64),
        channel_decays=True,
        matrices=6,
        floor=float(bound) if facts.flag("kda_safe_gate", True) else 0.0,
    )


def _routed(facts: Facts, layers: int) -> tuple[int, ...]:
    """Return the layers with routed experts: by ``mlp_layer_types``, or by ``first_k_dense_replace``.

    Raise ConfigError.
    """
    first = facts.integer("first_k_dense_replace", 2, low=0)
    types = facts.get("mlp_layer_types")
    if types is None:
        return tuple(range(first, layers))
    if not isinstance(types, list) or len(types) < layers or {*types} - {"dense", "sparse"}:
        raise facts.fail("mlp_layer_types", f"must name dense or sparse for each of {layers} layers")
    return tuple(i for i in range(layers) if types[i] == "sparse")
