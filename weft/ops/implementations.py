"""All implementations of all ops. Importing this module registers every op and loads no optional library."""

from __future__ import annotations

from weft.ops import kv_fp8, latent_ops, moe, moe_plain, plain_ops, tiled, torch_ops, triton
from weft.ops.cpu import fused, latent, linear
from weft.ops.cpu import low_rank as cpu_low_rank
from weft.ops.cpu import moe as cpu_moe

__all__ = [
    "cpu_low_rank",
    "cpu_moe",
    "fused",
    "kv_fp8",
    "latent",
    "latent_ops",
    "linear",
    "moe",
    "moe_plain",
    "plain_ops",
    "tiled",
    "torch_ops",
    "triton",
]
