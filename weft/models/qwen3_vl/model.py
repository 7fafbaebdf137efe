"""Qwen3-VL: the layers of Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from weft.models.declared.model import make_block

__all__ = ["make_block"]
