"""Entries of a KV cache in 8 bits: E4M3 values and one scale, a power of two, for each entry.

A power of two costs no accuracy, as E4M3 is a float itself, and makes every value exact in bf16 and wider:
so reading rounds nothing, and what an entry becomes depends on the entry alone. The scale is the smallest
with which the largest value is at most 448, E4M3's largest; an entry that is not finite has the scale NaN, so
that all of it reads as NaN.
"""

from __future__ import annotations

import torch

from weft.ops.registry import Implementation, register
from weft.ops.torch_ops import cache_rows, rotated_qkv, wide

Tensor = torch.Tensor

VALUES = torch.float8_e4m3fn


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values E4M3 [..., n], scales float32 [...]) of entries x [..., n]; halves round to even."""
    exact = x.to(wide(x.dtype))
    top = exact.abs().amax(dim=-1)
    mantissa, exponent = torch.frexp(top)  # mantissa in [0.5, 1), and 448 is 0.875 * 2^9
    power = (exponent - 9 + (mantissa > 0.875)).clamp(-126, 126)
    power = power.where(torch.isfinite(top), 0)
    values = (exact * _power_of_two(-power).to(exact.dtype).unsqueeze(-1)).to(VALUES)
    return values, _power_of_two(power).masked_fill(~torch.isfinite(top), float("nan"))


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Entries [..., n] in ``dtype`` of values E4M3 [..., n] and scales float32 [...]."""
    exact = wide(dtype)
    made = values.to(exact) * scales.to(exact).unsqueeze(-1)
    if dtype == torch.float16:
        # The values next to its largest number round to one that it lacks.
        made = made.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return made.to(dtype)


def take(entries: Tensor, rows: Tensor) -> Tensor:
    """The entries ``rows`` [N] of ``entries`` [.., n], contiguous, in any dtype."""
    if entries.dtype != VALUES:
        return entries.index_select(0, rows)
    # Bytes, because a GPU copies no E4M3 by index.
    return entries.view(torch.uint8).index_select(0, rows).view(VALUES)


def write(cache: Tensor, scales: Tensor, rows: Tensor, entries: Tensor) -> None:
    """Quantizes ``entries`` [N, n] into the entries ``rows`` [N] of a cache.

    cache: E4M3 [.., n] and scales: float32 [..], contiguous, both counted in entries.
    """
    values, own = quantize(entries)
    # Bytes, because copying by index knows no E4M3.
    cache.view(torch.uint8).view(-1, entries.shape[1]).index_copy_(0, rows, values.view(torch.uint8))
    scales.view(-1).index_copy_(0, rows, own)


def qkv_rope_cache_fp8(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    scales: Tensor,
    writes: Tensor,
) -> Tensor:
    """``torch_ops.qkv_rope_cache`` into a cache in 8 bits.

    cache: E4M3 [blocks, 2, kv_heads, block, dim]; scales: float32 [blocks, 2, kv_heads, block].
    """
    dim = cache.shape[4]
    q, k, v = rotated_qkv(qkv, heads, kv_heads, dim, q_weight, k_weight, eps, cos, sin)
    write(cache, scales, cache_rows(cache, writes), torch.stack((k, v)).view(-1, dim))
    return q


def _power_of_two(power: Tensor) -> Tensor:
    """2^power in float32, exactly. power: integers, -126 .. 127."""
    return ((power.to(torch.int32) + 127) << 23).view(torch.float32)


register(
    "qkv_rope_cache_fp8",
    Implementation(name="torch", run=qkv_rope_cache_fp8, invariant=True, devices=("cpu",)),
)
register("qkv_rope_cache_fp8", Implementation(name="torch-cuda", run=qkv_rope_cache_fp8, devices=("cuda",)))
