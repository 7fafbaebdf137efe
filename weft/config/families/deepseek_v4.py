"""DeepSeek V4: a window plus compressed groups, hyper-connections, and experts by score or by token id.

Source: DeepSeek-V4 (2026), sections 2.1 to 2.3. ``config.json`` has two forms. The form of transformers has a
list of types, ``compress_rates``, and ``rope_parameters`` with ``main`` and ``compress``. The published form
has ``compress_ratios``, ``num_hash_layers``, ``rope_scaling`` and ``compress_rope_theta``.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from weft.config.families.common import Defaults, decoder_spec, layer_count
from weft.config.families.facts import MOST_PARTS, Facts
from weft.config.families.rope_settings import rope_spec, served_positions
from weft.config.spec import CacheSpec, HyperSpec, ModelSpec, MoESpec, RopeSpec, SparseSpec

_Type: TypeAlias = Literal["window", "chosen", "all"]

_DEFAULTS = Defaults(
    kv_heads=1, head_dim=512, max_position=1 << 20, intermediate=2048, bos_id=0, eos_ids=(1,)
)
_CSA, _HCA = "compressed_sparse_attention", "heavily_compressed_attention"
_TYPES: dict[str, _Type] = {"sliding_attention": "window", _CSA: "chosen", _HCA: "all"}
_RATIOS: dict[int, _Type] = {0: "window", 4: "chosen", 128: "all"}
_SCORINGS: dict[str, Literal["sqrtsoftplus", "sigmoid", "softmax"]] = {
    "sqrtsoftplus": "sqrtsoftplus",
    "sigmoid": "sigmoid",
    "softmax": "softmax",
}


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec. Modules that predict further tokens are skipped.

    ``override``: see ``common.layer_count``. Raise ConfigError.
    """
    layers = layer_count(facts, override)
    for name, only in (
        ("num_key_value_heads", 1),
        ("n_shared_experts", 1),
        ("norm_topk_prob", True),
        ("attention_bias", False),
        ("mlp_bias", False),
    ):
        if facts.get(name) not in (None, only):
            raise facts.fail(name, f"= {facts.get(name)!r} is not supported for DeepSeek V4")
    rope, group_rope = _ropes(facts)
    sparse = _sparse(facts, layers, group_rope)
    spec = decoder_spec(
        facts,
        family="deepseek_v4",
        layers=layers,
        defaults=_DEFAULTS,
        window=None,
        types=(),
        rope=rope,
        intermediate=facts.integer("moe_intermediate_size", 2048),
        sinks=True,
        moe=_moe(facts, layers),
        sparse=sparse,
        hyper=HyperSpec(
            streams=facts.integer("hc_mult", 4, high=64),
            iterations=facts.integer("hc_sinkhorn_iters", 20, high=1000),
            eps=facts.number("hc_eps", 1e-6),
        ),
        caches=_caches(facts, sparse),
        max_position=max(served_positions(rope), served_positions(group_rope)),
    )
    if spec.heads % sparse.o_groups:
        raise facts.fail("o_groups", f"{sparse.o_groups} does not divide the {spec.heads} heads")
    return spec


def _sparse(facts: Facts, layers: int, group_rope: RopeSpec) -> SparseSpec:
    """Return the sparse attention spec. Raise ConfigError."""
    rates = facts.get("compress_rates")
    rates = Facts(rates if isinstance(rates, dict) else {})
    sparse = SparseSpec(
        types=_types(facts, layers),
        window=facts.integer("sliding_window", 128),
        chosen_ratio=facts.optional_integer("compress_rate_csa") or rates.integer(_CSA, 4),
        all_ratio=facts.optional_integer("compress_rate_hca") or rates.integer(_HCA, 128),
        q_lora=facts.integer("q_lora_rank", 1024),
        o_groups=facts.integer("o_groups", 8),
        o_lora=facts.integer("o_lora_rank", 1024),
        index_heads=facts.integer("index_n_heads", 64),
        index_dim=facts.integer("index_head_dim", 128),
        index_top=facts.integer("index_topk", 512),
        group_rope=group_rope,
    )
    if sparse.index_dim < group_rope.dim:
        raise facts.fail(
            "index_head_dim", f"{sparse.index_dim} is less than the {group_rope.dim} rotated dims"
        )
    return sparse


def _types(facts: Facts, layers: int) -> tuple[_Type, ...]:
    """Return the type of each served layer; the fields may name more layers. Raise ConfigError."""
    named = facts.get("layer_types")
    ratios = facts.get("compress_ratios")
    # Default: two layers with all groups, then chosen and all in turn.
    if named is None and ratios is None:
        return tuple("chosen" if i > 1 and i % 2 else "all" for i in range(layers))
    field, table = ("compress_ratios", _RATIOS) if named is None else ("layer_types", _TYPES)
    found = facts.get(field)
    if not isinstance(found, list) or len(found) < layers:
        raise facts.fail(field, f"must be a list of at least {layers} entries")
    types = []
    for entry in found[:layers]:
        if not isinstance(entry, int | str) or entry not in table:
            known = ", ".join(map(str, table))
            raise facts.fail(field, f"entry {entry!r} is not supported; there are: {known}")
        types.append(table[entry])  # type: ignore[index]
    return tuple(types)


def _ropes(facts: Facts) -> tuple[RopeSpec, RopeSpec]:
    """Return the rotary embeddings of (layers with only a window, layers with groups). Raise ConfigError."""
    head_dim = facts.integer("head_dim", _DEFAULTS.head_dim)
    positions = facts.integer("max_position_embeddings", _DEFAULTS.max_position)
    share = facts.optional_number("partial_rotary_factor")
    if share is None:
        share = facts.integer("qk_rope_head_dim", head_dim // 8) / head_dim
    flat = facts.get("rope_scaling") or facts.get("rope_parameters") or {}
    if not isinstance(flat, dict):
        raise facts.fail("rope_parameters", f"must be an object, not {flat!r}")
    main = flat.get("main")
    groups = flat.get("compress")
    # The form of transformers: one set of parameters per type of layer.
    if isinstance(main, dict) and isinstance(groups, dict):
        parts = [main, groups]
        shares = {Facts(part).number("partial_rotary_factor", 1.0) for part in parts}
        if len(shares) != 1:
            raise facts.fail("rope_parameters", "must have one partial_rotary_factor for main and compress")
        share = shares.pop()
    else:
        scaled = {name: value for name, value in flat.items() if name not in ("main", "compress")}
        kind = scaled.get("rope_type") or scaled.get("type")
        if kind == "yarn" and scaled.get("attention_factor") is None:
            scaled["attention_factor"] = 1.0  # the published model uses no temperature
        theta = facts.number("compress_rope_theta", 160000.0, above=1.0)
        parts = [
            {"rope_theta": facts.number("rope_theta", 10000.0, above=1.0)},
            {**scaled, "rope_theta": theta},
        ]
    dim = int(head_dim * share)
    if not 0 < dim <= head_dim or dim % 2:
        raise facts.fail("partial_rotary_factor", f"rotates {dim} of {head_dim} dims")
    made = []
    for part in parts:
        fields: dict[str, Any] = {k: v for k, v in part.items() if k != "partial_rotary_factor"}
        made.append(rope_spec(Facts({"rope_parameters": fields}), dim, positions, _DEFAULTS.theta))
        if made[-1].kind == "dynamic":
            raise facts.fail("rope_parameters", "of the kind 'dynamic' is not supported for DeepSeek V4")
    return made[0], made[1]


def _caches(facts: Facts, sparse: SparseSpec) -> tuple[CacheSpec, ...]:
    """Return the KV cache groups: window entries, then, per type with groups, group sources and group
    entries. Raise ConfigError.

    The source entries of a group stay until the next group is complete; for both groups if groups overlap.
    """
    dim = facts.integer("head_dim", _DEFAULTS.head_dim)
    everywhere = range(len(sparse.types))
    caches = [
        CacheSpec(kind="latent", layers=tuple(everywhere), window=sparse.window, width=dim, form="sparse")
    ]
    for kind, ratio, width, overlap in (
        ("chosen", sparse.chosen_ratio, dim + sparse.index_dim, 2),
        ("all", sparse.all_ratio, dim, 1),
    ):
        layers = tuple(i for i in everywhere if sparse.types[i] == kind)
        if not layers:
            continue
        sources = CacheSpec(
            kind="latent", layers=layers, window=overlap * ratio, width=2 * overlap * width, form=""
        )
        caches += [
            sources,
            CacheSpec(kind="compressed", layers=layers, width=width, ratio=ratio, form="sparse"),
        ]
    return tuple(caches)


def _moe(facts: Facts, layers: int) -> MoESpec:
    """Return the routed experts. Raise ConfigError."""
    types = facts.get("mlp_layer_types")
    if types is None:
        first = facts.integer("num_hash_layers", 3, low=0)
        types = ["hash_moe" if i < first else "moe" for i in range(layers)]
    # The first layers choose experts by token id, the others by score.
    if not isinstance(types, list) or len(types) < layers or any(t not in ("hash_moe", "moe") for t in types):
        raise facts.fail("mlp_layer_types", f"must be a list of hash_moe and moe, at least {layers} entries")
    scoring = facts.get("scoring_func") or "sqrtsoftplus"
    if not isinstance(scoring, str) or scoring not in _SCORINGS:
        raise facts.fail("scoring_func", f"{scoring!r} is not supported; there are: {', '.join(_SCORINGS)}")
    inner = facts.integer("moe_intermediate_size", 2048)
    experts = facts.integer("n_routed_experts", 256, high=MOST_PARTS)
    top_k = facts.integer("num_experts_per_tok", 6)
    if top_k > experts:
        raise facts.fail("num_experts_per_tok", f"{top_k} is more than n_routed_experts {experts}")
    return MoESpec(
        experts=experts,
        top_k=top_k,
        intermediate=inner,
        renormalize=True,
        layers=tuple(range(layers)),
        scoring=_SCORINGS[scoring],
        correction=True,
        scale=facts.number("routed_scaling_factor", 1.5),
        shared=inner,
        limit=facts.number("swiglu_limit", 10.0),
        hash_layers=tuple(i for i in range(layers) if types[i] == "hash_moe"),
    )
