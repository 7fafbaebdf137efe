"""Low-rank products for rows of different adapters, in two passes: inner products, then outputs.

A program computes some sums of one row, each in one order, so the op is invariant. A program of a row without
an adapter ends at once. The host reads nothing, so steps with adapters can be captured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.ops.low_rank import AdapterRows, LowRankPool

Tensor = torch.Tensor

RANKS, INPUTS, OUTPUTS = 8, 256, 256
"""Ranks and inputs of a step of the inner products; outputs of a program of the second pass."""


@triton.jit
def _low_rank_inner(
    x_ptr,  # [T, inputs]
    a_ptr,  # [places, parts, most, inputs]
    numbers_ptr,  # int32 [T]
    ranks_ptr,  # int32 [places]
    inner_ptr,  # float32 [T, parts, most]
    inputs,
    parts,
    most,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Compute the products of one row with some lines of A of one part."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = tl.program_id(2) * RANKS
    place = tl.load(numbers_ptr + row).to(tl.int64)
    if place >= 0:
        rank = tl.load(ranks_ptr + place)
        if first < rank:
            line = first + tl.arange(0, RANKS)
            used = line < rank
            at = tl.arange(0, INPUTS)
            lines = a_ptr + ((place * parts + part) * most + line)[:, None] * inputs
            sums = tl.zeros([RANKS], tl.float32)
            for begin in range(0, inputs, INPUTS):
                inside = begin + at < inputs
                x = tl.load(x_ptr + row * inputs + begin + at, mask=inside, other=0.0).to(tl.float32)
                a = tl.load(lines + begin + at[None, :], mask=used[:, None] & inside[None, :], other=0.0)
                sums += tl.sum(a.to(tl.float32) * x[None, :], 1)
            tl.store(inner_ptr + (row * parts + part) * most + line, sums, mask=used)


@triton.jit
def _low_rank_outer(
    y_ptr,  # [T, outputs], written
    b_ptr,  # [places, most, outputs]
    numbers_ptr,  # int32 [T]
    ranks_ptr,  # int32 [places]
    owners_ptr,  # int32 [outputs]: part of an output, or -1
    inner_ptr,  # float32 [T, parts, most]
    outputs,
    parts,
    most,
    OUTPUTS: tl.constexpr,
):
    """Add the products with B to some outputs of one row, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    place = tl.load(numbers_ptr + row).to(tl.int64)
    if place >= 0:
        rank = tl.load(ranks_ptr + place)
        if rank > 0:
            owner = tl.load(owners_ptr + at, mask=at < outputs, other=-1)
            wanted = owner >= 0
            sums = tl.zeros([OUTPUTS], tl.float32)
            for line in range(0, rank):
                inner = tl.load(inner_ptr + (row * parts + owner) * most + line, mask=wanted, other=0.0)
                b = tl.load(b_ptr + (place * most + line) * outputs + at, mask=wanted, other=0.0)
                sums += inner * b.to(tl.float32)
            y = tl.load(y_ptr + row * outputs + at, mask=wanted, other=0.0).to(tl.float32)
            tl.store(y_ptr + row * outputs + at, (y + sums).to(y_ptr.dtype.element_ty), mask=wanted)


def low_rank(y: Tensor, x: Tensor, pool: LowRankPool, rows: AdapterRows) -> None:
    """Add the low-rank product of each row to y [T, outputs], in place. See ``weft.ops.low_rank``."""
    tokens, outputs = y.shape
    if not tokens:
        return
    assert y.is_contiguous()
    x = x.contiguous()
    _, parts, most, inputs = pool.a.shape
    inner = torch.empty(tokens, parts, most, dtype=torch.float32, device=y.device)
    known = rows.numbers, pool.device_ranks
    pieces = triton.cdiv(most, RANKS)
    _low_rank_inner[tokens, parts, pieces](x, pool.a, *known, inner, inputs, parts, most, RANKS, INPUTS)
    _low_rank_outer[tokens, triton.cdiv(outputs, OUTPUTS)](y, pool.b, *known, pool.owners, inner, outputs, parts, most, OUTPUTS)
