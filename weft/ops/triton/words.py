"""Products with matrices in words (``weft.ops.words``), for rows of x in bfloat16 on Hopper GPUs.

The matrix is the first operand of a matrix instruction, and its numbers never leave registers: PTX unpacks
pairs of numbers (``pairs``). Rows of x are the second operand, in shared memory. All loads of the inner
loop are asynchronous copies, scales included.

Inputs are split into parts by the shape of the matrix (and, by default, by few or many rows), and parts are
added in order. So the chain of sums of an output is the same for all rows and forms of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from weft.ops.coded import DEQUANTIZED
from weft.ops.triton import interpreting
from weft.ops.triton.pairs import line, unpacked, unpacking_of
from weft.ops.words import STEP, TILE, Words

Tensor = torch.Tensor

FEW_ROWS = 32
"""Products of more rows split the inputs into fewer parts, because parts of many rows are large."""
PROGRAMS, PROGRAMS_OF_MANY = 1056, 264
"""Tiles of 64 outputs, times parts, that fill a Hopper GPU, for few and for many rows."""
LEAST_STEPS = 4
"""Minimum steps of a part."""
COLUMNS = 256
"""Columns of one program of ``_add``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WordForm:
    """Tile sizes and compile options."""

    rows: int
    """Rows of x in a tile."""
    outputs: int
    warps: int
    stages: int


FORMS = (
    WordForm(rows=16, outputs=128, warps=4, stages=4),
    WordForm(rows=32, outputs=64, warps=4, stages=4),
    WordForm(rows=64, outputs=64, warps=4, stages=3),
    WordForm(rows=128, outputs=128, warps=8, stages=3),
)
"""Forms by the number of rows."""
MOST = 256
"""Maximum rows for this kernel. For more rows, weights are dequantized, and cuBLAS multiplies."""


def forms_of(words: Words) -> tuple[WordForm, ...]:
    """Return the forms for a matrix. With four sums per step, 128 rows need more registers than there are."""
    return FORMS[:3] if words.way == "sum" and words.groups == 4 else FORMS


def form_of(rows: int, words: Words) -> WordForm:
    """Return the form for ``rows`` rows of x."""
    forms = forms_of(words)
    return next((form for form in forms if rows <= form.rows), forms[-1])


@triton.jit(do_not_specialize=["rows"])
def _words(
    x_ptr,  # [rows, K]
    values_ptr,  # int32 [tiles, steps, TILE, words]
    scales_ptr,  # see Words.scales
    zeros_ptr,  # int32 [tiles, steps, TILE], with ZEROS
    factors_ptr,  # float32 [tiles * TILE]
    bias_ptr,  # [N], with BIAS
    out_ptr,  # [rows, N] of wider rows; with PARTS float32 [parts, rows, N]
    rows,
    x_stride,
    out_stride,
    N,
    K,
    steps,
    part,  # steps of one part
    UNPACK: tl.constexpr,
    NUMBERS: tl.constexpr,
    WAY: tl.constexpr,
    GROUPS: tl.constexpr,
    ZEROS: tl.constexpr,
    SHIFT: tl.constexpr,
    BASE: tl.constexpr,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Multiply a tile of outputs by rows of x; with PARTS, some steps without factors and bias."""
    COUNT: tl.constexpr = 8 if NUMBERS == "int4" or NUMBERS == "e2m1" else 4
    W: tl.constexpr = 128 // COUNT
    SUMS: tl.constexpr = GROUPS if WAY == "sum" else 1
    MERGED: tl.constexpr = WAY == "merged"
    tiles_m = tl.cdiv(rows, TILE_M)
    m = tl.program_id(0) % tiles_m * TILE_M + tl.arange(0, TILE_M)
    pair = tl.program_id(0) // tiles_m * (TILE_N // TILE)
    inside = tl.arange(0, TILE_N)
    n = pair * TILE + inside
    # The last pair of tiles may have one tile only.
    tile = tl.minimum(pair + inside // TILE, tl.cdiv(N, TILE) - 1)
    first = tl.program_id(1) * part
    piece = tile * steps + first
    k = tl.arange(0, 128 // SUMS)
    values_ptrs = values_ptr + (piece * TILE + inside % TILE)[:, None] * W + tl.arange(0, W)[None, :]
    GROUP_WORDS: tl.constexpr = GROUPS // 4 if MERGED else GROUPS
    scales_ptrs = scales_ptr + piece * (GROUP_WORDS * TILE) + inside % TILE
    zeros_ptrs = zeros_ptr + piece * TILE + inside % TILE
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    acc = tl.zeros([TILE_N, TILE_M], dtype=tl.float32)
    scale = tl.load(factors_ptr + tile * TILE + inside % TILE)
    for step in tl.range(first, tl.minimum(first + part, steps), num_stages=STAGES):
        words = tl.load(values_ptrs)
        parts = unpacked(
            words, zeros_ptrs, scales_ptrs, UNPACK, NUMBERS, MERGED, GROUPS, ZEROS, SHIFT, BASE, TILE,
            x_ptr.dtype.element_ty,
        )  # fmt: skip
        for group in tl.static_range(SUMS):
            begin = step * 128 + group * (128 // SUMS)
            there = (m < rows)[:, None] if EVEN else (m < rows)[:, None] & (begin + k < K)[None, :]
            x = tl.load(x_ptrs + begin, mask=there, other=0.0)
            numbers = line(parts, group * COUNT // SUMS, COUNT // SUMS, TILE_N, W)
            if WIDEN:
                x = x.to(tl.float32)
                numbers = numbers.to(tl.float32)
            # Not ``tl.dot(.., acc)``: Triton would wait for each 16 inputs of such a product.
            if WAY == "sum":
                scale = tl.load(scales_ptrs + group * TILE)
            acc += tl.dot(numbers, tl.trans(x), input_precision="ieee") * scale[:, None]
        values_ptrs += TILE * W
        scales_ptrs += GROUP_WORDS * TILE
        zeros_ptrs += TILE
    there = (m < rows)[:, None] & (n < N)[None, :]
    made = tl.trans(acc)
    if PARTS:
        out_ptr += tl.program_id(1).to(tl.int64) * rows * N
    else:
        made = _finished(made, n, N, factors_ptr, bias_ptr, WAY, BIAS)
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(out_ptrs, made.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _finished(acc, n, N, factors_ptr, bias_ptr, WAY: tl.constexpr, BIAS: tl.constexpr):
    """Return ``acc`` [.., TILE_N] times factors of sums, plus the bias. Other ways have their factors."""
    if WAY == "sum":
        acc *= tl.load(factors_ptr + n, mask=n < N, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit(do_not_specialize=["rows"])
def _add_words(
    part_ptr,  # float32 [parts, rows, N]
    factors_ptr,
    bias_ptr,
    out_ptr,
    rows,
    out_stride,
    N,
    WAY: tl.constexpr,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the parts of some columns of a row, in order, and finish them."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([1, COLUMNS], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        acc += tl.load(part_ptr + (part * rows + m) * N + n, mask=n < N, other=0.0)[None, :]
    acc = _finished(acc, n, N, factors_ptr, bias_ptr, WAY, BIAS)
    tl.store(out_ptr + m * out_stride + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=(n < N)[None, :])


@triton.jit
def _dequantize_words(
    values_ptr,
    scales_ptr,
    zeros_ptr,
    factors_ptr,
    out_ptr,  # [rows, K]
    first,  # first tile
    rows,
    K,
    steps,
    UNPACK: tl.constexpr,
    NUMBERS: tl.constexpr,
    WAY: tl.constexpr,
    GROUPS: tl.constexpr,
    ZEROS: tl.constexpr,
    SHIFT: tl.constexpr,
    BASE: tl.constexpr,
    TILE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Write the dequantized weights of a tile and step, rounded once to out's dtype."""
    COUNT: tl.constexpr = 8 if NUMBERS == "int4" or NUMBERS == "e2m1" else 4
    W: tl.constexpr = 128 // COUNT
    SUMS: tl.constexpr = GROUPS if WAY == "sum" else 1
    MERGED: tl.constexpr = WAY == "merged"
    inside = tl.arange(0, TILE)
    piece = (first + tl.program_id(0)) * steps + tl.program_id(1)
    n = tl.program_id(0) * TILE + inside
    GROUP_WORDS: tl.constexpr = GROUPS // 4 if MERGED else GROUPS
    scales_ptrs = scales_ptr + piece * (GROUP_WORDS * TILE) + inside
    words = tl.load(values_ptr + (piece * TILE + inside)[:, None] * W + tl.arange(0, W)[None, :])
    parts = unpacked(
        words, zeros_ptr + piece * TILE + inside, scales_ptrs,
        UNPACK, NUMBERS, MERGED, GROUPS, ZEROS, SHIFT, BASE, TILE, TYPE,
    )  # fmt: skip
    factor = tl.load(factors_ptr + first * TILE + n)
    for group in tl.static_range(SUMS):
        scale = factor
        if WAY == "sum":
            scale = tl.load(scales_ptrs + group * TILE) * factor
        numbers = line(parts, group * COUNT // SUMS, COUNT // SUMS, TILE, W)
        weight = numbers.to(tl.float32) * scale[:, None]
        k = tl.program_id(1) * 128 + group * (128 // SUMS) + tl.arange(0, 128 // SUMS)
        there = (n < rows)[:, None] & (k < K)[None, :]
        out_ptrs = out_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(out_ptrs, weight.to(out_ptr.dtype.element_ty), mask=there)


# --- on the host ---


def _arguments(words: Words) -> dict[str, Any]:
    """Return the arguments of kernels for a matrix."""
    return {
        "values_ptr": words.values,
        "scales_ptr": words.scales if words.way != "row" else words.factors,
        "zeros_ptr": words.values if words.zeros is None else words.zeros,
        "factors_ptr": words.factors,
        "steps": words.steps,
        "UNPACK": "" if interpreting() else unpacking_of(words),
        "NUMBERS": words.numbers,
        "WAY": words.way,
        "GROUPS": words.groups,
        "ZEROS": words.zeros is not None,
        "SHIFT": words.merge.shift,
        "BASE": words.merge.base,
        "TILE": TILE,
    }


def parts_of(tiles: int, steps: int, many: bool) -> tuple[int, int]:
    """Return (parts, steps of a part) of the inputs, from the shape of the matrix; ``many`` rows or few."""
    parts = max(1, min((PROGRAMS_OF_MANY if many else PROGRAMS) // tiles, steps // LEAST_STEPS))
    part = -(-steps // parts)
    return -(-steps // part), part


def run(
    x: Tensor, words: Words, bias: Tensor | None, out: Tensor, form: WordForm, many: bool = False
) -> None:
    """Compute one matrix into ``out`` [rows, N], which may be columns of a wider tensor.

    ``many``: split the inputs as for many rows. Equal splits give equal bits, whatever the number of rows.
    """
    rows, outputs = len(x), words.outputs
    parts, part = parts_of(words.values.shape[0], words.steps, many)
    made = out
    if parts > 1:
        made = torch.empty((parts, rows, outputs), dtype=torch.float32, device=x.device)
    grid = (-(-rows // form.rows) * -(-outputs // form.outputs), parts)
    _words[grid](
        x_ptr=x,
        bias_ptr=x if bias is None else bias,
        out_ptr=made,
        rows=rows,
        x_stride=x.stride(0),
        out_stride=made.stride(-2),
        N=outputs,
        K=words.inputs,
        part=part,
        BIAS=bias is not None,
        PARTS=parts > 1,
        EVEN=words.inputs % STEP == 0,
        TILE_M=form.rows,
        TILE_N=form.outputs,
        STAGES=form.stages,
        WIDEN=interpreting(),
        num_warps=form.warps,
        num_stages=form.stages,
        **_arguments(words),
    )
    if parts > 1:
        _add_words[(rows, -(-outputs // COLUMNS))](
            part_ptr=made,
            factors_ptr=words.factors,
            bias_ptr=x if bias is None else bias,
            out_ptr=out,
            rows=rows,
            out_stride=out.stride(0),
            N=outputs,
            WAY=words.way,
            BIAS=bias is not None,
            PARTS=parts,
            COLUMNS=COLUMNS,
            num_warps=4,
        )


def dequantized(words: Words, first: int, tiles: int, dtype: torch.dtype) -> Tensor:
    """Return the outputs of ``tiles`` tiles in ``dtype``, [rows, K], inputs in the order of the codes."""
    rows = min(tiles * TILE, words.outputs - first * TILE)
    out = torch.empty((rows, words.inputs), dtype=dtype, device=words.values.device)
    _dequantize_words[(-(-rows // TILE), words.steps)](
        out_ptr=out,
        first=first,
        rows=rows,
        K=words.inputs,
        TYPE=tl.float32 if interpreting() else tl.bfloat16,
        num_warps=4,
        **_arguments(words),
    )
    return out


def run_dequantized(x: Tensor, words: Words, bias: Tensor | None, out: Tensor) -> None:
    """Compute ``out`` [rows, N] with cuBLAS, in slices of columns that bound the memory of weights."""
    most = max(1, DEQUANTIZED // (words.inputs * TILE))
    for first in range(0, words.values.shape[0], most):
        weight = dequantized(words, first, most, x.dtype)
        columns = slice(first * TILE, first * TILE + len(weight))
        if bias is None:
            torch.mm(x, weight.T, out=out[:, columns])
        else:
            torch.addmm(bias[columns], x, weight.T, out=out[:, columns])
        del weight  # before the next slice: memory for one slice only
