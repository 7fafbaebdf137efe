"""Compute reads and operations of attention to a context from a model spec: the roofline of ``bench.long``.

The functions count the least possible work. Every entry is read once for all heads. A product of a query and
a key takes two operations per element. Latent attention takes the cheaper of its two forms. Selection (sparse
models) counts. Recurrent states do not count, because their cost is the same at every depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from weft.config.spec import ModelSpec


def cache_tensors(cache: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield all tensors of the caches of all layers."""
    for layer in cache:
        for tensors in layer.values():
            yield from tensors


def cache_bytes(spec: ModelSpec, context: int, size: int) -> int:
    """Return the cache bytes that a token reads when it sees ``context`` positions. ``size`` is bytes per
    element.
    """
    elements = 0
    # An index reads all keys of the context, but only if there is something to select.
    if spec.index is not None and spec.mla is not None:
        width = spec.mla.kv_lora + spec.mla.rope
        elements += spec.layers * min(context, spec.index.top) * width
        if context > spec.index.top:
            elements += len(spec.index.layers) * context * spec.index.dim
    elif spec.sparse is not None:
        elements += sum(_group_elements(spec, kind, context) for kind in spec.sparse.types)
    else:
        for cache in spec.caches:
            if cache.kind in ("full", "window", "latent"):
                seen = min(context, cache.window or context)
                width = cache.width if cache.kind == "latent" else 2 * cache.kv_heads * cache.head_dim
                elements += len(cache.layers) * seen * width
    return elements * size


def _group_elements(spec: ModelSpec, kind: str, context: int) -> int:
    sparse = spec.sparse
    assert sparse is not None
    found = min(context, sparse.window) * spec.head_dim
    if kind == "all":
        found += context // sparse.all_ratio * spec.head_dim
    elif kind == "chosen":
        groups = context // sparse.chosen_ratio
        found += min(groups, sparse.index_top) * spec.head_dim
        if groups > sparse.index_top:
            found += groups * sparse.index_dim
    return found


def attention_flops(spec: ModelSpec, start: int, count: int) -> float:
    """Operations of attention in all layers for ``count`` tokens of one sequence from position ``start``
    on.
    """
    middle = start + (count + 1) / 2  # average number of positions that a token sees
    if spec.index is not None and spec.mla is not None:
        mla, index = spec.mla, spec.index
        core = 2 * spec.heads * (2 * mla.kv_lora + mla.rope) * min(middle, index.top) * spec.layers
        choice = 2 * index.heads * index.dim * middle * len(index.layers) if middle > index.top else 0
        return count * (core + choice)
    if spec.sparse is not None:
        return count * sum(_group_flops(spec, kind, middle) for kind in spec.sparse.types)
    if spec.mla is not None:
        mla = spec.mla
        absorbed = 2 * spec.heads * (2 * mla.kv_lora + mla.rope) * middle * count
        expanded = 2 * spec.heads * (mla.nope + mla.rope + mla.v) * middle * count
        expanded += 2 * spec.heads * mla.kv_lora * (mla.nope + mla.v) * (start + count)
        return spec.layers * min(absorbed, expanded)
    made = 0.0
    for cache in spec.caches:
        if cache.kind in ("full", "window"):
            seen = min(middle, cache.window or middle)
            made += len(cache.layers) * 4 * spec.heads * cache.head_dim * seen * count
    return made


def _group_flops(spec: ModelSpec, kind: str, seen: float) -> float:
    sparse = spec.sparse
    assert sparse is not None
    keys = min(seen, sparse.window)
    choice = 0.0
    if kind == "all":
        keys += seen // sparse.all_ratio
    elif kind == "chosen":
        groups = seen // sparse.chosen_ratio
        keys += min(groups, sparse.index_top)
        choice = 2 * sparse.index_heads * sparse.index_dim * groups if groups > sparse.index_top else 0.0
    return 4 * spec.heads * spec.head_dim * keys + choice
