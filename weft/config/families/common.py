"""Common parts of the families' configurations: sizes, KV cache groups, end-of-text ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from weft.config.families.facts import MOST_PARTS, Facts
from weft.config.families.rope_settings import rope_spec, served_positions
from weft.config.spec import CacheSpec, ModelSpec

FULL = "full_attention"
SLIDING = "sliding_attention"


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """A family's values for fields missing in ``config.json``, as in the transformers class."""

    kv_heads: int | None = None
    """None: the number of query heads."""
    head_dim: int | None = None
    """None: hidden size / heads."""
    max_position: int = 32768
    norm_eps: float = 1e-6
    theta: float = 10000.0
    partial: float | None = None
    """Share of a head's dims that rotate; None: all dims, and the family does not read the field."""
    sections: tuple[int, int, int] | None = None
    """Dim pairs that rotate by frame, row and column, in families with images."""
    intermediate: int | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()


def window_layers(facts: Facts, layers: int) -> tuple[int | None, list[str]]:
    """Return (window, type of each layer) by ``use_sliding_window``, ``max_window_layers`` and
    ``layer_types``.

    Without ``layer_types``, layers from ``max_window_layers`` on use the window. Raise ConfigError for
    unknown layer types, and for window layers without a window.
    """
    window = None
    facts.get("sliding_window")  # read in every case: has no effect unless use_sliding_window
    if facts.flag("use_sliding_window", False):
        # An explicit null means no window; a missing field means the family's default of 4096.
        window = facts.optional_integer("sliding_window") if "sliding_window" in facts else 4096
    types = layer_types(facts)
    first = facts.integer("max_window_layers", 28, low=0)
    if types is None:
        types = [SLIDING if window is not None and i >= first else FULL for i in range(layers)]
    if SLIDING in types and window is None:
        raise facts.fail(
            "layer_types", "has sliding_attention, so use_sliding_window and sliding_window must be set"
        )
    if len(types) < layers:
        raise facts.fail("layer_types", f"has {len(types)} entries for {layers} layers")
    return window, types[:layers]


def layer_types(facts: Facts) -> list[str] | None:
    """Return the checked field ``layer_types``, or None if missing. Raise ConfigError."""
    types = facts.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list):
        raise facts.fail("layer_types", f"must be a list, not {types!r}")
    for kind in types:
        if kind not in (FULL, SLIDING):
            raise facts.fail("layer_types", f"entry {kind!r} is not supported; there are: {FULL}, {SLIDING}")
    return types


def refuse_sliding_types(facts: Facts) -> None:
    """Raise ConfigError if ``layer_types`` has window layers. For families without per-layer windows."""
    if SLIDING in (layer_types(facts) or []):
        raise facts.fail("layer_types", f"with {SLIDING} is not supported for this architecture")


def uniform_window(window: int | None, layers: int) -> tuple[int | None, list[str]]:
    """Return (window, type of each layer) for a family with equal layers: all with the window, or none."""
    return window, [FULL if window is None else SLIDING] * layers


def cache_specs(
    window: int | None, types: Sequence[str], kv_heads: int, head_dim: int
) -> tuple[CacheSpec, ...]:
    """Return a KV cache group for full layers and a group for window layers, without empty groups."""
    full = tuple(i for i, kind in enumerate(types) if kind == FULL)
    sliding = tuple(i for i, kind in enumerate(types) if kind == SLIDING)
    caches = []
    if full:
        caches.append(CacheSpec(kind="full", layers=full, kv_heads=kv_heads, head_dim=head_dim))
    if sliding:
        assert window is not None
        caches.append(
            CacheSpec(kind="window", layers=sliding, window=window, kv_heads=kv_heads, head_dim=head_dim)
        )
    return tuple(caches)


def layer_count(facts: Facts, override: int | None) -> int:
    """Return the number of layers to serve: the checkpoint's, or the first ``override`` layers.

    Raise ConfigError.
    """
    layers = facts.integer("num_hidden_layers", high=MOST_PARTS)
    if override is None:
        return layers
    if not 1 <= override <= layers:
        raise facts.fail(
            "num_hidden_layers",
            f"is {layers}, so --num-hidden-layers-override must be between 1 and {layers}",
        )
    return override


#: Fields that the text model's configuration may leave to the outer configuration.
_SHARED = ("architectures", "tie_word_embeddings", "bos_token_id", "eos_token_id", "dtype", "torch_dtype")


def text_facts(facts: Facts, text: Any, file: str) -> Facts:
    """Return the fields ``text`` of a text model, with the fields that the outer configuration completes.

    If both configurations set ``tie_word_embeddings``, the outer value counts, as in transformers. ``file``:
    name of the file in errors. Raise ConfigError unless ``text`` is an object.
    """
    if not isinstance(text, dict):
        raise facts.fail("text_config", f"must be an object, not {text!r}")
    outer = {name: facts.get(name) for name in _SHARED if name in facts}
    first: dict[str, Any] = {
        name: outer[name] for name in ("architectures", "tie_word_embeddings") if name in outer
    }
    return Facts({**outer, **text, **first}, facts.weights, file)


def text_spec(
    facts: Facts, override: int | None, build: Callable[[Facts, int | None], ModelSpec]
) -> ModelSpec:
    """Return the result of ``build`` for ``text_config``: the text model of a checkpoint with images.

    ``vision_config`` is only marked as read here; ``vision.py`` reads the content. Raise ConfigError.
    """
    facts.get("vision_config")
    inner = text_facts(facts, facts.get("text_config"), facts.file)
    spec = build(inner, override)
    inner.refuse_unknown_computation()
    return spec


def decoder_spec(
    facts: Facts,
    *,
    family: str,
    layers: int,
    defaults: Defaults,
    window: int | None,
    types: Sequence[str],
    rotated: int | None = None,
    **more: Any,
) -> ModelSpec:
    """Return the spec with the fields common to all families. ``more``: further fields of ``ModelSpec``.

    ``rotated``: rotated dims per head, None for all of ``head_dim``. ``eos_ids`` and ``dtype`` come from
    ``config.json`` alone; ``load_spec`` completes both. Raise ConfigError.
    """
    heads = more.get("heads") or facts.integer("num_attention_heads")
    hidden = facts.integer("hidden_size")
    # An explicit null means as many as heads; a missing field means the family's default.
    usual = heads if "num_key_value_heads" in facts else defaults.kv_heads or heads
    kv_heads = more.get("kv_heads") or facts.integer("num_key_value_heads", usual)
    if heads % kv_heads:
        raise facts.fail(
            "num_attention_heads", f"{heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = facts.integer("head_dim", defaults.head_dim or hidden // heads)
    positions = facts.integer("max_position_embeddings", defaults.max_position)
    rope = more.get("rope") or rope_spec(
        facts, rotated or head_dim, positions, defaults.theta, defaults.partial, defaults.sections
    )
    bos = facts.integers("bos_token_id") if "bos_token_id" in facts else ()
    fields: dict[str, Any] = {
        "family": family,
        "vocab_size": facts.integer("vocab_size"),
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate": facts.integer("intermediate_size", defaults.intermediate),
        "activation": more.get("activation") or facts.activation(),
        "norm_eps": facts.number("rms_norm_eps", defaults.norm_eps),
        "rope": rope,
        "tied": facts.flag("tie_word_embeddings", False),
        "caches": cache_specs(window, types, kv_heads, head_dim),
        "max_position": served_positions(rope),
        "eos_ids": facts.integers("eos_token_id") if "eos_token_id" in facts else defaults.eos_ids,
        # An explicit null means no token; a missing field means the family's default.
        "bos_id": bos[0] if bos else (None if "bos_token_id" in facts else defaults.bos_id),
        "dtype": facts.dtype() or "",
    }
    architectures = facts.get("architectures")
    return ModelSpec(architecture=architectures[0], **{**fields, **more})
