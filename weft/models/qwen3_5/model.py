"""Qwen3.5: the layers of Qwen3-Next."""

from __future__ import annotations

from weft.models.qwen3_next.model import make_block

__all__ = ["make_block"]
