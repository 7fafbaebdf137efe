"""DeepSeek V2, V3 and R1, and the text model of Kimi K2, published as V3.

Source: arXiv 2405.04434 (V2), 2412.19437 (V3), 2507.20534 (Kimi K2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import msgspec

from weft.config.families.common import Defaults, decoder_spec, layer_count, refuse_sliding_types
from weft.config.families.facts import MOST_PARTS, Facts
from weft.config.spec import CacheSpec, MLASpec, ModelSpec, MoESpec, RopeSpec

_V2 = Defaults(max_position=2048, bos_id=1, eos_ids=(2,))
_V3 = Defaults(max_position=4096, bos_id=0, eos_ids=(1,))


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """Routing of a version; fields as in ``MoESpec``."""

    scoring: Literal["softmax", "sigmoid"]
    correction: bool
    groups: int
    top_groups: int
    group_rule: Literal["max", "top2"]
    renormalize: bool
    scale: float


def build_v2(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec of V2: softmax scores; ``group_limited_greedy`` prefers groups with the best expert.

    Raise ConfigError.
    """
    if facts.flag("mlp_bias", False):
        raise facts.fail("mlp_bias", "= true is not supported")
    refuse_sliding_types(facts)
    return _build(facts, override, _V2, _v2_routing, first_dense=0, q_lora=1536)


def build_v3(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec of V3: sigmoid scores, and a trained bias for the choice of experts.

    Groups are ranked by their best two experts. Raise ConfigError.
    """
    refuse_sliding_types(facts)
    spec = build_latent(facts, override)
    # The modules continue the last layer, so a model cut to fewer layers has none.
    whole = spec.layers == layer_count(facts, None)
    modules = facts.integer("num_nextn_predict_layers", 0, low=0, high=MOST_PARTS)
    return with_mtp(spec, modules) if whole and modules else spec


def build_latent(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec of ``build_v3`` without modules that predict further tokens.

    Versions with another meaning of ``layer_types`` build on the result.
    """
    return _build(facts, override, _V3, v3_routing, first_dense=3, q_lora=1536)


def _build(
    facts: Facts,
    override: int | None,
    defaults: Defaults,
    routing: Callable[[Facts], Routing],
    *,
    first_dense: int,
    q_lora: int,
) -> ModelSpec:
    """Return the spec of a version, without modules that predict further tokens. Raise ConfigError."""
    layers = layer_count(facts, override)
    nope = facts.integer("qk_nope_head_dim", 128)
    rope = facts.integer("qk_rope_head_dim", 64)
    spec = decoder_spec(
        facts,
        family="deepseek",
        layers=layers,
        defaults=defaults,
        window=None,
        types=(),
        rotated=rope,
        head_dim=nope + rope,
        o_bias=facts.flag("attention_bias", False),
        moe=routed_experts(facts, routed_layers(facts, layers, first_dense), routing),
    )
    mla = latent_attention(facts, spec.rope, nope, rope, q_lora)
    cache = CacheSpec(kind="latent", layers=tuple(range(layers)), width=mla.kv_lora + mla.rope, form="latent")
    return msgspec.structs.replace(spec, mla=mla, caches=(cache,))


def with_mtp(spec: ModelSpec, modules: int) -> ModelSpec:
    """Return ``spec`` with ``modules`` modules that predict further tokens, as layers after the last layer.

    The modules attend and route like the last layer, and join the last layer's KV cache groups.
    """
    last = spec.layers - 1
    more = tuple(range(spec.layers, spec.layers + modules))

    def extended(layers: tuple[int, ...]) -> tuple[int, ...]:
        return layers + more if last in layers else layers

    caches = tuple(msgspec.structs.replace(cache, layers=extended(cache.layers)) for cache in spec.caches)
    moe = spec.moe and msgspec.structs.replace(spec.moe, layers=extended(spec.moe.layers))
    return msgspec.structs.replace(spec, mtp_layers=modules, caches=caches, moe=moe)


def latent_attention(facts: Facts, rope: RopeSpec, nope: int, rotated: int, q_lora: int | None) -> MLASpec:
    """Return the latent attention spec. Raise ConfigError."""
    scale = (nope + rotated) ** -0.5
    if rope.kind == "yarn" and rope.mscale_all_dim:
        scale *= _temperature(rope.factor, rope.mscale_all_dim) ** 2
    # A missing rank means the default of the version; an explicit null means no low-rank projection.
    rank = facts.optional_integer("q_lora_rank") if "q_lora_rank" in facts else q_lora
    return MLASpec(
        q_lora=rank,
        kv_lora=facts.integer("kv_lora_rank", 512),
        nope=nope,
        rope=rotated,
        v=facts.integer("v_head_dim", 128),
        scale=scale,
        interleaved=facts.flag("rope_interleave", True),
        bias=facts.flag("attention_bias", False),
    )


def _temperature(factor: float, mscale: float) -> float:
    """Return the factor of scores in a context stretched by ``factor``.

    Source: arXiv 2309.00071, section 3.4.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def routed_layers(facts: Facts, layers: int, first_dense: int) -> tuple[int, ...]:
    """Return the layers with routed experts; ``first_dense``: default of ``first_k_dense_replace``."""
    if not facts.get("n_routed_experts"):
        return ()
    first = facts.integer("first_k_dense_replace", first_dense, low=0)
    every = facts.integer("moe_layer_freq", 1)
    return tuple(i for i in range(first, layers) if i % every == 0)


def routed_experts(
    facts: Facts, routed: tuple[int, ...], routing: Callable[[Facts], Routing]
) -> MoESpec | None:
    """Return the routed experts of the layers ``routed``, or None if no layer routes. Raise ConfigError."""
    shared = facts.integer("n_shared_experts", 0, low=0)
    if not routed:
        return None
    experts = facts.integer("n_routed_experts", high=MOST_PARTS)
    how = routing(facts)
    top_k = facts.integer("num_experts_per_tok", 8)
    inner = facts.integer("moe_intermediate_size")
    if experts % how.groups:
        raise facts.fail("n_routed_experts", f"{experts} is not a multiple of n_group {how.groups}")
    if how.top_groups > how.groups:
        raise facts.fail("topk_group", f"{how.top_groups} is more than n_group {how.groups}")
    if top_k > experts // how.groups * how.top_groups:
        raise facts.fail("num_experts_per_tok", f"{top_k} is more than the experts of the chosen groups")
    # The score of a group sums its best two experts.
    if how.group_rule == "top2" and experts // how.groups < 2:
        raise facts.fail(
            "n_group", f"{how.groups} leaves one expert per group, and the score of a group needs two experts"
        )
    return MoESpec(
        experts=experts,
        top_k=top_k,
        intermediate=inner,
        layers=routed,
        shared=shared * inner,
        **msgspec.structs.asdict(how),
    )


def _v2_routing(facts: Facts) -> Routing:
    """Return the routing of V2. Raise ConfigError."""
    method = facts.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise facts.fail(
            "topk_method", f"{method!r} is not supported; there are: greedy, group_limited_greedy"
        )
    if (facts.get("scoring_func") or "softmax") != "softmax":
        raise facts.fail("scoring_func", f"{facts.get('scoring_func')!r} is not supported for DeepSeek V2")
    if facts.flag("norm_topk_prob", False):
        # DeepSeek's code then omits routed_scaling_factor. Other implementations apply both or neither.
        raise facts.fail("norm_topk_prob", "= true is not supported for DeepSeek V2")
    grouped = method == "group_limited_greedy"
    return Routing(
        scoring="softmax",
        correction=False,
        groups=facts.integer("n_group", 1) if grouped else 1,
        top_groups=facts.integer("topk_group", 1) if grouped else 1,
        group_rule="max",
        renormalize=False,
        scale=facts.number("routed_scaling_factor", 1.0),
    )


def v3_routing(facts: Facts) -> Routing:
    """Return the routing of V3. Raise ConfigError."""
    for name, only in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if (facts.get(name) or only) != only:
            raise facts.fail(name, f"{facts.get(name)!r} is not supported for DeepSeek V3; there is: {only}")
    # A missing field means the published model's value; an explicit null means one group.
    groups = facts.integer("n_group", 1) if "n_group" in facts else 8
    chosen = facts.integer("topk_group", 1) if "topk_group" in facts else 4
    return Routing(
        scoring="sigmoid",
        correction=True,
        groups=groups,
        top_groups=chosen,
        group_rule="top2",
        renormalize=facts.flag("norm_topk_prob", True),
        scale=facts.number("routed_scaling_factor", 2.5),
    )
