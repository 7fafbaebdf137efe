"""Mamba and Falcon Mamba: published weight names. The frame's names are those of Mamba2."""

from __future__ import annotations

from weft.models.mamba2.weights import weight_map

__all__ = ["weight_map"]
