"""KV cache entries in 8 bits: E4M3 values, and one power-of-two scale per entry.

A power of two costs no accuracy, because E4M3 is a floating-point format, and makes every value exact in bf16
and wider dtypes. So reading does not round, and a stored entry depends on the entry alone. The scale is the
smallest power that maps the largest value to at most 448, the largest E4M3 number. An entry with a value that
is not finite gets the scale NaN, so all of the entry reads as NaN.
"""

from __future__ import annotations

import torch

from weft.ops.registry import Implementation, register
from weft.ops.torch_ops import cache_rows, rotated_qkv, wide

Tensor = torch.Tensor

VALUES = torch.float8_e4m3fn


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (values E4M3 [..., n], scales float32 [...]) of entries x [..., n]; halves round to even.

    Scales are powers of two; the scale of an entry with infinity or NaN is NaN.
    """
    exact = x.to(wide(x.dtype))
    top = exact.abs().amax(dim=-1)
    mantissa, exponent = torch.frexp(top)  # mantissa in [0.5, 1), and 448 is 0.875 * 2^9
    power = (exponent - 9 + (mantissa > 0.875)).clamp(-126, 126)
    power = power.where(torch.isfinite(top), 0)
    values = (exact * _power_of_two(-power).to(exact.dtype).unsqueeze(-1)).to(VALUES)
    return values, _power_of_two(power).masked_fill(~torch.isfinite(top), float("nan"))


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return entries [..., n] in ``dtype`` from values E4M3 [..., n] and scales float32 [...]."""
    exact = wide(dtype)
    made = values.to(exact) * scales.to(exact).unsqueeze(-1)
    if dtype == torch.float16:
        # Values next to the largest float16 would round to infinity.
        made = made.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return made.to(dtype)


def take(entries: Tensor, rows: Tensor) -> Tensor:
    """Return the entries ``rows`` [N] of ``entries`` [.., n], contiguous, in any dtype."""
    if entries.dtype != VALUES:
        return entries.index_select(0, rows)
    # As bytes: a GPU cannot copy E4M3 by index.
    return entries.view(torch.uint8).index_select(0, rows).view(VALUES)


def write(cache: Tensor, scales: Tensor, rows: Tensor, entries: Tensor) -> None:
    """Quantize ``entries`` [N, n] and write them to the places ``rows`` [N] of a cache.

    cache: E4M3 [.., n] and scales: float32 [..], contiguous, both counted in entries.
    """
    values, own = quantize(entries)
    # As bytes: copying by index does not support E4M3.
    cache.view(torch.uint8).view(-1, entries.shape[1]).index_copy_(0, rows, values.view(torch.uint8))
    scales.view(-1).index_copy_(0, rows, own)


def write_lines(caches: tuple[Tensor, ...], rows: Tensor, lines: Tensor) -> None:
    """Write ``lines`` [N, width] to the places ``rows`` [N] of a layer's caches of one KV cache group.

    caches: (lines [blocks, block, width],), or in 8 bits (codes [.., n], scales, lines from element n on).
    """
    exact = caches[-1]
    lines = lines.to(exact.dtype)
    if len(caches) > 1:
        values, scales, _ = caches
        front = lines[:, : values.shape[2]]
        write(values, scales, rows, front)
        lines = lines[:, values.shape[2] :]
    exact.view(-1, exact.shape[2]).index_copy_(0, rows, lines)


def take_lines(caches: tuple[Tensor, ...], rows: Tensor, dim: int) -> Tensor:
    """Return the first ``dim`` elements of the lines ``rows`` [N] of ``caches``: [N, dim], in the dtype of
    exact elements. caches: as in ``write_lines``."""
    exact = caches[-1].view(-1, caches[-1].shape[2])
    if len(caches) == 1:
        return exact[:, :dim].index_select(0, rows)
    values, scales, _ = caches
    coded = values.shape[2]
    front = take(values.view(-1, coded), rows)
    own = scales.view(-1).index_select(0, rows)
    behind = exact[:, : dim - coded].index_select(0, rows)
    return torch.cat((dequantize(front, own, exact.dtype), behind), dim=1)


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
    """Compute ``torch_ops.qkv_rope_cache`` with a cache in 8 bits.

    cache: E4M3 [blocks, 2, kv_heads, block, dim]; scales: float32 [blocks, 2, kv_heads, block].
    """
    dim = cache.shape[4]
    q, k, v = rotated_qkv(qkv, heads, kv_heads, dim, q_weight, k_weight, eps, cos, sin)
    write(cache, scales, cache_rows(cache, writes), torch.stack((k, v)).view(-1, dim))
    return q


def _power_of_two(power: Tensor) -> Tensor:
    """Return 2^power in float32, exactly. power: integers, -126 .. 127."""
    return ((power.to(torch.int32) + 127) << 23).view(torch.float32)


register("write_lines", Implementation(name="torch", run=write_lines, invariant=True))
register(
    "qkv_rope_cache_fp8",
    Implementation(name="torch", run=qkv_rope_cache_fp8, invariant=True, devices=("cpu",)),
)
register("qkv_rope_cache_fp8", Implementation(name="torch-cuda", run=qkv_rope_cache_fp8, devices=("cuda",)))
