"""Qwen3, dense: the weight names of Llama, with norms of heads."""

from __future__ import annotations

from weft.models.llama.weights import weight_map

__all__ = ["weight_map"]
