"""Products with weights that stay packed (``weft.ops.coded``): codes are unpacked in the tile.

On a device codes keep the layout of loading, row by row. ``pack`` only makes memory contiguous and groups
compatible with steps. An output element is one chain over K in steps of ``TILE_K`` from 0 up, as in
``matmul``, so in one form the bits of a row do not depend on other rows (``linear_invariant``). The fast form
splits the inputs into parts if there are few tiles. For many rows the fast form dequantizes weights in
slices, and cuBLAS multiplies.
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
from weft.ops.triton.unpacking import TILE_K_EXACT, UNITS, dequantized_tile, finish, fitting, step, way_of

Tensor = torch.Tensor

GROUP_M = 8
"""See ``matmul.GROUP``."""
PROGRAMS = 264
"""Two programs per multiprocessor of a large GPU. With fewer programs the inputs are split into parts."""
LEAST_STEPS, MOST_PARTS = 4, 16
"""Minimum steps per part; maximum parts."""
COLUMNS = 256
"""Columns of one program of ``_add_parts``."""
ROWS = 32
"""Rows of one program of ``_dequantize``."""
_SCALES = {torch.float32: "float32", torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeForm:
    """Tile sizes and compile options. Equal forms give a row equal bits, whatever the other rows."""

    tile_m: int
    tile_n: int
    tile_k: int
    """Maximum inputs of a step."""
    warps: int
    stages: int


NARROW = CodeForm(tile_m=16, tile_n=64, tile_k=128, warps=4, stages=4)
"""For decode, which is bound by memory."""
MIDDLE = CodeForm(tile_m=64, tile_n=128, tile_k=64, warps=4, stages=3)
"""For medium row counts; also the only form of ``--deterministic``."""


def form_of(rows: int) -> CodeForm | None:
    """Return the fastest form for ``rows`` rows of x; None: dequantize the weights once for all rows."""
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
    part,  # inputs of one part, with PARTS: a multiple of TILE_K
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
    """Multiply one tile of x by dequantized weights; with PARTS, a part of K without ``finish``."""
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
    """Add the parts of TILE columns of a row, in order, and apply ``finish``."""
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
    first,  # first row of the slice
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
    """Write the dequantized weights, rounded once to out's dtype."""
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    begin = tl.program_id(1) * TILE_K
    live = n < rows
    row = first + n.to(tl.int64)
    numbers, scale = dequantized_tile(
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
    """Return the codes in the layout of the kernels: contiguous, with float32 factors and fitting groups."""
    codes = fitting(codes)
    return replace(
        codes,
        values=codes.values.contiguous(),
        scales=as_bytes(codes.scales).contiguous().view(codes.scales.dtype),
        zeros=None if codes.zeros is None else codes.zeros.contiguous(),
        factors=None if codes.factors is None else codes.factors.float().contiguous(),
        mapped=None,
        row_bits=None,  # kernels do not round rows
    )


def pack(codes: Codes | MixedCodes) -> Codes | MixedCodes:
    """Return codes on the device in the layout of the kernels, for linear layers and experts."""
    if isinstance(codes, MixedCodes):
        return MixedCodes(tuple(_packed(part) for part in codes.parts))
    return _packed(codes)


def pack_int8(weight: Tensor, largest: Tensor | None = None) -> Codes:
    """Round weight [N, K] like ``torch_ops.to_int8`` and return packed codes."""
    return _packed(torch_ops.to_int8_codes(weight.detach(), largest))


def pack_int4(weight: Tensor) -> Codes:
    """Round weight [N, K] like ``coded.to_int4`` and return packed codes."""
    return _packed(to_int4(weight.detach()))


def pack_fp8(weight: Tensor) -> Codes:
    """Round weight [N, K] like ``coded.to_fp8`` and return packed codes."""
    return _packed(to_fp8(weight.detach()))


def arguments(codes: Codes, dtype: torch.dtype, form: CodeForm) -> dict[str, Any]:
    """Return the kernel arguments of a packed matrix or stack, for x in ``dtype``."""
    exact = dtype == torch.float32
    way = way_of(codes, min(form.tile_k, TILE_K_EXACT) if exact else form.tile_k)
    values = codes.values
    return {
        "values_ptr": values,
        "scales_ptr": as_bytes(codes.scales),
        # Absent tensors need a pointer of some kind; flags keep kernels from reading there.
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


def parts_of(rows: int, outputs: int, inputs: int, form: CodeForm, step: int) -> int:
    """Return the number of parts of the inputs that fills a GPU with programs; 1: no split."""
    programs = -(-rows // form.tile_m) * -(-outputs // form.tile_n)
    most = inputs // (LEAST_STEPS * step)
    return max(1, min(PROGRAMS // programs, most, MOST_PARTS))


def _run(x: Tensor, codes: Codes, bias: Tensor | None, out: Tensor, form: CodeForm, whole: bool) -> None:
    """Compute one matrix into ``out`` [rows, N], which may be columns of a wider tensor.

    ``whole``: do not split the inputs into parts.
    """
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
    """Return ``rows`` of the matrix in ``dtype``, [count, K], with inputs in the order of the codes."""
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
    """Compute ``out`` [rows, N] with cuBLAS, in slices of columns that bound the memory of weights."""
    most = max(1, DEQUANTIZED // codes.inputs)
    for begin in range(0, len(codes), most):
        columns = slice(begin, min(begin + most, len(codes)))
        weight = dequantized(codes, columns, x.dtype)
        if bias is None:
            torch.mm(x, weight.T, out=out[:, columns])
        else:
            torch.addmm(bias[columns], x, weight.T, out=out[:, columns])
        del weight  # before the next slice: memory for one slice only


def product(
    x: Tensor, weight: Codes | MixedCodes, bias: Tensor | None, form: CodeForm | None, whole: bool = True
) -> Tensor:
    """Return ``x @ weight.T + bias``: x [T, K], bias [N]; [T, N] in x's dtype, rounded once.

    Without a ``form`` weights are dequantized in slices and cuBLAS multiplies. ``whole``: an output is one
    chain over K, not a sum of several chains.
    """
    parts = weight.parts if isinstance(weight, MixedCodes) else (weight,)
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    begin = 0
    for part in parts:
        if not len(part):
            continue
        # Output columns of the part, and x in the part's order of inputs.
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
    """Return ``x @ weight.T + bias``: x [T, K]; [T, N] in x's dtype. cuBLAS computes plain weights."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    return product(x, weight, bias, form_of(len(x)), whole=False)


def linear_invariant(x: Tensor, weight: Tensor | Codes | MixedCodes, bias: Tensor | None = None) -> Tensor:
    """Compute ``linear`` in one form for every number of rows, so rows do not affect each other."""
    if isinstance(weight, Tensor):
        return matmul.linear(x, weight, bias)
    return product(x, weight, bias, MIDDLE)


def gated_linear(
    x: Tensor, weight: Tensor | Codes | MixedCodes, bias: Tensor | None, activation: str
) -> Tensor:
    """Compute ``torch_ops.gated_linear``: a product, then one pass over its result."""
    return fused.gated(linear(x, weight, bias), activation)


def gated_linear_invariant(
    x: Tensor, weight: Tensor | Codes | MixedCodes, bias: Tensor | None, activation: str
) -> Tensor:
    """Return ``gated(linear_invariant(x, weight, bias))``."""
    return fused.gated(linear_invariant(x, weight, bias), activation)
