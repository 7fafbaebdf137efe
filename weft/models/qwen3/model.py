"""Qwen3, dense: the layers of Llama. The spec enables norms of query and key heads."""

from __future__ import annotations

from weft.models.llama.model import make_block

__all__ = ["make_block"]
