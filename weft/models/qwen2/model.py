"""Qwen2 and Qwen2.5: the layers of Llama. The spec enables biases of queries, keys and values, and
windows."""

from __future__ import annotations

from weft.models.llama.model import make_block

__all__ = ["make_block"]
