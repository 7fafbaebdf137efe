"""DeepSeek V3.2, and GLM-5, where several layers share the choice of one indexer.

DeepSeek V3 with an indexer that chooses the positions for attention. Source: DeepSeek-V3.2 (2025), section 2;
sharing: arXiv 2603.12201.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from weft.config.families.deepseek import build_latent
from weft.config.families.facts import Facts
from weft.config.spec import CacheSpec, IndexSpec, ModelSpec

_INDEXED = ("indexed_attention", "deepseek_sparse_attention")
"""Accepted entries of layer_types. transformers up to 5.17 writes the second."""
_TYPES = {"full": True, "shared": False, "F": True, "S": False}


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec of V3.2: every layer has an indexer."""
    spec = build_latent(facts, override)
    return _indexed(facts, spec, range(spec.layers), heads=64, interleaved=False)


def build_glm_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec of GLM-5: layers named ``shared`` have no indexer.

    Raise ConfigError for missing sizes: the defaults of V3 do not apply.
    """
    for name in ("q_lora_rank", "qk_nope_head_dim", "v_head_dim", "n_group", "topk_group", "rms_norm_eps"):
        facts.number(name)
    spec = build_latent(facts, override)
    return _indexed(facts, spec, _own(facts, spec.layers), heads=32, interleaved=True)


def _indexed(
    facts: Facts, spec: ModelSpec, layers: Iterable[int], *, heads: int, interleaved: bool
) -> ModelSpec:
    """Return a copy of ``spec`` with indexers in ``layers``, the family "deepseek_v32" and new KV cache
    groups.

    ``spec`` must have MLA. ``heads``: default of index heads. ``interleaved``: see ``IndexSpec``. Raise
    ConfigError.
    """
    mla = spec.mla
    count = spec.layers
    assert mla is not None
    if mla.q_lora is None:
        raise facts.fail("q_lora_rank", "must be set: the indexer reads the compressed queries of this rank")
    if any(kind not in _INDEXED for kind in facts.get("layer_types") or []):
        raise facts.fail("layer_types", f"with entries other than {' or '.join(_INDEXED)} is not supported")
    if facts.flag("mlp_bias", False):
        raise facts.fail("mlp_bias", "= true is not supported")
    _check_dense(facts, spec)
    index = IndexSpec(
        layers=tuple(layers),
        heads=facts.integer("index_n_heads", heads),
        dim=facts.integer("index_head_dim", 128),
        top=facts.integer("index_topk", 2048),
        interleaved=interleaved,
    )
    if index.dim < mla.rope:
        raise facts.fail("index_head_dim", f"{index.dim} is less than the {mla.rope} rotated dims")
    # Layers with an indexer append the index key to each entry. So layers with and without need two groups.
    width = mla.kv_lora + mla.rope
    caches = [CacheSpec(kind="latent", layers=index.layers, width=width + index.dim, form="sparse")]
    rest = tuple(i for i in range(count) if i not in index.layers)
    if rest:
        caches.append(CacheSpec(kind="latent", layers=rest, width=width, form="sparse"))
    return msgspec.structs.replace(spec, family="deepseek_v32", index=index, caches=tuple(caches))


def _check_dense(facts: Facts, spec: ModelSpec) -> None:
    """Raise ConfigError if ``mlp_layer_types`` contradicts the routed layers of ``spec``."""
    types = facts.get("mlp_layer_types")
    if types is None:
        return
    routed = spec.moe.layers if spec.moe is not None else ()
    if not isinstance(types, list) or types[: spec.layers] != [
        "sparse" if i in routed else "dense" for i in range(spec.layers)
    ]:
        raise facts.fail("mlp_layer_types", "must be first_k_dense_replace times dense, then sparse")


def _own(facts: Facts, layers: int) -> list[int]:
    """Return the layers with an indexer: by ``indexer_types``, ``index_topk_pattern``, or by frequency and
    offset.

    Raise ConfigError.
    """
    for field in ("indexer_types", "index_topk_pattern"):
        types = facts.get(field)
        if types is None:
            continue
        if not isinstance(types, list | str) or len(types) < layers or any(t not in _TYPES for t in types):
            raise facts.fail(field, f"must name full or shared for each of {layers} layers")
        # The first layer has no earlier layer to share with, so it needs an indexer.
        own = [i for i in range(layers) if _TYPES[types[i]]]
        if not own or own[0]:
            raise facts.fail(field, "must begin with a layer that has its own indexer")
        return own
    every = facts.integer("index_topk_freq", 1, low=0)
    offset = facts.integer("index_skip_topk_offset", 2, low=0)
    own = [i for i in range(layers) if max(i - offset + 1, 0) % max(every, 1) == 0]
    if not own or own[0]:
        raise facts.fail("index_skip_topk_offset", "must leave the first layer its own indexer")
    return own
