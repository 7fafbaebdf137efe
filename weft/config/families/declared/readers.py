"""Readers of traits that several rows share: windows and routed experts."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from weft.config.families.common import FULL, SLIDING, layer_types
from weft.config.families.declared.first_rows import check_top_k, experts_by_step
from weft.config.families.declared.ropes import sizes_of_full_layers
from weft.config.families.declared.row import Experts, Windows
from weft.config.families.deepseek import latent_attention
from weft.config.families.facts import MOST_PARTS, Facts
from weft.config.parts.traits import LayerSpec, ScaleSpec, TemperatureSpec
from weft.config.spec import CacheSpec, ModelSpec, MoESpec


def typed_windows(facts: Facts, layers: int) -> tuple[int | None, list[str]]:
    """Return (window, type of each layer) by ``layer_types``; else window layers from ``max_window_layers``.

    Raise ConfigError.
    """
    window = facts.optional_integer("sliding_window")
    types = layer_types(facts)
    first = facts.integer("max_window_layers", layers, low=0)
    if types is None:
        types = [SLIDING if window is not None and i >= first else FULL for i in range(layers)]
    return checked_types(facts, window, types, layers)


def periodic_windows(full_every: int, field: str = "") -> Windows:
    """Return the reader of ``layer_types``; without the field every ``full_every``-th layer is full.

    ``field``: name of a field with another period.
    """

    def read(facts: Facts, layers: int) -> tuple[int | None, list[str]]:
        """Return (window, type of each layer). Raise ConfigError."""
        window = facts.optional_integer("sliding_window")
        types = layer_types(facts)
        period = facts.get(field) if field else None
        if isinstance(period, str):  # one letter per layer of the period, L with a window
            kinds = [FULL if letter == "G" else SLIDING for letter in period.upper()]
            period = None
        else:
            every = facts.integer(field, full_every) if field and period else full_every
            kinds = [SLIDING] * (every - 1) + [FULL]
        if types is None:
            types = [FULL if window is None else kinds[i % len(kinds)] for i in range(layers)]
        return checked_types(facts, window, types, layers)

    return read


def gemma4_windows(facts: Facts, layers: int) -> tuple[int | None, list[str]]:
    """Return ``periodic_windows``. The last layer of the checkpoint is full. Raise ConfigError."""
    window, types = periodic_windows(6)(facts, layers)
    if layers == facts.integer("num_hidden_layers"):
        types[-1] = FULL
    return window, types


def one_window(facts: Facts, layers: int) -> tuple[int | None, list[str]]:
    """Return (window, type of each layer) for one window in all layers, or none. Raise ConfigError."""
    window = facts.optional_integer("sliding_window")
    return window, [FULL if window is None else SLIDING] * layers


def checked_types(
    facts: Facts, window: int | None, types: list[str], layers: int
) -> tuple[int | None, list[str]]:
    """Return (window, type of each layer). Raise ConfigError for short lists and missing windows."""
    if len(types) < layers:
        raise facts.fail("layer_types", f"has {len(types)} entries for {layers} layers")
    if SLIDING in types[:layers] and window is None:
        raise facts.fail("layer_types", f"has {SLIDING}, so sliding_window must be set")
    return window, types[:layers]


def grouped_sigmoid(*, shared: bool = True) -> Experts:
    """Return the reader of experts with sigmoid scores, a correction and groups, as in DeepSeek V3.

    ``shared``: True if there are ``n_shared_experts``.
    """

    def read(facts: Facts, layers: int) -> MoESpec | None:
        """Return the routing. Raise ConfigError."""
        for name, only in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
            if (facts.get(name) or only) != only:
                raise facts.fail(name, f"{facts.get(name)!r} is not supported; there is: {only}")
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
            shared=facts.integer("n_shared_experts", 0, low=0) * inner if shared else 0,
        )

    return read


def typed_sigmoid(facts: Facts, layers: int) -> MoESpec | None:
    """Return the routing of ``grouped_sigmoid`` in the layers that ``mlp_layer_types`` calls sparse.

    Without the field, all layers except the first route. Raise ConfigError.
    """
    types = facts.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
    if not isinstance(types, list) or len(types) < layers or set(types) - {"dense", "sparse"}:
        raise facts.fail("mlp_layer_types", f"must have dense or sparse for each of {layers} layers")
    made = grouped_sigmoid()(facts, layers)
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
    if facts.get("moe_intermediate_size") not in (
        None,
        inner,
        [inner] * len(facts.integers("moe_intermediate_size")),
    ):
        raise facts.fail("moe_intermediate_size", f"other than intermediate_size {inner} is not supported")
    return MoESpec(
        experts=experts,
        top_k=top_k,
        intermediate=inner,
        renormalize=True,
        layers=tuple(range(layers)),
        shared=inner,
    )


def multipliers(facts: Facts, spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with the four factors of Granite. Raise ConfigError."""
    scales = ScaleSpec(
        embedding=facts.number("embedding_multiplier", 1.0),
        residual=facts.number("residual_multiplier", 1.0),
        attention=facts.number("attention_multiplier", 1.0),
        logits=1 / facts.number("logits_scaling", 1.0),
    )
    return msgspec.structs.replace(spec, scales=scales)


def full_attention_types(facts: Facts, spec: ModelSpec) -> ModelSpec:
    """Return ``spec``. Raise ConfigError unless ``attn_type_list`` has 1 (softmax) in all layers."""
    if set(facts.integers("attn_type_list")) - {1}:
        raise facts.fail("attn_type_list", "other than 1 is not supported by this version")
    return spec


def plain_activation(facts: Facts) -> str:
    """Return the activation of a feed-forward without a gate. Raise ConfigError."""
    name = facts.get("hidden_act")
    return name if name in ("relu2", "xielu") else facts.activation()


def gemma_embedding(facts: Facts, spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with the scale of Gemma's embeddings. Older files say gelu for gelu_pytorch_tanh."""
    activation = "gelu_pytorch_tanh" if spec.activation == "gelu" else spec.activation
    return msgspec.structs.replace(spec, scales=ScaleSpec(embedding=spec.hidden**0.5), activation=activation)


def qwen2_experts(facts: Facts, layers: int) -> MoESpec | None:
    """Return the routing of Qwen2-MoE: a softmax over all experts, a shared expert behind a gate.

    Raise ConfigError.
    """
    made = experts_by_step(facts, layers, 60, 4, 1408)
    shared = facts.integer("shared_expert_intermediate_size", 0, low=0)
    return made and msgspec.structs.replace(made, shared=shared, shared_gate=shared > 0)


def ministral_windows(facts: Facts, layers: int) -> tuple[int | None, list[str]]:
    """Return (window, type of each layer): by ``layer_types``; without, all with the window if any."""
    window, types = one_window(facts, layers)
    return checked_types(facts, window, layer_types(facts) or types, layers)


def cwm_windows(facts: Facts, layers: int) -> tuple[int | None, list[str]]:
    """Return (window, type of each layer): by ``layer_types``; without, every fourth layer from 0 is full."""
    types = layer_types(facts) or [FULL if i % 4 == 0 else SLIDING for i in range(layers)]
    return checked_types(facts, facts.optional_integer("sliding_window"), types, layers)


def gemma_scales(facts: Facts, spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with the scales of Gemma 2 and 3. Raise ConfigError."""
    scales = ScaleSpec(
        embedding=spec.hidden**0.5,
        attention=facts.number("query_pre_attn_scalar") ** -0.5,
        softcap=facts.optional_number("final_logit_softcapping") or 0.0,
    )
    return msgspec.structs.replace(spec, scales=scales)


def gemma4_traits(facts: Facts, spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with the traits of Gemma 4: other heads in full layers, shared caches, layer inputs.

    Raise ConfigError.
    """
    if facts.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise facts.fail("use_bidirectional_attention", "other than vision is not supported")
    layers = spec.layers
    full = spec.caches[0].layers if spec.caches[0].kind == "full" else ()
    equal = facts.flag("attention_k_eq_v", False)
    size, kv_heads = sizes_of_full_layers(facts)
    sizes = {"full": (kv_heads or spec.kv_heads, size), "window": (spec.kv_heads, spec.head_dim)}
    own = layers - facts.integer("num_kv_shared_layers", 0, low=0)
    sources = list(range(layers))
    for cache in spec.caches:
        kept = [layer for layer in cache.layers if layer < own]
        if not kept:
            raise facts.fail("num_kv_shared_layers", "leaves a type of layer without a cache")
        for layer in cache.layers[len(kept) :]:
            sources[layer] = kept[-1]
    caches = tuple(
        msgspec.structs.replace(
            cache,
            layers=tuple(layer for layer in cache.layers if layer < own),
            kv_heads=sizes[cache.kind][0],
            head_dim=sizes[cache.kind][1],
        )
        for cache in spec.caches
    )
    for heads, _ in sizes.values():
        if spec.heads % heads:
            raise facts.fail("num_attention_heads", f"{spec.heads} is not a multiple of {heads} KV heads")
    double = range(own, layers) if facts.flag("use_double_wide_mlp", False) else ()
    attention = msgspec.structs.replace(
        spec.attention,
        value_norm=True,
        key_is_value=full if equal else (),
        shared_kv=tuple(sources) if own < layers else (),
    )
    scales = ScaleSpec(
        embedding=spec.hidden**0.5,
        attention=1.0,
        softcap=facts.optional_number("final_logit_softcapping") or 0.0,
    )
    inputs = facts.integer("hidden_size_per_layer_input", 0, low=0)
    vocab = facts.integer("vocab_size_per_layer_input", spec.vocab_size)
    more = LayerSpec(scalar=True, inputs=inputs, inputs_vocab=vocab if inputs else 0, double=tuple(double))
    return msgspec.structs.replace(spec, caches=caches, attention=attention, scales=scales, layer=more)


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


def llama4_traits(facts: Facts, spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with the dense size, the temperature and the longest context of Llama 4.

    Layers with a rotation attend within chunks. One chunk is served: within a chunk attention is full. Raise
    ConfigError.
    """
    types = facts.get("layer_types") or []
    if set(types) - {FULL, "chunked_attention"}:
        raise facts.fail("layer_types", f"must be {FULL} or chunked_attention")
    chunk = facts.optional_integer("attention_chunk_size")
    tuned = facts.get("attn_temperature_tuning")
    warm = None
    if tuned:
        beta, length = facts.number("attn_scale"), facts.integer("floor_scale")
        warm = TemperatureSpec(beta=beta, length=length, shift=1, unrotated=True)
    return msgspec.structs.replace(
        spec,
        intermediate=facts.integer("intermediate_size_mlp"),
        max_position=min(spec.max_position, chunk or spec.max_position),
        attention=msgspec.structs.replace(spec.attention, temperature=warm),
    )


def logit_scale(facts: Facts, spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with the factor of the logits. Raise ConfigError."""
    scales = ScaleSpec(logits=facts.number("logit_scale", 1.0))
    return msgspec.structs.replace(spec, scales=scales)


def with_head_bias(facts: Facts, spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with a bias of the output head."""
    return msgspec.structs.replace(spec, head_bias=True)


def query_temperature(facts: Facts, spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with the temperature of Ministral 3: ``llama_4_scaling_beta`` of the rope parameters.

    Raise ConfigError.
    """
    parameters = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
    read = Facts(parameters if isinstance(parameters, dict) else {})
    beta = read.optional_number("llama_4_scaling_beta")
    if beta is None:
        return spec
    length = read.integer("original_max_position_embeddings")
    warm = TemperatureSpec(beta=beta, length=length)
    attention = msgspec.structs.replace(spec.attention, temperature=warm)
    return msgspec.structs.replace(spec, attention=attention)


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


def switched_windows(facts: Facts, layers: int) -> tuple[int | None, list[str]]:
    """Return (window, type of each layer): by ``layer_types``, if ``use_sliding_window`` is true.

    Raise ConfigError.
    """
    types = layer_types(facts)
    if not facts.flag("use_sliding_window", False):
        facts.get("sliding_window")
        return None, [FULL] * layers
    window = facts.optional_integer("sliding_window")
    if types is None:
        raise facts.fail("layer_types", "is missing, and use_sliding_window is true")
    return checked_types(facts, window, types, layers)


def latent(facts: Facts, spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with latent attention. Raise ConfigError."""
    nope, rope = facts.integer("qk_nope_head_dim"), facts.integer("qk_rope_head_dim")
    mla = latent_attention(facts, spec.rope, nope, rope, 0)
    layers = tuple(range(spec.layers))
    cache = CacheSpec(kind="latent", layers=layers, width=mla.kv_lora + mla.rope, form="latent")
    return msgspec.structs.replace(spec, mla=mla, head_dim=nope + rope, caches=(cache,))
