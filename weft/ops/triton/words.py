"""Products with matrices in words (``weft.ops.words``), for rows of x in bfloat16 on Hopper GPUs.

The matrix is the first operand of a matrix instruction, and its numbers never leave registers: PTX unpacks
pairs of numbers (``unpacking_of``). Rows of x are the second operand, in shared memory. All loads of the inner
loop are asynchronous copies, scales included.

The inputs are split into parts by the shape of the matrix alone, and parts are added in order. So the chain of
sums of an output is the same for all numbers of rows and all forms of tiles. ``checked`` compares the kernel
with the dequantized product on the device before a format is packed in words.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from weft.ops.coded import DEQUANTIZED, SCALES, Codes, MixedCodes, dequantize, to_fp8, to_int4
from weft.ops.torch_ops import to_int8_codes
from weft.ops.triton import coded, fused, interpreting, matmul
from weft.ops.words import PIECES, STEP, TILE, UNITS, Words, words_of

Tensor = torch.Tensor

FEW_ROWS = 64
"""Products of more rows split the inputs into fewer parts, because parts of many rows are large."""
PROGRAMS, PROGRAMS_OF_MANY = 1056, 264
"""Tiles of 64 outputs, times parts, that fill a Hopper GPU, for few and for many rows."""
LEAST_STEPS = 4
"""Minimum steps of a part."""
COLUMNS = 256
"""Columns of one program of ``_add``."""
_log = logging.getLogger(__name__)


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


# --- PTX ---


def unpacking_of(words: Words) -> str:
    """Return PTX that makes bfloat16 numbers of two words; see ``_unpacked`` for the operands.

    Operands are the results, one for each code of a word, as a pair of the two words' numbers; then the two
    words; then the argument of the format, twice: zero points, or the multipliers of each group. Both words
    belong to one output, so only the first of the two arguments is read.
    """
    pieces = PIECES[words.numbers]
    count = 2 * len(pieces)
    lines = [".reg .b32 h, t, c, s;"]
    for j in range(count):
        if j % len(pieces) == 0:
            selector = "0x5410" if j == 0 else "0x7632"
            lines.append(f"prmt.b32 h, ${count}, ${count + 1}, {selector};")
        lines += _CODES[words.numbers](j % len(pieces), f"${j}")
        lines += _numbers(words, j, count)
    return "{\n" + "\n".join(lines) + "\n}"


def _numbers(words: Words, j: int, count: int) -> list[str]:
    """Return PTX that makes numbers of the bits of code ``j``."""
    out = f"${j}"
    if words.numbers == "int8":
        return [f"sub.rn.bf16x2 {out}, {out}, c;"]
    if words.numbers == "int4":
        if words.zeros is None:
            return ["mov.b32 c, 0x43084308;", f"sub.rn.bf16x2 {out}, {out}, c;"]
        quarter = j // 2 // (4 // words.groups) * (4 // words.groups)
        if j % (8 // words.groups) == 0:
            # 128 + the zero point, twice
            made = [f"mov.b32 s, 0x43434343;\nprmt.b32 c, ${count + 2}, s, 0x4{quarter}4{quarter};"]
        else:
            made = []
        return [*made, f"sub.rn.bf16x2 {out}, {out}, c;"]
    if words.way == "merged":
        group = j * words.groups // count
        return [f"mul.rn.bf16x2 {out}, {out}, ${count + 2 + 2 * group};"]
    unit = 127 + UNITS[words.numbers] << 7
    return [f"mov.b32 c, 0x{unit:04x}{unit:04x};", f"mul.rn.bf16x2 {out}, {out}, c;"]


def _int4(j: int, out: str) -> list[str]:
    shift = [f"shr.u32 t, h, {4 * j};"] if j else []
    return [*shift, f"lop3.b32 {out}, {'t' if j else 'h'}, 0x000f000f, 0x43004300, 0xea;"]


def _int8(j: int, out: str) -> list[str]:
    """128 + the lower 7 bits, less 128 or, if the highest bit is 0, 256."""
    shift = [f"shr.u32 t, h, {8 * j};"] if j else ["mov.b32 t, h;"]
    return [
        *shift,
        f"lop3.b32 {out}, t, 0x007f007f, 0x43004300, 0xea;",
        "lop3.b32 c, t, 0x00800080, 0x43804380, 0x6a;",
    ]


def _e2m1(j: int, out: str) -> list[str]:
    if j < 3:
        shift = [f"shl.b32 t, h, {3 * j};"] if j else []
        return [*shift, f"and.b32 {out}, {'t' if j else 'h'}, 0x81c081c0;"]
    return [
        f"shr.u32 t, h, 3;\nand.b32 {out}, t, 0x01800180;",
        f"shr.u32 t, h, 7;\nlop3.b32 {out}, t, 0x00400040, {out}, 0xea;",
        f"shl.b32 t, h, 1;\nlop3.b32 {out}, t, 0x80008000, {out}, 0xea;",
    ]


def _e4m3(j: int, out: str) -> list[str]:
    if j == 0:
        return [f"shl.b32 t, h, 4;\nand.b32 {out}, t, 0x87f087f0;"]
    return [
        f"shr.u32 t, h, 8;\nand.b32 t, t, 0x00700070;",
        f"lop3.b32 {out}, h, 0x87808780, t, 0xea;",
    ]


_CODES = {"int4": _int4, "int8": _int8, "e2m1": _e2m1, "e4m3": _e4m3}
"""Number format -> PTX of the bits of code j of a half of a word, from ``h`` (both words' halves)."""


# --- in kernels ---


@triton.jit
def _bits(words, j: tl.constexpr, NUMBERS: tl.constexpr):
    """Return the bits of bfloat16 of E2M1 or E4M3, too small by UNITS, as float32. Without PTX."""
    PER: tl.constexpr = 4 if NUMBERS == "e2m1" else 2
    half = (words >> (16 * (j // PER))) & 0xFFFF
    i: tl.constexpr = j % PER
    if NUMBERS == "e2m1":
        if i < 3:
            made = (half << (3 * i)) & 0x81C0
        else:
            made = ((half >> 3) & 0x180) | ((half >> 7) & 0x40) | ((half << 1) & 0x8000)
    else:
        if i == 0:
            made = (half << 4) & 0x87F0
        else:
            made = (half & 0x8780) | ((half >> 8) & 0x70)
    return (made << 16).to(tl.float32, bitcast=True)


@triton.jit
def _number(words, zeros, j: tl.constexpr, NUMBERS: tl.constexpr, ZEROS: tl.constexpr, TYPE: tl.constexpr):
    """Return the numbers of code ``j`` without PTX, for the interpreter."""
    if NUMBERS == "int4":
        zero = ((zeros >> (8 * (j // 2))) & 255).to(tl.float32) if ZEROS else 8.0
        made = ((words >> (4 * j)) & 15).to(tl.float32) - zero
    elif NUMBERS == "int8":
        made = ((words >> (8 * j)) & 255).to(tl.float32) - 128.0
    elif NUMBERS == "e2m1":
        made = _bits(words, j, NUMBERS) * (2.0**126)
    else:
        made = _bits(words, j, NUMBERS) * (2.0**120)
    return made.to(TYPE)


@triton.jit
def _plain(words, zeros, NUMBERS: tl.constexpr, ZEROS: tl.constexpr, TYPE: tl.constexpr):
    """Return the numbers of all codes without PTX."""
    n0 = _number(words, zeros, 0, NUMBERS, ZEROS, TYPE)
    n1 = _number(words, zeros, 1, NUMBERS, ZEROS, TYPE)
    n2 = _number(words, zeros, 2, NUMBERS, ZEROS, TYPE)
    n3 = _number(words, zeros, 3, NUMBERS, ZEROS, TYPE)
    if NUMBERS == "int4" or NUMBERS == "e2m1":
        n4 = _number(words, zeros, 4, NUMBERS, ZEROS, TYPE)
        n5 = _number(words, zeros, 5, NUMBERS, ZEROS, TYPE)
        n6 = _number(words, zeros, 6, NUMBERS, ZEROS, TYPE)
        n7 = _number(words, zeros, 7, NUMBERS, ZEROS, TYPE)
        made = (n0, n1, n2, n3, n4, n5, n6, n7)
    else:
        made = (n0, n1, n2, n3)
    return made


@triton.jit
def _scaled(words, multiplier, j: tl.constexpr, NUMBERS: tl.constexpr, TYPE: tl.constexpr):
    """Return the numbers of code ``j`` times the multiplier, without PTX."""
    return (_bits(words, j, NUMBERS) * (multiplier << 16).to(tl.float32, bitcast=True)).to(TYPE)


@triton.jit
def _plain_merged(words, each, NUMBERS: tl.constexpr, TYPE: tl.constexpr):
    """Return the numbers of all codes times the multipliers of ``each`` code, without PTX."""
    n0 = _scaled(words, each[0], 0, NUMBERS, TYPE)
    n1 = _scaled(words, each[1], 1, NUMBERS, TYPE)
    n2 = _scaled(words, each[2], 2, NUMBERS, TYPE)
    n3 = _scaled(words, each[3], 3, NUMBERS, TYPE)
    if NUMBERS == "e2m1":
        n4 = _scaled(words, each[4], 4, NUMBERS, TYPE)
        n5 = _scaled(words, each[5], 5, NUMBERS, TYPE)
        n6 = _scaled(words, each[6], 6, NUMBERS, TYPE)
        n7 = _scaled(words, each[7], 7, NUMBERS, TYPE)
        made = (n0, n1, n2, n3, n4, n5, n6, n7)
    else:
        made = (n0, n1, n2, n3)
    return made


@triton.jit
def _multiplier(scales, i: tl.constexpr, SHIFT: tl.constexpr, BASE: tl.constexpr):
    """Return the bits of bfloat16, twice, of byte ``i`` of words of scales."""
    byte = (scales >> (8 * i)) & 255
    return byte * (SHIFT * 0x10001) + BASE * 0x10001


@triton.jit
def _line(parts, FIRST: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr, W: tl.constexpr):
    """Return COUNT parts [N, W] one after the other: [N, COUNT * W]."""
    if COUNT == 1:
        made = parts[FIRST]
    elif COUNT == 2:
        both = tl.join(parts[FIRST], parts[FIRST + 1])
        made = tl.reshape(tl.permute(both, (0, 2, 1)), [N, 2 * W])
    elif COUNT == 4:
        even = tl.join(parts[FIRST], parts[FIRST + 2])
        odd = tl.join(parts[FIRST + 1], parts[FIRST + 3])
        made = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), [N, 4 * W])
    else:
        even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        odd = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
        made = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1)), [N, 8 * W])
    return made


@triton.jit
def _unpacked(
    words,  # int32 [TILE_N, W]
    zeros_ptrs,  # int32 [TILE_N], with ZEROS
    scales_ptrs,  # int32 [TILE_N], if MERGED
    UNPACK: tl.constexpr,
    NUMBERS: tl.constexpr,
    MERGED: tl.constexpr,
    GROUPS: tl.constexpr,
    ZEROS: tl.constexpr,
    SHIFT: tl.constexpr,
    BASE: tl.constexpr,
    TILE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Return the numbers of each code of the words: a tuple of [TILE_N, W]."""
    COUNT: tl.constexpr = 8 if NUMBERS == "int4" or NUMBERS == "e2m1" else 4
    if MERGED:
        scales = tl.load(scales_ptrs)[:, None]
        more = tl.load(scales_ptrs + TILE)[:, None] if GROUPS == 8 else scales
        g0 = _multiplier(scales, 0, SHIFT, BASE)
        g1 = _multiplier(scales, 1, SHIFT, BASE)
        g2 = _multiplier(scales, 2, SHIFT, BASE)
        g3 = _multiplier(scales, 3, SHIFT, BASE)
        g4 = _multiplier(more, 0, SHIFT, BASE)
        g5 = _multiplier(more, 1, SHIFT, BASE)
        g6 = _multiplier(more, 2, SHIFT, BASE)
        g7 = _multiplier(more, 3, SHIFT, BASE)
        if UNPACK == "":
            if GROUPS == 8:
                each = (g0, g1, g2, g3, g4, g5, g6, g7)
            elif COUNT == 8:
                each = (g0, g0, g1, g1, g2, g2, g3, g3)
            else:
                each = (g0, g1, g2, g3)
            made = _plain_merged(words, each, NUMBERS, TYPE)
        elif GROUPS == 8:
            made = tl.inline_asm_elementwise(
                asm=UNPACK,
                constraints="=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
                args=[words, g0, g1, g2, g3, g4, g5, g6, g7],
                dtype=(tl.bfloat16,) * 8,
                is_pure=True,
                pack=2,
            )
        elif COUNT == 8:
            made = tl.inline_asm_elementwise(
                asm=UNPACK,
                constraints="=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
                args=[words, g0, g1, g2, g3],
                dtype=(tl.bfloat16,) * 8,
                is_pure=True,
                pack=2,
            )
        else:
            made = tl.inline_asm_elementwise(
                asm=UNPACK,
                constraints="=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
                args=[words, g0, g1, g2, g3],
                dtype=(tl.bfloat16,) * 4,
                is_pure=True,
                pack=2,
            )
    else:
        zeros = words
        if ZEROS:
            zeros = tl.load(zeros_ptrs)[:, None]
        if UNPACK == "":
            made = _plain(words, zeros, NUMBERS, ZEROS, TYPE)
        elif COUNT == 8:
            made = tl.inline_asm_elementwise(
                asm=UNPACK,
                constraints="=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
                args=[words, zeros],
                dtype=(tl.bfloat16,) * 8,
                is_pure=True,
                pack=2,
            )
        else:
            made = tl.inline_asm_elementwise(
                asm=UNPACK,
                constraints="=r,=r,=r,=r,r,r",
                args=[words],
                dtype=(tl.bfloat16,) * 4,
                is_pure=True,
                pack=2,
            )
    return made


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
        parts = _unpacked(
            words, zeros_ptrs, scales_ptrs, UNPACK, NUMBERS, MERGED, GROUPS, ZEROS, SHIFT, BASE, TILE,
            x_ptr.dtype.element_ty,
        )  # fmt: skip
        for group in tl.static_range(SUMS):
            begin = step * 128 + group * (128 // SUMS)
            there = (m < rows)[:, None] if EVEN else (m < rows)[:, None] & (begin + k < K)[None, :]
            x = tl.load(x_ptrs + begin, mask=there, other=0.0)
            numbers = _line(parts, group * COUNT // SUMS, COUNT // SUMS, TILE_N, W)
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
    parts = _unpacked(
        words, zeros_ptr + piece * TILE + inside, scales_ptrs,
        UNPACK, NUMBERS, MERGED, GROUPS, ZEROS, SHIFT, BASE, TILE, TYPE,
    )  # fmt: skip
    factor = tl.load(factors_ptr + first * TILE + n)
    for group in tl.static_range(SUMS):
        scale = factor
        if WAY == "sum":
            scale = tl.load(scales_ptrs + group * TILE) * factor
        numbers = _line(parts, group * COUNT // SUMS, COUNT // SUMS, TILE, W)
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
    """Return the outputs of ``tiles`` tiles in ``dtype``, [rows, K], with inputs in the order of the codes."""
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


def _run_dequantized(x: Tensor, words: Words, bias: Tensor | None, out: Tensor) -> None:
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


def _one(x: Tensor, part: Words | Codes, bias: Tensor | None, out: Tensor, invariant: bool) -> None:
    """Compute the product of a part of a matrix into ``out``."""
    rows = len(x)
    if isinstance(part, Codes):
        run_codes = coded.linear_invariant if invariant else coded.linear
        out.copy_(run_codes(x, part, bias))
        return
    given = x if part.order is None else x.index_select(1, part.order)
    given = given if given.stride(1) == 1 else given.contiguous()
    if invariant:
        form = form_of(rows, part) if checked_words(part).alike else FORMS[2]
        run(given, part, bias, out, form)
    elif rows <= MOST:
        run(given, part, bias, out, form_of(rows, part), many=rows > FEW_ROWS)
    else:
        _run_dequantized(given, part, bias, out)


def product(x: Tensor, weight: Words | Codes | MixedCodes, bias: Tensor | None, invariant: bool) -> Tensor:
    """Return ``x @ weight.T + bias``: x [T, K], bias [N]; [T, N] in x's dtype.

    ``invariant``: the bits of a row do not depend on other rows or on their number.
    """
    if isinstance(weight, Codes):
        return (coded.linear_invariant if invariant else coded.linear)(x, weight, bias)
    parts = weight.parts if isinstance(weight, MixedCodes) else (weight,)
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    begin = 0
    for part in parts if len(x) else ():
        rows = slice(begin, begin + len(part))
        if len(part):
            _one(x, part, None if bias is None else bias[rows], out[:, rows], invariant)
        begin = rows.stop
    return out


def linear(x: Tensor, weight: Tensor | Words | Codes | MixedCodes, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``: x [T, K]; [T, N] in x's dtype. cuBLAS computes plain weights."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    return product(x, weight, bias, False)


def linear_invariant(
    x: Tensor, weight: Tensor | Words | Codes | MixedCodes, bias: Tensor | None = None
) -> Tensor:
    """Compute ``linear`` such that rows do not affect each other."""
    if isinstance(weight, Tensor):
        return matmul.linear(x, weight, bias)
    return product(x, weight, bias, True)


def gated_linear(x: Tensor, weight: Any, bias: Tensor | None, activation: str) -> Tensor:
    """Compute ``torch_ops.gated_linear``: a product, then one pass over its result."""
    return fused.gated(linear(x, weight, bias), activation)


def gated_linear_invariant(x: Tensor, weight: Any, bias: Tensor | None, activation: str) -> Tensor:
    """Return ``gated(linear_invariant(x, weight, bias))``."""
    return fused.gated(linear_invariant(x, weight, bias), activation)


# --- packing, and the check on the device ---


class Verdict(NamedTuple):
    """Result of a comparison on the device."""

    right: bool
    """True if products are those of the dequantized matrix."""
    alike: bool
    """True if all forms give a row the same bits."""


def _sample(numbers: str, way: str, groups: int, scale_type: torch.dtype, zeros: bool) -> Codes:
    """Return random codes of a format: 3 tiles of outputs, the last not whole, and 16 steps."""
    outputs, inputs = 3 * TILE - 5, 16 * STEP - 24
    made = torch.Generator().manual_seed(groups)
    four = numbers in ("int4", "e2m1")
    group = inputs if way == "row" else STEP // groups
    count = -(-inputs // group)
    values = torch.randint(0, 256, (outputs, inputs // 2 if four else inputs), generator=made)
    values = torch.where(values & 127 == 127, 56, values) if numbers == "e4m3" else values
    scales = 2.0 ** torch.randint(-8, 3, (outputs, count), generator=made)
    if scale_type != torch.float8_e8m0fnu:
        scales = scales * (1 + torch.randint(0, 8, scales.shape, generator=made) / 8)
    if scale_type == torch.float8_e8m0fnu:
        scales = (scales.log2() + 127).to(torch.uint8).view(scale_type)
    return Codes(
        numbers=numbers,
        values=values.to(torch.uint8),
        inputs=inputs,
        group=group,
        scales=scales.to(scale_type),
        zeros=torch.randint(0, 16, (outputs, count), generator=made).to(torch.uint8) if zeros else None,
    )


@functools.cache
def checked(
    device: torch.device, numbers: str, way: str, groups: int, scale_type: torch.dtype, zeros: bool
) -> Verdict:
    """Compare products on ``device`` with the dequantized matrix in float64. Waits for the device."""
    codes = _sample(numbers, way, groups, scale_type, zeros).to(device)
    words = words_of(codes)
    assert words is not None and (words.way, words.groups) == (way, groups), "words of another format"
    weight = dequantize(codes, torch.float64)
    made = torch.Generator().manual_seed(1)
    x = torch.randn(2 * FORMS[-1].rows - 3, codes.inputs, generator=made).bfloat16().to(device)
    wanted = x.double() @ weight.T
    size = x.double().abs() @ weight.abs().T
    alike, first = True, None
    try:
        for form in forms_of(words):
            for many in (False, True):
                out = torch.empty((len(x), len(codes)), dtype=x.dtype, device=device)
                run(x, words, None, out, form, many)
                few = torch.empty_like(out[:3])
                run(x[:3].clone(), words, None, few, form, many)
                if bool(((out.double() - wanted).abs() > 2.0**-8 * wanted.abs() + 2.0**-13 * size).any()):
                    raise ArithmeticError(f"other products than the dequantized matrix in {form}")
                alike = alike and torch.equal(few, out[:3])
                if not many:
                    alike = alike and (first is None or torch.equal(out, first))
                    first = out
        weights = dequantized(words, 0, words.values.shape[0], torch.bfloat16)
        if not torch.allclose(weights.double(), weight, rtol=2.0**-7, atol=0):
            raise ArithmeticError("other numbers than the dequantized matrix")
    except Exception as error:  # the other kernel serves: a wrong or failing kernel must not end a server
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        _log.warning("%s in words is not used on this GPU, so products are slower: %s", numbers, reason)
        return Verdict(right=False, alike=False)
    return Verdict(right=True, alike=alike)


def checked_words(words: Words) -> Verdict:
    """Return the verdict for the format of a matrix."""
    device, way = words.values.device, words.way
    scale_type = torch.float32
    if way == "merged":
        scale_type = SCALES[2] if words.merge.base == 0 else SCALES[1]
    return checked(device, words.numbers, way, words.groups, scale_type, words.zeros is not None)


def _packed(codes: Codes) -> Words | Codes:
    """Return words if the kernel is right on the device, and codes row by row otherwise."""
    words = words_of(codes)
    if words is None or not (interpreting() or checked_words(words).right):
        return coded.pack(codes)  # type: ignore[return-value]
    return words


def pack(codes: Codes | MixedCodes) -> Any:
    """Return codes on the device in words where possible, else in the layout of ``coded``."""
    if isinstance(codes, MixedCodes):
        parts: Any = tuple(_packed(part) for part in codes.parts)
        return MixedCodes(parts)
    return _packed(codes)


def pack_int8(weight: Tensor, largest: Tensor | None = None) -> Words | Codes:
    """Round weight [N, K] like ``torch_ops.to_int8`` and return packed codes."""
    return _packed(to_int8_codes(weight.detach(), largest))


def pack_int4(weight: Tensor) -> Words | Codes:
    """Round weight [N, K] like ``coded.to_int4`` and return packed codes."""
    return _packed(to_int4(weight.detach()))


def pack_fp8(weight: Tensor) -> Words | Codes:
    """Round weight [N, K] like ``coded.to_fp8`` and return packed codes."""
    return _packed(to_fp8(weight.detach()))
