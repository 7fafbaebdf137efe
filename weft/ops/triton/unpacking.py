"""Codes (``weft.ops.coded``) as kernels unpack them: one step of a tile at a time.

Numbers of every format are exact in 16 bits. The group decides where scales are applied (``way_of``):

    row     one scale a row: it multiplies the whole sum
    sum     a step lies within a group: scales multiply its sum, in float32; nothing is rounded
    merged  a step has several groups: scales multiply the numbers, which are rounded to x's dtype. Exact, in
            bfloat16, for scales that are bytes (MXFP4, MXFP8, NVFP4)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weft.ops.coded import Codes

LEAST_STEP = 16
"""Minimum inputs of a matrix instruction."""
LEAST_STEP_OF_4_BITS = 32
"""Minimum inputs of a step for 16-bit x and 4-bit codes. With 16 inputs and tiles of 16 rows, Triton 3.6
generates a wrong program for Hopper, which multiplies numbers with inputs of other places."""
TILE_K_EXACT = 16
"""Maximum inputs of a step for float32. Products in float32 keep a whole step in registers."""
UNITS = {"e2m1": 14, "e4m3": 8}
"""Float codes are read as float16 with the same bits, which are too small by 2 to this power."""


class Way(NamedTuple):
    """Place where scales are applied to numbers."""

    name: str
    group: int
    """Inputs of a group; 0 for ``row``."""
    step: int
    """Maximum inputs of a step."""


def way_of(codes: Codes, tile_k: int) -> Way:
    """Return the way for steps of at most ``tile_k`` inputs.

    The group must be a power of two, a multiple of 16, or a whole row.
    """
    if codes.group >= codes.inputs:
        return Way("row", 0, tile_k)
    fitting = min(codes.group & -codes.group, tile_k)
    bytes_merge = codes.scales.dtype != torch.float32 and codes.group < tile_k
    least = LEAST_STEP_OF_4_BITS if codes.four and tile_k > TILE_K_EXACT else LEAST_STEP
    if bytes_merge or fitting < least:
        return Way("merged", codes.group, tile_k)
    return Way("sum", codes.group, fitting)


def fitting(codes: Codes) -> Codes:
    """Return the same codes with groups that divide into steps."""
    least = codes.group & -codes.group
    in_rows = codes.group >= codes.inputs
    some_merge = least < (LEAST_STEP_OF_4_BITS if codes.four else LEAST_STEP)
    merges = some_merge or codes.scales.dtype != torch.float32
    return codes if in_rows or not merges else codes.regrouped(least)


# --- in kernels ---


@triton.jit
def halves(codes, FOUR: tl.constexpr):
    """Return float16 of E2M1 or E4M3 codes, too small by UNITS. Never NaN."""
    wide = codes.to(tl.uint16)
    if FOUR:
        bits = ((wide & 7) << 9) | ((wide & 8) << 12)
    else:
        bits = ((wide & 127) << 7) | ((wide & 128) << 8)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def _scale(ptrs, mask, SCALES: tl.constexpr, UNIT: tl.constexpr):
    """Return scales as float32, times 2 to the power of UNIT."""
    if SCALES == "e8m0":
        power = tl.minimum(tl.load(ptrs, mask=mask, other=0).to(tl.int32) + UNIT, 254)
        made = (power << 23).to(tl.float32, bitcast=True)
    elif SCALES == "e4m3":
        made = halves(tl.load(ptrs, mask=mask, other=0), False).to(tl.float32) * (2.0 ** (UNIT + 8))
    else:
        made = tl.load(ptrs, mask=mask, other=0.0) * (2.0**UNIT)
    return made


@triton.jit
def _integers(codes, zero, TYPE: tl.constexpr):
    """Return codes minus ``zero``, exact in TYPE (float32 or 16 bits).

    Uses no conversion instructions: a code becomes the low bits of the float 2^23.
    """
    wide = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    return (wide - (zero + 8388608.0)).to(TYPE)


@triton.jit
def _spread(of_groups, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr):
    """Repeat the values of groups [TILE_N, TILE_K // GROUP] for each input: [TILE_N, TILE_K]."""
    wide = tl.broadcast_to(of_groups[:, :, None], [TILE_N, TILE_K // GROUP, GROUP])
    return tl.reshape(wide, [TILE_N, TILE_K])


@triton.jit
def dequantized_tile(
    begin,
    row,  # int64 [TILE_N]: row among all rows of all matrices
    live,  # [TILE_N]: True if the row exists
    values_ptr,
    scales_ptr,
    zeros_ptr,
    line,  # bytes of a row
    groups,  # groups of a row
    NUMBERS: tl.constexpr,
    SCALES: tl.constexpr,
    WAY: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    ZEROS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Return (numbers, scales times 2 to the power of UNIT) of the inputs from ``begin`` on.

    Merged: float32 numbers and scales [TILE_N, TILE_K]. Otherwise numbers [TILE_N, TILE_K] in TYPE and scales
    [TILE_N]. Results beyond the end of the row are arbitrary but finite.
    """
    FOUR: tl.constexpr = NUMBERS == "int4" or NUMBERS == "e2m1"
    PER_BYTE: tl.constexpr = 2 if FOUR else 1
    at = begin // PER_BYTE + tl.arange(0, TILE_K // PER_BYTE)
    there = live[:, None] if EVEN else live[:, None] & (at < line)[None, :]
    codes = tl.load(values_ptr + row[:, None] * line + at[None, :], mask=there, other=0)
    if FOUR:
        codes = tl.interleave(codes & 15, codes >> 4)
    if WAY == "merged":
        group = begin // GROUP + tl.arange(0, TILE_K // GROUP)
        of_groups = row[:, None] * groups + group[None, :]
        some = live[:, None] & (group < groups)[None, :]
    else:
        of_groups = row * groups + (0 if WAY == "row" else begin // GROUP)
        some = live
    KIND: tl.constexpr = tl.float32 if WAY == "merged" else TYPE
    if NUMBERS == "e2m1" or NUMBERS == "e4m3":
        numbers = halves(codes, FOUR).to(tl.float32).to(KIND)
    elif ZEROS:
        zero = tl.load(zeros_ptr + of_groups, mask=some, other=0).to(tl.float32)
        zeros = _spread(zero, TILE_N, TILE_K, GROUP) if WAY == "merged" else zero[:, None]
        numbers = _integers(codes, zeros, KIND)
    else:
        numbers = _integers(codes, 8.0 if FOUR else 128.0, KIND)
    scale = _scale(scales_ptr + of_groups, some, SCALES, UNIT)
    if WAY == "merged":
        scale = _spread(scale, TILE_N, TILE_K, GROUP)
    return numbers, scale


@triton.jit
def step(
    acc,  # float32 [TILE_M, TILE_N]
    x,  # [TILE_M, TILE_K], zeros beyond K
    begin,
    row,
    live,
    values_ptr,
    scales_ptr,
    zeros_ptr,
    line,
    groups,
    NUMBERS: tl.constexpr,
    SCALES: tl.constexpr,
    WAY: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    ZEROS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Return ``acc`` plus the products of the inputs from ``begin`` on. Inputs beyond K count as 0."""
    numbers, scale = dequantized_tile(
        begin, row, live, values_ptr, scales_ptr, zeros_ptr, line, groups,
        NUMBERS, SCALES, WAY, GROUP, UNIT, ZEROS, TILE_N, TILE_K, EVEN, x.dtype,
    )  # fmt: skip
    weight = (numbers * scale).to(x.dtype) if WAY == "merged" else numbers
    if WIDEN:
        x = x.to(tl.float32)
        weight = weight.to(tl.float32)
    if WAY == "sum":
        acc += tl.dot(x, tl.trans(weight), input_precision="ieee") * scale[None, :]
    else:
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    return acc


@triton.jit
def finish(
    acc,
    row,
    live,
    column,  # [TILE_N], of the bias
    scales_ptr,
    factors_ptr,
    bias_ptr,
    SCALES: tl.constexpr,
    WAY: tl.constexpr,
    UNIT: tl.constexpr,
    FACTORS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Return ``acc`` times row scales and factors, plus the bias."""
    if WAY == "row":
        acc *= _scale(scales_ptr + row, live, SCALES, UNIT)[None, :]
    if FACTORS:
        acc *= tl.load(factors_ptr + row, mask=live, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + column, mask=live, other=0.0).to(tl.float32)[None, :]
    return acc
