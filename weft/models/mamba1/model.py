"""Mamba and Falcon Mamba: a Mamba 1 in every layer, in the frame of Mamba2."""

from __future__ import annotations

from weft.models.mamba2.model import make_block

__all__ = ["make_block"]
