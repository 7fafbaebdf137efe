"""Qwen3, dense: the layers of Llama; that heads of queries and keys are normalized is the spec's."""

from __future__ import annotations

from weft.models.llama.model import make_block

__all__ = ["make_block"]
