"""Readers of routed experts for rows."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from weft.config.families.facts import MOST_PARTS, Facts
from weft.config.spec import MoESpec


def grouped_sigmoid(facts: Facts, layers: int) -> MoESpec | None:
    """Return the routing of experts with sigmoid scores, a correction and groups, as in DeepSeek V3.

    Raise ConfigError.
    """
    # Some files have the name of the method as the name of the function.
    for name, known in (("topk_method", ("noaux_tc",)), ("scoring_func", ("sigmoid", "noaux_tc"))):
        if facts.get(name) not in (None, *known):
            raise facts.fail(name, f"{facts.get(name)!r} is not supported; there is: {known[0]}")
    if facts.integer("moe_layer_freq", 1) != 1:
        raise facts.fail("moe_layer_freq", "other than 1 is not supported")
    first = facts.integer("first_k_dense_replace", 0, low=0)
    routed = tuple(range(first, layers))
    if not routed or not facts.get("n_routed_experts"):
        return None
    experts = facts.integer("n_routed_experts", high=MOST_PARTS)
    groups = facts.integer("n_group", 1)
    chosen = facts.integer("topk_group", 1)
    top_k = facts.integer("num_experts_per_tok")
    if experts % groups or chosen > groups or (groups > 1 and experts // groups < 2):
        raise facts.fail("n_group", f"{groups} does not fit {experts} experts and topk_group {chosen}")
    check_top_k(facts, "num_experts_per_tok", top_k, experts // groups * chosen)
    inner = facts.integer("moe_intermediate_size")
    return MoESpec(
        experts=experts,
        top_k=top_k,
        intermediate=inner,
        renormalize=facts.flag("norm_topk_prob", False),
        layers=routed,
        scoring="sigmoid",
        correction=True,
        groups=groups,
        top_groups=chosen,
        group_rule="top2",
        scale=facts.number("routed_scaling_factor", 1.0),
        shared=facts.integer("n_shared_experts", 0, low=0) * inner,
    )


def typed_sigmoid(facts: Facts, layers: int) -> MoESpec | None:
    """Return the routing of ``grouped_sigmoid`` in the layers that ``mlp_layer_types`` calls sparse.

    Published files of K-EXAONE have ``is_moe_layer`` instead. Without both fields, the layers from
    ``first_k_dense_replace`` (default 1) on route. Raise ConfigError.
    """
    types, flags = facts.get("mlp_layer_types"), facts.get("is_moe_layer")
    if types is None and isinstance(flags, list):
        types = ["sparse" if flag is True else "dense" if flag is False else "" for flag in flags]
    if types is None:
        first = min(facts.integer("first_k_dense_replace", 1, low=0), layers)
        types = ["dense"] * first + ["sparse"] * (layers - first)
    if not isinstance(types, list) or len(types) < layers or set(types) - {"dense", "sparse"}:
        name = "mlp_layer_types" if facts.get("mlp_layer_types") is not None else "is_moe_layer"
        raise facts.fail(name, f"must have an entry, dense or sparse, for each of {layers} layers")
    made = grouped_sigmoid(facts, layers)
    routed = tuple(i for i in range(layers) if types[i] == "sparse")
    return None if made is None or not routed else msgspec.structs.replace(made, layers=routed)


def softmax_experts(
    *,
    count: str = "num_local_experts",
    top_k: str = "num_experts_per_tok",
    inner: str = "moe_intermediate_size",
    shared: str = "",
    renormalized: str = "",
) -> Callable[[Facts, int], MoESpec]:
    """Return the reader of experts in all layers: a softmax over the chosen experts.

    The arguments name fields. ``shared``: total width of shared experts. ``renormalized``: false for a
    softmax over all experts.
    """

    def read(facts: Facts, layers: int) -> MoESpec:
        """Return the routing. Raise ConfigError."""
        total = facts.integer(count, high=MOST_PARTS)
        chosen = facts.integer(top_k)
        check_top_k(facts, top_k, chosen, total)
        return MoESpec(
            experts=total,
            top_k=chosen,
            intermediate=facts.integer(inner),
            renormalize=facts.flag(renormalized, False) if renormalized else True,
            layers=tuple(range(layers)),
            shared=facts.integer(shared, 0, low=0) if shared else 0,
        )

    return read


def sigmoid_experts(facts: Facts, layers: int) -> MoESpec:
    """Return the routing of all layers by sigmoid scores and a correction, without groups.

    Raise ConfigError.
    """
    experts = facts.integer("num_local_experts", high=MOST_PARTS)
    top_k = facts.integer("num_experts_per_tok")
    check_top_k(facts, "num_experts_per_tok", top_k, experts)
    return MoESpec(
        experts=experts,
        top_k=top_k,
        intermediate=facts.integer("intermediate_size"),
        renormalize=True,
        layers=tuple(range(layers)),
        scoring="sigmoid",
        correction=True,
    )


def one_number(facts: Facts, name: str) -> int:
    """Return a positive integer, given once or with equal entries for all layers. Raise ConfigError."""
    values = set(facts.integers(name))
    if len(values) != 1 or min(values) < 1:
        raise facts.fail(name, f"must be one positive integer, not {facts.get(name)!r}")
    return values.pop()


def hunyuan_experts(facts: Facts, layers: int) -> MoESpec:
    """Return the routing of Hunyuan: a softmax over the chosen experts, beside one shared expert.

    Raise ConfigError.
    """
    experts, top_k = one_number(facts, "num_experts"), one_number(facts, "moe_topk")
    check_top_k(facts, "moe_topk", top_k, experts)
    inner = facts.integer("intermediate_size")
    for name in ("num_shared_expert", "num_shared_experts"):
        if set(facts.integers(name)) - {1}:
            raise facts.fail(name, "other than 1 is not supported by this version")
    if set(facts.integers("moe_intermediate_size")) - {inner}:
        raise facts.fail("moe_intermediate_size", f"other than intermediate_size {inner} is not supported")
    return MoESpec(
        experts=experts,
        top_k=top_k,
        intermediate=inner,
        renormalize=True,
        layers=tuple(range(layers)),
        shared=inner,
    )


def qwen2_experts(facts: Facts, layers: int) -> MoESpec | None:
    """Return the routing of Qwen2-MoE: a softmax over all experts, a shared expert behind a gate.

    Raise ConfigError.
    """
    made = experts_by_step(facts, layers, 60, 4, 1408)
    shared = facts.integer("shared_expert_intermediate_size", 0, low=0)
    return made and msgspec.structs.replace(made, shared=shared, shared_gate=shared > 0)


def gemma4_experts(facts: Facts, layers: int) -> MoESpec | None:
    """Return the routing of all layers beside dense feed-forwards, or None without experts.

    Raise ConfigError.
    """
    if not facts.flag("enable_moe_block", False):
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size", "expert_intermediate_size"):
            facts.get(name)
        return None
    read = softmax_experts(count="num_experts", top_k="top_k_experts")
    return msgspec.structs.replace(read(facts, layers), beside=True)


def llama4_experts(facts: Facts, layers: int) -> MoESpec | None:
    """Return the routing of Llama 4: one expert by sigmoid scores, and a shared expert. Raise ConfigError."""
    step = facts.integer("interleave_moe_layer_step", 1, low=0)
    routed = facts.integers("moe_layers") if facts.get("moe_layers") is not None else None
    if routed is None:
        routed = tuple(range(step - 1, layers, step)) if step else ()
    routed = tuple(layer for layer in routed if 0 <= layer < layers)
    experts = facts.integer("num_local_experts", high=MOST_PARTS)
    if facts.integer("num_experts_per_tok") != 1:
        raise facts.fail("num_experts_per_tok", "other than 1 is not supported by this version")
    inner = facts.integer("intermediate_size")
    if not routed:
        return None
    return MoESpec(
        experts=experts,
        top_k=1,
        intermediate=inner,
        renormalize=False,
        layers=routed,
        scoring="sigmoid",
        shared=inner,
        on_input=True,
        inputs_first=True,
    )


def ernie_experts(facts: Facts, layers: int) -> MoESpec | None:
    """Return the routing of Ernie 4.5: softmax scores and a correction. Raise ConfigError."""
    first, last = (facts.integer(f"moe_layer_{end}_index", low=-1) for end in ("start", "end"))
    every = facts.integer("moe_layer_interval")
    last = layers - 1 if last == -1 else last
    routed = tuple(i for i in range(max(first, 0), min(last + 1, layers)) if (i + 1) % every == 0)
    experts = facts.integer("moe_num_experts", low=0, high=MOST_PARTS)
    if not routed or not experts:
        return None
    top_k = facts.integer("moe_k")
    check_top_k(facts, "moe_k", top_k, experts)
    inner = facts.integer("moe_intermediate_size")
    facts.get("moe_norm_min")  # the sum of the chosen weights of a softmax is far above
    return MoESpec(
        experts=experts,
        top_k=top_k,
        intermediate=inner,
        renormalize=True,
        correction=True,
        layers=routed,
        shared=facts.integer("moe_num_shared_experts", 0, low=0) * inner,
    )


def experts_by_step(
    facts: Facts, layers: int, count: int | None = None, top_k: int | None = None, inner: int | None = None
) -> MoESpec | None:
    """Return the routing of Qwen3 with experts, or None if no layer routes.

    Layer i routes if ``decoder_sparse_step`` divides i + 1 and i is not in ``mlp_only_layers``. ``count``,
    ``top_k``, ``inner``: defaults for missing fields. Raise ConfigError, also for a missing field without a
    default.
    """
    # transformers 5 writes num_local_experts, older files have num_experts.
    field = "num_experts" if "num_experts" in facts else "num_local_experts"
    experts = facts.integer(field, count, low=0, high=MOST_PARTS)
    step = facts.integer("decoder_sparse_step", 1)
    dense = facts.integers("mlp_only_layers")
    routed = tuple(i for i in range(layers) if experts and i not in dense and (i + 1) % step == 0)
    if not routed:
        return None
    chosen = facts.integer("num_experts_per_tok", top_k)
    check_top_k(facts, "num_experts_per_tok", chosen, experts)
    return MoESpec(
        experts=experts,
        top_k=chosen,
        intermediate=facts.integer("moe_intermediate_size", inner),
        renormalize=facts.flag("norm_topk_prob", False),
        layers=routed,
    )


def check_top_k(facts: Facts, name: str, top_k: int, experts: int) -> None:
    """Raise ConfigError if the field ``name`` chooses more than ``experts`` experts."""
    if top_k > experts:
        raise facts.fail(name, f"{top_k} is more than the {experts} experts")
