"""Every implementation of every op: importing this registers them all, and loads none of what they need."""

from __future__ import annotations

from weft.ops import kv_fp8, latent_ops, moe, tiled, torch_ops, triton
from weft.ops.cpu import fused, latent, linear
from weft.ops.cpu import moe as cpu_moe

__all__ = [
    "cpu_moe",
    "fused",
    "kv_fp8",
    "latent",
    "latent_ops",
    "linear",
    "moe",
    "tiled",
    "torch_ops",
    "triton",
]
