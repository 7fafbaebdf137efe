"""Readers of traits that several rows share: windows, scales, kinds of layers."""

from __future__ import annotations

import msgspec

from weft.config.families.common import FULL, SLIDING, layer_types, refuse_sliding_types, uniform_window
from weft.config.families.declared.ropes import sizes_of_full_layers
from weft.config.families.declared.row import Windows
from weft.config.families.deepseek import latent_attention
from weft.config.families.facts import Facts
from weft.config.parts.traits import LayerSpec, ScaleSpec, TemperatureSpec
from weft.config.spec import CacheSpec, ModelSpec

CHUNKED = "chunked_attention"
"""Type of a layer that attends within chunks of positions."""


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
    return uniform_window(facts.optional_integer("sliding_window"), layers)


def full_layers(facts: Facts, layers: int) -> tuple[int | None, list[str]]:
    """Return (None, type of each layer) for full attention. Raise ConfigError for layers with a window."""
    refuse_sliding_types(facts)
    return uniform_window(None, layers)


def window_everywhere(facts: Facts, layers: int) -> tuple[int | None, list[str]]:
    """Return (window, type of each layer) by ``sliding_window``; null means full attention.

    Raise ConfigError for windows per layer.
    """
    refuse_sliding_types(facts)
    return one_window(facts, layers)


def switched_window(facts: Facts, layers: int) -> tuple[int | None, list[str]]:
    """Return (window, type of each layer): a window in all layers with ``use_sliding_window``, else none.

    Raise ConfigError for windows per layer.
    """
    on = facts.flag("use_sliding_window", False)
    facts.get("max_window_layers")  # a setting of Qwen2 and of dense Qwen3
    window, types = window_everywhere(facts, layers)
    return (window, types) if on else uniform_window(None, layers)


def checked_types(
    facts: Facts, window: int | None, types: list[str], layers: int
) -> tuple[int | None, list[str]]:
    """Return (window, type of each layer). Raise ConfigError for short lists and missing windows."""
    if len(types) < layers:
        raise facts.fail("layer_types", f"has {len(types)} entries for {layers} layers")
    if SLIDING in types[:layers] and window is None:
        raise facts.fail("layer_types", f"has {SLIDING}, so sliding_window must be set")
    return window, types[:layers]


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
    scales = ScaleSpec(embedding=spec.hidden**0.5, embedding_rounded=True)
    return msgspec.structs.replace(spec, scales=scales, activation=activation)


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
        embedding_rounded=True,
        attention=facts.number("query_pre_attn_scalar") ** -0.5,
        softcap=facts.optional_number("final_logit_softcapping") or 0.0,
    )
    return msgspec.structs.replace(spec, scales=scales)


def gemma2_scales(facts: Facts, spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with the scales of Gemma 2, and the cap of its attention scores. Raise ConfigError."""
    spec = gemma_scales(facts, spec)
    cap = facts.optional_number("attn_logit_softcapping") or 0.0
    return msgspec.structs.replace(spec, scales=msgspec.structs.replace(spec.scales, attention_softcap=cap))


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
        embedding_rounded=True,
        attention=1.0,
        softcap=facts.optional_number("final_logit_softcapping") or 0.0,
    )
    inputs = facts.integer("hidden_size_per_layer_input", 0, low=0)
    vocab = facts.integer("vocab_size_per_layer_input", spec.vocab_size)
    pad = facts.integer("pad_token_id", 0, low=0) if inputs else 0
    more_inputs = {"inputs": inputs, "inputs_vocab": vocab if inputs else 0, "inputs_pad": pad}
    more = LayerSpec(scalar=True, double=tuple(double), **more_inputs)
    return msgspec.structs.replace(spec, caches=caches, attention=attention, scales=scales, layer=more)


def llama4_traits(facts: Facts, spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with the dense size, the temperature and the chunks of Llama 4.

    Layers with a rotation attend within chunks of positions. Raise ConfigError.
    """
    types = facts.get("layer_types") or [
        CHUNKED if spec.attention.rope(layer) >= 0 else FULL for layer in range(spec.layers)
    ]
    if not isinstance(types, list) or len(types) < spec.layers or set(types) - {FULL, CHUNKED}:
        raise facts.fail("layer_types", f"must have {FULL} or {CHUNKED} for each of {spec.layers} layers")
    chunk = facts.optional_integer("attention_chunk_size")
    if chunk is not None and chunk < spec.max_position:
        chunked = tuple(layer for layer in range(spec.layers) if types[layer] == CHUNKED)
        spec = msgspec.structs.replace(spec, caches=_with_chunks(spec.caches, chunked, chunk))
    tuned = facts.get("attn_temperature_tuning")
    warm = None
    if tuned:
        beta, length = facts.number("attn_scale"), facts.integer("floor_scale")
        warm = TemperatureSpec(beta=beta, length=length, shift=1, unrotated=True)
    return msgspec.structs.replace(
        spec,
        intermediate=facts.integer("intermediate_size_mlp"),
        attention=msgspec.structs.replace(spec.attention, temperature=warm),
    )


def _with_chunks(
    caches: tuple[CacheSpec, ...], chunked: tuple[int, ...], chunk: int
) -> tuple[CacheSpec, ...]:
    """Return the one KV cache group ``caches`` without the layers ``chunked``, and the group of these layers.

    Groups without layers are left out.
    """
    (whole,) = caches
    full = tuple(layer for layer in whole.layers if layer not in chunked)
    groups = (
        msgspec.structs.replace(whole, layers=full),
        msgspec.structs.replace(whole, kind="chunk", layers=chunked, window=chunk),
    )
    return tuple(group for group in groups if group.layers)


def within_one_chunk(facts: Facts, spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with the longest context in which dual chunk attention equals full attention.

    The files of Qwen2.5-1M have the setting. Raise ConfigError.
    """
    setting = facts.get("dual_chunk_attention_config")
    if setting is None:
        return spec
    if not isinstance(setting, dict):
        raise facts.fail("dual_chunk_attention_config", f"must be an object, not {setting!r}")
    read = Facts(setting, file="dual_chunk_attention_config")
    chunk = read.integer("chunk_size") - read.integer("local_size")
    chunk = min(chunk, read.integer("original_max_position_embeddings", chunk))
    if chunk < 1:
        raise facts.fail("dual_chunk_attention_config", "must have a chunk_size above local_size")
    return msgspec.structs.replace(spec, max_position=min(spec.max_position, chunk))


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
