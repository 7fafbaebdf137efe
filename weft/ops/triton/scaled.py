"""Products in FP8 by name (``--quantization w8a8-fp8``): weights and rows of x as E4M3, ``torch._scaled_mm``.

A weight has a scale per output, rounded at load time. A kernel rounds each row of x with a scale of its own.
torch chooses the product by the number of rows, so the bits of a row depend on the batch: with
``--deterministic`` the weights have the same codes, and x is not rounded (``rows_of_codes``).
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from weft.ops.coded import Codes, to_e4m3
from weft.ops.triton import coded, fused
from weft.ops.triton.forms import power
from weft.ops.triton.fused import LONGEST_ROW

Tensor = torch.Tensor

_log = logging.getLogger(__name__)

E4M3 = torch.float8_e4m3fn
LEAST = 1e-12
"""Minimum scale, for rows of zeros."""
MULTIPLE = 16
"""``torch._scaled_mm`` needs multiples of 16 inputs and outputs."""


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """A matrix [N, K] in E4M3."""

    values: Tensor
    """E4M3 [N, K]."""
    scales: Tensor
    """float32 [1, N]."""

    def __len__(self) -> int:
        return len(self.values)


@triton.jit(do_not_specialize=["x_stride"])
def _round_rows(
    x_ptr,  # [T, K] of wider rows
    values_ptr,  # E4M3 [T, K]
    scales_ptr,  # float32 [T]
    x_stride,
    K: tl.constexpr,
    K_P2: tl.constexpr,
):
    """Round one row: the largest magnitude becomes 448. A row with NaN gets the scale NaN."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, K_P2)
    x = tl.load(x_ptr + row * x_stride + at, mask=at < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0) / 448.0, 1e-12)
    # Maxima and clamps drop NaN, and a fault of the row would not show.
    scale = tl.where(tl.max((x != x).to(tl.int32), 0) > 0, float("nan"), scale)
    tl.store(scales_ptr + row, scale)
    made = tl.minimum(tl.maximum(x / scale, -448.0), 448.0)
    tl.store(values_ptr + row * K + at, made.to(values_ptr.dtype.element_ty), mask=at < K)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (E4M3 [T, K], scales float32 [T, 1]) of x [T, K]; rows may be parts of wider rows."""
    rows, inputs = x.shape
    if inputs > LONGEST_ROW or x.stride(1) != 1:
        return to_e4m3(x.float(), LEAST)
    values = torch.empty(rows, inputs, dtype=E4M3, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        _round_rows[(rows,)](x, values, scales, x.stride(0), K=inputs, K_P2=power(inputs), num_warps=8)
    return values, scales


def linear(x: Tensor, weight: Tensor | ScaledRows | Codes, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``: x [T, K]; [T, N] in x's dtype. Plain weights stay plain."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    if isinstance(weight, Codes):
        return coded.linear(x, weight, bias)
    values, scales = rounded(x)
    made = torch._scaled_mm(
        values, weight.values.t(), scale_a=scales, scale_b=weight.scales, out_dtype=x.dtype
    )
    # Added behind the product, because not every version of the product takes a bias of this dtype.
    return made if bias is None else made.add_(bias)


def gated_linear(x: Tensor, weight: Any, bias: Tensor | None, activation: str) -> Tensor:
    """Compute ``torch_ops.gated_linear``: a product, then one pass over its result."""
    return fused.gated(linear(x, weight, bias), activation)


def rows_of_codes(weight: Tensor) -> Codes:
    """Round weight [N, K] to E4M3 with a scale per row; the largest magnitude of a row becomes 448."""
    codes, scales = to_e4m3(weight.detach().float(), LEAST)
    return Codes(
        numbers="e4m3",
        values=codes.view(torch.uint8),
        inputs=weight.shape[1],
        group=weight.shape[1] + weight.shape[1] % 2,
        scales=scales,
    )


def pack(weight: Tensor) -> ScaledRows | Codes:
    """Round and pack a weight [N, K]. Sizes that ``torch._scaled_mm`` refuses are codes, with plain x."""
    codes = rows_of_codes(weight)
    if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
        return coded.pack(codes)  # type: ignore[return-value]
    return ScaledRows(codes.values.view(E4M3), codes.scales.t().contiguous())


def pack_invariant(weight: Tensor) -> Any:
    """Round and pack a weight [N, K] for products whose rows do not affect each other."""
    _say_once()
    return coded.pack(rows_of_codes(weight))


@functools.cache
def _say_once() -> None:
    _log.info("w8a8-fp8 with --deterministic: activations stay as they are, since FP8 products of torch vary")
