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
