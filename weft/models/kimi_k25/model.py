"""Kimi K2.5: the layers of DeepSeek V3."""

from __future__ import annotations

from weft.models.deepseek.model import make_block

__all__ = ["make_block"]
