"""Mistral: the layers of Llama. The spec enables windows."""

from __future__ import annotations

from weft.models.llama.model import make_block

__all__ = ["make_block"]
