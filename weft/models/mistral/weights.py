"""Mistral: the weight names of Llama."""

from __future__ import annotations

from weft.models.llama.weights import weight_map

__all__ = ["weight_map"]
