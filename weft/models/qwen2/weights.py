"""Qwen2 and Qwen2.5: the weight names of Llama, with biases."""

from __future__ import annotations

from weft.models.llama.weights import weight_map

__all__ = ["weight_map"]
