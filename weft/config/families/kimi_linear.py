"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without rotation in the others; experts
as in DeepSeek V3.

Source: Kimi Linear, arXiv 2510.26692; the configuration of moonshotai/Kimi-Linear-48B-A3B-Instruct.
"""

from __future__ import annotations

from typing import Any

from weft.config.families.common import FULL, Defaults, decoder_spec, layer_count
from weft.config.families.declared.build import refuse_others
from weft.config.families.declared.row import Row
from weft.config.families.deepseek import latent_attention, routed_experts, routed_layers, v3_routing
from weft.config.families.facts import Facts
from weft.config.families.qwen3_next import LINEAR, state_cache
from weft.config.spec import CacheSpec, DeltaSpec, ModelSpec, RopeSpec

_DEFAULTS = Defaults(max_position=1 << 20, norm_eps=1e-5, bos_id=163584, eos_ids=(163586,))
_MISSING: dict[str, Any] = {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.446,
}
"""Values of missing fields, as in the configuration class."""
_ROW = Row(
    config="KimiLinearConfig",
    renamed={
        "model_max_length": "max_position_embeddings",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "moe_renormalize": "norm_topk_prob",
    },
    # The latent attention of this architecture never rotates, and groups of experts always count.
    only={
        "mla_use_nope": (True, None),
        "moe_router_activation_func": ("sigmoid", None),
        "num_nextn_predict_layers": (0, None),
        "use_grouped_topk": (True, None),
    },
    # The sizes of heads are in fields of their own.
    unused=("head_dim", "qk_head_dim", "rope_theta", "rope_scaling", "rope_parameters"),
)
_OF_EXPERTS = (
    *(
        "first_k_dense_replace",
        "moe_layer_freq",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
    ),
    *("moe_intermediate_size", "routed_scaling_factor", "norm_topk_prob", "scoring_func", "topk_method"),
    *("n_group", "topk_group"),
)
"""Fields without effect in a model without routed experts."""
_FIELDS = ("full_attn_layers", "head_dim", "kda_layers", "num_heads", "short_conv_kernel_size")
"""Fields of ``linear_attn_config`` that are read here."""


def build_spec(given: Facts, override: int | None) -> ModelSpec:
    """Return the spec. Raise ConfigError.

    Published files say ``linear_attn_config``, with layers counted from 1. Files of transformers say
    ``layer_types`` and ``linear_num_heads``, among others.
    """
    facts = given.completed(_MISSING, _ROW.renamed)
    layers = layer_count(facts, override)
    linear = _linear_facts(facts)
    types = _layer_types(facts, linear, layers)
    nope = facts.integer("qk_nope_head_dim", 128)
    shared_key = facts.integer("qk_rope_head_dim", 64)
    # Zero of the pairs rotate: the angles of every position are 0.
    positions = facts.integer("max_position_embeddings", _DEFAULTS.max_position)
    rope = RopeSpec(kind="proportional", dim=shared_key, pairs=0, max_position=positions)
    latent = tuple(i for i, kind in enumerate(types) if kind == FULL)
    recurrent = tuple(i for i, kind in enumerate(types) if kind == LINEAR)
    delta = _delta(facts, linear, recurrent)
    mla = latent_attention(facts, rope, nope, shared_key, None)
    caches = [CacheSpec(kind="latent", layers=latent, width=mla.kv_lora + mla.rope, form="latent")]
    for name in _OF_EXPERTS:
        facts.get(name)
    spec = decoder_spec(
        facts,
        family="kimi_linear",
        layers=layers,
        defaults=_DEFAULTS,
        window=None,
        types=(),
        rope=rope,
        head_dim=nope + shared_key,
        o_bias=mla.bias,
        moe=routed_experts(facts, _routed(facts, layers), v3_routing),
        mla=mla,
        delta=delta if recurrent else None,
        caches=(*(caches if latent else ()), *((state_cache(delta),) if recurrent else ())),
    )
    refuse_others(_ROW, facts, {})
    return spec


def _linear_facts(facts: Facts) -> Facts:
    """Return the fields of ``linear_attn_config``; no fields if there is none. Raise ConfigError."""
    value = facts.get("linear_attn_config")
    if value is None:
        return Facts({}, file=facts.file)
    if not isinstance(value, dict):
        raise facts.fail("linear_attn_config", f"must be an object, not {value!r}")
    # A lower bound of the decays and other gates (Kimi K3) give other results.
    for name in value:
        if name not in _FIELDS:
            raise facts.fail(f"linear_attn_config.{name}", f"= {value[name]!r} is not supported")
    return Facts(value, file=f"{facts.file} (linear_attn_config)")


def _layer_types(facts: Facts, linear: Facts, layers: int) -> list[str]:
    """Return the type of each of the first ``layers`` layers. Raise ConfigError."""
    types = facts.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or any(kind not in (FULL, LINEAR) for kind in types):
            raise facts.fail("layer_types", f"must be a list of {FULL} and {LINEAR}, not {types!r}")
        if len(types) < layers:
            raise facts.fail("layer_types", f"has {len(types)} entries for {layers} layers")
        return types[:layers]
    if "full_attn_layers" not in linear or "kda_layers" not in linear:
        return [FULL if i and i % 4 == 0 else LINEAR for i in range(layers)]
    full, recurrent = linear.integers("full_attn_layers"), linear.integers("kda_layers")
    both = sorted((*full, *recurrent))
    if both != list(range(1, facts.integer("num_hidden_layers") + 1)):
        raise linear.fail("full_attn_layers", "and kda_layers must name each layer once, counted from 1")
    return [FULL if i + 1 in full else LINEAR for i in range(layers)]


def _delta(facts: Facts, linear: Facts, layers: tuple[int, ...]) -> DeltaSpec:
    """Return the spec of Kimi Delta Attention in ``layers``. Raise ConfigError."""
    if layers and facts.activation() != "silu":
        raise facts.fail("hidden_act", f"{facts.activation()!r} is not supported in {LINEAR} layers")
    heads = linear.integer("num_heads", facts.integer("linear_num_heads", 32))
    dim = linear.integer("head_dim", facts.integer("linear_head_dim", 128))
    taps = facts.integer("linear_conv_kernel_dim", 4, low=2, high=64)
    return DeltaSpec(
        layers=layers,
        k_heads=heads,
        v_heads=heads,
        k_dim=dim,
        v_dim=dim,
        conv=linear.integer("short_conv_kernel_size", taps, low=2, high=64),
        gate_rank=dim,
        matrices=6,
    )


def _routed(facts: Facts, layers: int) -> tuple[int, ...]:
    """Return the layers with routed experts: by ``mlp_layer_types``, or by ``first_k_dense_replace``.

    Raise ConfigError.
    """
    types = facts.get("mlp_layer_types")
    if types is None:
        return routed_layers(facts, layers, first_dense=1)
    if not isinstance(types, list) or len(types) < layers or {*types} - {"dense", "sparse"}:
        raise facts.fail("mlp_layer_types", f"must name dense or sparse for each of {layers} layers")
    facts.integer("n_routed_experts")
    return tuple(i for i in range(layers) if types[i] == "sparse")
