"""Mistral: the layers of Llama; whether they attend within a window is the spec's."""

from __future__ import annotations

from weft.models.llama.model import make_block

__all__ = ["make_block"]
