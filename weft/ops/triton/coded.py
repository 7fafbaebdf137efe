"""Products with weights that stay packed (``weft.ops.coded``): codes are unpacked in the tile.

On a device codes lie as loading leaves them, row by row; ``pack`` only sees to whole memory and to groups
that steps fit. An output element is one chain over K in steps of ``TILE_K`` from 0 up, as ``matmul`` has it,
so in one form a row's bits are its own (``linear_invariant``). Else, where tiles are few, inputs are taken in
parts, and for many rows weights are dequantized, some at a time, and cuBLAS multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from weft.ops import torch_ops
from weft.ops.coded import DEQUANTIZED, Codes, MixedCodes, as_bytes, to_fp8, to_int4
from weft.ops.triton import fused, interpreting, matmul
from weft.ops.triton.unpacking import TILE_K_EXACT, UNITS, finish, fitting, step, unpacked, way_of

Tensor = torch.Tensor

GROUP_M = 8
"""As ``matmul.GROUP``."""
PROGRAMS = 264
"""Two on each multiprocessor of a large GPU: where there are fewer, inputs are taken in parts."""
LEAST_STEPS, MOST_PARTS = 4, 16
"""Steps of a part, at least; parts."""
COLUMNS = 256
"""Of one program that adds parts."""
ROWS = 32
"""Of one program that dequantizes."""
_SCALES = {torch.float32: "float32", torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Sizes of a tile, and how it is compiled. Equal forms give a row equal bits, whatever is beside it."""

    tile_m: int
    tile_n: int
    tile_k: int
    """At most."""
    warps: int
    stages: int


NARROW = Form(tile_m=16, tile_n=64, tile_k=128, warps=4, stages=4)
"""Decode: memory is what is waited for."""
MIDDLE = Form(tile_m=64, tile_n=128, tile_k=64, warps=4, stages=3)
"""Also the one form of ``--deterministic``."""


def form_of(rows: int) -> Form | None:
    """The fastest for so many rows of x; None: weights are dequantized once for all of them."""
    if rows <= NARROW.tile_m:
        return NARROW
    return MIDDLE if rows <= 2 * MIDDLE.tile_m else None


# --- kernels ---


@triton.jit(do_not_specialize=["rows"])
def _coded(
    x_ptr,  # [rows, K]
    values_ptr,  # uint8 [N, line]
    scales_ptr,  # float32 or uint8 [N, groups]
    zeros_ptr,  # uint8 [N, groups], with ZEROS
    factors_ptr,  # float32 [N], with FACTORS
    bias_ptr,  # [N], with BIAS
    out_ptr,  # [rows, N] of wider rows; with PARTS float32 [parts, rows, N]
    rows,
    x_stride,
    out_stride,
    N,
    K,
    part,  # inputs of one part, with PARTS: a number of steps
    line,
    groups,
    NUMBERS: tl.constexpr,
    SCALES: tl.constexpr,
    WAY: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    ZEROS: tl.constexpr,
    FACTORS: tl.constexpr,
    BIAS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
    PARTS: tl.constexpr,
):
    tiles_m = tl.cdiv(rows, TILE_M)
    tiles_n = tl.cdiv(N, TILE_N)
    band = tl.program_id(0) // (GROUP_M * tiles_n)
    inside = tl.program_id(0) % (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP_M, GROUP_M)
    m = (band * GROUP_M + inside % height) * TILE_M + tl.arange(0, TILE_M)
    n = (inside // height) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    row = n.to(tl.int64)
    live = n < N
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    acc = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    first = 0
    end = K
    if PARTS:
        first = tl.program_id(1) * part
        end = tl.minimum(first + part, K)
    for begin in range(first, end, TILE_K):
        there = (m < rows)[:, None] if EVEN else (m < rows)[:, None] & (begin + k < K)[None, :]
        x = tl.load(x_ptrs + begin, mask=there, other=0.0)
        acc = step(
            acc, x, begin, row, live, values_ptr, scales_ptr, zeros_ptr, line, groups,
            NUMBERS, SCALES, WAY, GROUP, UNIT, ZEROS, TILE_N, TILE_K, EVEN, WIDEN,
        )  # fmt: skip
    if PARTS:
        out_ptr += tl.program_id(1).to(tl.int64) * rows * N
    else:
        acc = finish(
            acc, row, live, n, scales_ptr, factors_ptr, bias_ptr, SCALES, WAY, UNIT, FACTORS, BIAS
        )  # fmt: skip
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & live[None, :])


@triton.jit(do_not_specialize=["parts"])
def _add_parts(
    part_ptr,  # float32 [parts, rows, N]
    scales_ptr,
    factors_ptr,
    bias_ptr,
    out_ptr,
    rows,
    out_stride,
    N,
    parts,
    SCALES: tl.constexpr,
    WAY: tl.constexpr,
    UNIT: tl.constexpr,
    FACTORS: tl.constexpr,
    BIAS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The parts of a row's TILE columns, in order, and what ``finish`` does."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = n < N
    acc = tl.zeros([1, TILE], dtype=tl.float32)
    for part in range(0, parts):
        at = part_ptr + (part * rows + m) * N + n
        acc += tl.load(at, mask=live, other=0.0)[None, :]
    acc = finish(
        acc, n.to(tl.int64), live, n, scales_ptr, factors_ptr, bias_ptr, SCALES, WAY, UNIT, FACTORS, BIAS
    )  # fmt: skip
    tl.store(out_ptr + m * out_stride + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=live[None, :])


@triton.jit
def _dequantize(
    values_ptr,
    scales_ptr,
    zeros_ptr,
    factors_ptr,
    out_ptr,  # [rows, K]
    first,  # of all rows, the first of ``rows``
    rows,
    K,
    line,
    groups,
    NUMBERS: tl.constexpr,
    SCALES: tl.constexpr,
    WAY: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    ZEROS: tl.constexpr,
    FACTORS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """What codes mean, rounded once to out's dtype."""
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    begin = tl.program_id(1) * TILE_K
    live = n < rows
    row = first + n.to(tl.int64)
    numbers, scale = unpacked(
        begin, row, live, values_ptr, scales_ptr, zeros_ptr, line, groups,
        NUMBERS, SCALES, WAY, GROUP, UNIT, ZEROS, TILE_N, TILE_K, EVEN, tl.float32,
    )  # fmt: skip
    weight = numbers * scale if WAY == "merged" else numbers * scale[:, None]
    if FACTORS:
        weight *= tl.load(factors_ptr + row, mask=live, other=0.0)[:, None]
    k = begin + tl.arange(0, TILE_K)
    out_ptrs = out_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(out_ptrs, weight.to(out_ptr.dtype.element_ty), mask=live[:, None] & (k < K)[None, :])


# --- on the host ---


def _packed(codes: Codes) -> Codes:
    codes = fitting(codes)
    return replace(
        codes,
        values=codes.values.contiguous(),
        scales=as_bytes(codes.scales).contiguous().view(codes.scales.dtype),
        zeros=None if codes.zeros is None else codes.zeros.contiguous(),
        factors=None if codes.factors is None else codes.factors.float().contiguous(),
        mapped=None,
        rounds_rows=False,  # kernels take rows as they are
    )


def pack(codes: Codes | MixedCodes) -> Codes | MixedCodes:
    """For ``linear``, ``gated_linear`` and experts: codes on the device, as kernels read them."""
    if isinstance(codes, MixedCodes):
        return MixedCodes(tuple(_packed(part) for part in codes.parts))
    return _packed(codes)


def pack_int8(weight: Tensor, largest: Tensor | None = None) -> Codes:
    """For ``linear``: weight [N, K], rounded as ``torch_ops.to_int8`` does."""
    return _packed(torch_ops.to_int8_codes(weight.detach(), largest))


def pack_int4(weight: Tensor) -> Codes:
    """For ``linear``: weight [N, K], rounded as ``coded.to_int4`` does."""
    return _packed(to_int4(weight.detach()))


def pack_fp8(weight: Tensor) -> Codes:
    """For ``linear``: weight [N, K], rounded as ``coded.to_fp8`` does."""
    return _packed(to_fp8(weight.detach()))


def arguments(codes: Codes, dtype: torch.dtype, form: Form) -> dict[str, Any]:
    """What kernels are told of a packed matrix, or of a stack, that x in ``dtype`` goes through."""
    exact = dtype == torch.float32
    way = way_of(codes, min(form.tile_k, TILE_K_EXACT) if exact else form.tile_k)
    values = codes.values
    return {
        "values_ptr": values,
        "scales_ptr": as_bytes(codes.scales),
        "zeros_ptr": values if codes.zeros is None else codes.zeros,
        "factors_ptr": values if codes.factors is None else codes.factors,
        "line": values.shape[-1],
        "groups": codes.scales.shape[-1],
        "NUMBERS": codes.numbers,
        "SCALES": _SCALES[codes.scales.dtype],
        "WAY": way.name,
        "GROUP": way.group,
        "UNIT": UNITS.get(codes.numbers, 0),
        "ZEROS": codes.zeros is not None,
        "FACTORS": codes.factors is not None,
        "TILE_M": form.tile_m,
        "TILE_N": form.tile_n,
        "TILE_K": way.step,
        "EVEN": codes.inputs % way.step == 0,
        "WIDEN": interpreting(),
        "num_warps": 8 if exact and form.tile_m > NARROW.tile_m else form.warps,
        "num_stages": 2 if exact else form.stages,
    }


def parts_of(rows: int, outputs: int, inputs: int, form: Form, step: int) -> int:
    """In how many parts inputs are taken, so that there are programs for all of a GPU; 1: whole."""
    programs = -(-rows // form.tile_m) * -(-outputs // form.tile_n)
    most = inputs // (LEAST_STEPS * step)
    return max(1, min(PROGRAMS // programs, most, MOST_PARTS))


def _run(x: Tensor, codes: Codes, bias: Tensor | None, out: Tensor, form: Form, whole: bool) -> None:
    """``out``: [rows, N], its rows perhaps parts of rows. ``whole``: inputs are not taken in parts."""
    rows, inputs = x.shape
    outputs = len(codes)
    given = arguments(codes, x.dtype, form)
    step = given["TILE_K"]
    parts = 1 if whole else parts_of(rows, outputs, inputs, form, step)
    part = -(-inputs // (parts * step)) * step
    parts = -(-inputs // part)
    made = out
    if parts > 1:
        made = torch.empty((parts, rows, outputs), dtype=torch.float32, device=x.device)
    _coded[(-(-rows // form.tile_m) * -(-outputs // form.tile_n), parts)](
        x_ptr=x,
        bias_ptr=x if bias is None else bias,
        out_ptr=made,
        rows=rows,
        x_stride=x.stride(0),
        out_stride=made.stride(-2),
        N=outputs,
        K=inputs,
        part=part,
        BIAS=bias is not None,
        GROUP_M=GROUP_M,
        PARTS=parts > 1,
        **given,
    )
    if parts > 1:
        names = ("scales_ptr", "factors_ptr", "SCALES", "WAY", "UNIT", "FACTORS")
        _add_parts[(rows, -(-outputs // COLUMNS))](
            part_ptr=made,
            bias_ptr=x if bias is None else bias,
            out_ptr=out,
            rows=rows,
            out_stride=out.stride(0),
            N=outputs,
            parts=parts,
            BIAS=bias is not None,
            TILE=COLUMNS,
            num_warps=4,
            **{name: given[name] for name in names},
        )


def dequantized(codes: Codes, rows: slice, dtype: torch.dtype) -> Tensor:
    """[rows, K] in ``dtype``: what codes mean, by their order of inputs."""
    count = rows.stop - rows.start
    out = torch.empty((count, codes.inputs), dtype=dtype, device=codes.values.device)
    given = arguments(codes, torch.bfloat16, MIDDLE)
    step = given["TILE_K"]
    names = (
        "values_ptr",
        "scales_ptr",
        "zeros_ptr",
        "factors_ptr",
        "line",
        "groups",
        "NUMBERS",
        "SCALES",
        "WAY",
    )
    more = ("GROUP", "UNIT", "ZEROS", "FACTORS", "TILE_K", "EVEN")
    _dequantize[(-(-count // ROWS), -(-codes.inputs // step))](
        out_ptr=out,
        first=rows.start,
        rows=count,
        K=codes.inputs,
        TILE_N=ROWS,
        num_warps=4,
        **{name: given[name] for name in (*names, *more)},
    )
    return out


def _run_dequantized(x: Tensor, codes: Codes, bias: Tensor | None, out: Tensor) -> None:
    """``out``, [rows, N], by cuBLAS, of as many columns at a time as little memory is taken for."""
    most = max(1, DEQUANTIZED // codes.inputs)
    for begin in range(0, len(codes), most):
        columns = slice(begin, min(begin + most, len(codes)))
        weight = dequantized(codes, columns, x.dtype)
        if bias is None:
            torch.mm(x, weight.T, out=out[:, columns])
        else:
            torch.addmm(bias[columns], x, weight.T, out=out[:, columns])
        del weight  # before the next is made: there is room for one


def product(
    x: Tensor, weight: Codes | MixedCodes, bias: Tensor | None, form: Form | None, whole: bool = True
) -> Tensor:
    """``x @ weight.T + bias``: x [T, K], bias [N]; [T, N] in x's dtype, rounded once.

    In one form; without any, weights are dequantized, a part at a time, and cuBLAS multiplies. ``whole``: an
    output is one chain over K, not several that are added.
    """
    parts = weight.parts if isinstance(weight, MixedCodes) else (weight,)
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    begin = 0
    for part in parts:
        if not len(part):
            continue
        rows = slice(begin, begin + len(part))
        of_part = None if bias is None else bias[rows]
        given = x if part.order is None else x.index_select(1, part.order)
        if form is None:
            _run_dequantized(given, part, of_part, out[:, rows])
        else:
            given = given if given.stride(1) == 1 else given.contiguous()
            _run(given, part, of_part, out[:, rows], form, whole)
        begin += len(part)
    return out


def linear(x: Tensor, weight: Tensor | Codes | MixedCodes, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: x [T, K]; [T, N] in x's dtype. Plain weights by cuBLAS."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    return product(x, weight, bias, form_of(len(x)), whole=False)


def linear_invariant(x: Tensor, weight: Tensor | Codes | MixedCodes, bias: Tensor | None = None) -> Tensor:
    """Likewise, in one form for every number of rows."""
    if isinstance(weight, Tensor):
        return matmul.linear(x, weight, bias)
    return product(x, weight, bias, MIDDLE)


def gated_linear(
    x: Tensor, weight: Tensor | Codes | MixedCodes, bias: Tensor | None, activation: str
) -> Tensor:
    """As ``torch_ops.gated_linear``: a product, and one pass over its result."""
    return fused.gated(linear(x, weight, bias), activation)


def gated_linear_invariant(
    x: Tensor, weight: Tensor | Codes | MixedCodes, bias: Tensor | None, activation: str
) -> Tensor:
    """``gated(linear_invariant(x, weight, bias))``."""
    return fused.gated(linear_invariant(x, weight, bias), activation)
