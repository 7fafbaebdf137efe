"""Every implementation of every op: importing this registers them all, and loads none of what they need."""

from __future__ import annotations

from weft.ops import tiled, torch_ops, triton
from weft.ops.cpu import fused, linear

__all__ = ["fused", "linear", "tiled", "torch_ops", "triton"]
