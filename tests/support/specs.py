"""Model specs without a model, for code that reads specs only."""

from __future__ import annotations

from typing import Any

from weft.config.spec import CacheSpec, ModelSpec, RopeSpec


def model_spec(heads: int = 4, cache: CacheSpec | None = None, **more: Any) -> ModelSpec:
    """A model of one layer with ``heads`` query heads over one cache (full, 2 KV heads of 64)."""
    cache = cache or CacheSpec(kind="full", layers=(0,), kv_heads=2, head_dim=64)
    facts: dict[str, Any] = {
        "family": "llama",
        "architecture": "LlamaForCausalLM",
        "vocab_size": 10,
        "hidden": 32,
        "layers": 1,
        "heads": heads,
        "kv_heads": cache.kv_heads,
        "head_dim": cache.head_dim,
        "intermediate": 8,
        "rope": RopeSpec(dim=8),
        "caches": (cache,),
        "max_position": 64,
    }
    return ModelSpec(**{**facts, **more})


def first_seen(position: int, window: int) -> int:
    """Return the first position that a query at ``position`` sees.

    ``window``: 0 for none, negative for the size of chunks, as the kernels take a window.
    """
    if window < 0:
        return position - position % -window
    return max(0, position - window + 1) if window else 0


def cache_spec(window: int, kv_heads: int, head_dim: int) -> CacheSpec:
    """Return the KV cache group of one layer. ``window``: see ``first_seen``."""
    kind = "chunk" if window < 0 else "window" if window else "full"
    return CacheSpec(kind=kind, layers=(0,), window=abs(window), kv_heads=kv_heads, head_dim=head_dim)
