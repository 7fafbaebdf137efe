"""Parts of latent attention around core attention in the CPU extension (csrc/latent.cpp): bf16, float32.

Importing registers the ops, which are chosen where the extension is built. Signatures: see ``latent_ops``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.ops import latent_ops
from weft.ops.cpu.served import serve

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedUp:
    """A matrix for each head, packed as in csrc/gemm_tile.h: [heads, blocks, steps, 32, k per step]."""

    absorb: Tensor
    """Matrices [kv_lora, nope], which map a query into the space of latents."""
    keys: Tensor
    """Matrices [nope, kv_lora], which map a latent to keys."""
    values: Tensor
    """Matrices [v, kv_lora], which map a latent to values."""


def latent_up(keys: Tensor, values: Tensor) -> PackedUp:
    """Pack keys [heads, nope, kv_lora] and values [heads, v, kv_lora], in bf16 or float32."""
    pack = torch.ops.weft_cpu.pack.default
    return PackedUp(
        absorb=pack(keys.transpose(1, 2), False), keys=pack(keys, False), values=pack(values, False)
    )


def head_product(x: Tensor, matrices: Tensor, packed: Tensor) -> Tensor:
    """Compute ``latent_ops.head_product`` with a packed matrix of ``latent_up``."""
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
    """Compute ``latent_ops.latent_rope_cache`` in one pass. cos, sin: float32."""
    made: Tensor = torch.ops.weft_cpu.latent_rope_cache.default(
        joined, q_weight, weight, eps, cos, sin, interleaved, cache, writes
    )
    return made if q_weight is not None else _first(joined, weight, cos)


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
    """Compute ``latent_ops.latent_rope_cache_fp8``, in one pass if kv_lora is a multiple of 16.

    Writes ``cache``, ``scales`` and ``keys``; returns the queries' part. cos, sin: float32.
    """
    if cache.shape[2] % 16:
        return latent_ops.latent_rope_cache_fp8(
            joined, q_weight, weight, eps, cos, sin, interleaved, cache, scales, keys, writes
        )
    made: Tensor = torch.ops.weft_cpu.latent_rope_cache.default(
        joined, q_weight, weight, eps, cos, sin, interleaved, cache, writes, scales, keys
    )
    return made if q_weight is not None else _first(joined, weight, cos)


def _first(joined: Tensor, weight: Tensor, cos: Tensor) -> Tensor:
    """Return the queries' part of ``joined``, [T, first]."""
    return joined[:, : joined.shape[1] - len(weight) - 2 * cos.shape[1]]


for _op in (latent_up, head_product, latent_rope_cache, latent_rope_cache_fp8):
    serve(_op.__name__, _op)
