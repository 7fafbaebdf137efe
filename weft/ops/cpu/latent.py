"""What latent attention has beside core attention, by the CPU extension (csrc/latent.cpp): bf16, float32.

Importing registers the ops; they are chosen where the extension is built. The signatures are latent_ops'.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.ops import latent_ops
from weft.ops.cpu.served import serve

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedUp:
    """A matrix for each head, packed as csrc/gemm_tile.h has it: [heads, blocks, steps, 32, k a step]."""

    absorb: Tensor
    """[kv_lora, nope]: from a query to what it is against latents."""
    keys: Tensor
    """[nope, kv_lora]."""
    values: Tensor
    """[v, kv_lora]."""


def latent_up(keys: Tensor, values: Tensor) -> PackedUp:
    """keys: [heads, nope, kv_lora], values: [heads, v, kv_lora], in bf16 or float32."""
    pack = torch.ops.weft_cpu.pack.default
    return PackedUp(
        absorb=pack(keys.transpose(1, 2), False), keys=pack(keys, False), values=pack(values, False)
    )


def head_product(x: Tensor, matrices: Tensor, packed: Tensor) -> Tensor:
    """``latent_ops.head_product`` with matrices as ``latent_up`` packed them."""
    made: Tensor = torch.ops.weft_cpu.latent_multiply.default(x, packed, matrices.shape[1])
    return made


def latent_rope_cache(
    joined: Tensor,
    q_weight: Tensor | None,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    writes: Tensor,
) -> Tensor:
    """``latent_ops.latent_rope_cache`` in one pass. cos, sin: float32."""
    made: Tensor = torch.ops.weft_cpu.latent_rope_cache.default(
        joined, q_weight, weight, eps, cos, sin, interleaved, cache, writes
    )
    return made if q_weight is not None else joined[:, : joined.shape[1] - cache.shape[2]]


def latent_rope_cache_fp8(
    joined: Tensor,
    q_weight: Tensor | None,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    scales: Tensor,
    keys: Tensor,
    writes: Tensor,
) -> Tensor:
    """``latent_ops.latent_rope_cache_fp8``; in one pass for latents of a multiple of 16. cos: float32."""
    if cache.shape[2] % 16:
        return latent_ops.latent_rope_cache_fp8(
            joined, q_weight, weight, eps, cos, sin, interleaved, cache, scales, keys, writes
        )
    made: Tensor = torch.ops.weft_cpu.latent_rope_cache.default(
        joined, q_weight, weight, eps, cos, sin, interleaved, cache, writes, scales, keys
    )
    return made if q_weight is not None else joined[:, : joined.shape[1] - cache.shape[2] - keys.shape[2]]


for _op in (latent_up, head_product, latent_rope_cache, latent_rope_cache_fp8):
    serve(_op.__name__, _op)
