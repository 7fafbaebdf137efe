"""The small work of latent attention with an indexer: rotated queries, and the indexer's key.

    program 0    rotated part of the queries, behind the absorbed part
    program 1    queries of the indexer: the first ROPE elements of each head are rotated
    program 2    key of the indexer: layer norm, rotation, cache line of the token; weights of the heads

Also products of each head with its own matrix, with equal bits for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from weft.ops.latent_ops import IndexParts
from weft.ops.triton import interpreting
from weft.ops.triton.forms import power
from weft.ops.triton.latent import _rotated

Tensor = torch.Tensor


@triton.jit
def _index_entries(
    q_ptr,  # [T, HEADS * LINE] of wider rows; the last ROPE elements of a line are read
    full_ptr,  # [T, HEADS, LORA + ROPE]; the last ROPE elements of a line are written
    cos_ptr,  # float32 [T, ROPE / 2]
    sin_ptr,
    index_q_ptr,  # with INDEX: [T, INDEX_HEADS * DIM] of wider rows
    joined_ptr,  # with INDEX: [T, DIM + INDEX_HEADS] of wider rows
    norm_ptr,  # with INDEX: [DIM]
    bias_ptr,  # with INDEX: [DIM]
    cache_ptr,  # with INDEX: [blocks * block, WIDTH]; the last DIM elements of a line are written
    writes_ptr,  # with INDEX: int64 [T]
    turned_ptr,  # with INDEX: [T, INDEX_HEADS, DIM]
    weights_ptr,  # with INDEX: float32 [T, INDEX_HEADS]
    q_stride,
    index_q_stride,
    joined_stride,
    eps,
    HEADS: tl.constexpr,
    HEADS_P2: tl.constexpr,
    LINE: tl.constexpr,
    LORA: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_P2: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INDEX: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEX_HEADS_P2: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P2: tl.constexpr,
    INDEX_INTERLEAVED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute one of the parts of one token."""
    token = tl.program_id(0).to(tl.int64)
    turns = tl.arange(0, ROPE_P2)
    if tl.program_id(1) == 0:
        heads = tl.arange(0, HEADS_P2)
        live = heads < HEADS
        made = _rotated(
            q_ptr + token * q_stride + heads * LINE + (LINE - ROPE),
            cos_ptr, sin_ptr, token + 0 * heads, live, turns, ROPE, INTERLEAVED,
        )  # fmt: skip
        to_ptrs = full_ptr + (token * HEADS + heads)[:, None] * (LORA + ROPE) + LORA + turns[None, :]
        tl.store(to_ptrs, made, mask=live[:, None] & (turns < ROPE)[None, :])
    if INDEX:
        dims = tl.arange(0, DIM_P2)
        index_heads = tl.arange(0, INDEX_HEADS_P2)
        there = index_heads < INDEX_HEADS
        if tl.program_id(1) == 1:
            from_ptr = index_q_ptr + token * index_q_stride
            to_ptrs = turned_ptr + (token * INDEX_HEADS + index_heads) * DIM
            made = _rotated(
                from_ptr + index_heads * DIM, cos_ptr, sin_ptr, token + 0 * index_heads, there, turns, ROPE,
                INDEX_INTERLEAVED,
            )  # fmt: skip
            tl.store(to_ptrs[:, None] + turns[None, :], made, mask=there[:, None] & (turns < ROPE)[None, :])
            rest = there[:, None] & ((dims >= ROPE) & (dims < DIM))[None, :]
            kept = tl.load(from_ptr + index_heads[:, None] * DIM + dims[None, :], mask=rest, other=0.0)
            tl.store(to_ptrs[:, None] + dims[None, :], kept, mask=rest)
        if tl.program_id(1) == 2:
            row_ptr = joined_ptr + token * joined_stride
            weights = tl.load(row_ptr + DIM + index_heads, mask=there, other=0.0)
            tl.store(weights_ptr + token * INDEX_HEADS + index_heads, weights.to(tl.float32), mask=there)
            inside = dims < DIM
            x = tl.load(row_ptr + dims, mask=inside, other=0.0).to(tl.float32)
            mean = tl.sum(x, 0) / DIM
            apart = tl.where(inside, x - mean, 0.0)
            scale = tl.rsqrt(tl.sum(apart * apart, 0) / DIM + eps)
            line_ptr = cache_ptr + tl.load(writes_ptr + token) * WIDTH + (WIDTH - DIM)
            narrow = cache_ptr.dtype.element_ty
            rest = inside & (dims >= ROPE)
            made = _layer_normed(row_ptr, norm_ptr, bias_ptr, dims, rest, mean, scale, narrow)
            tl.store(line_ptr + dims, made, mask=rest)
            # The pairs are normalized again, because an element is not at the place of its pair.
            HALF: tl.constexpr = ROPE // 2
            pair = turns % HALF
            first = 2 * pair if INDEX_INTERLEAVED else pair
            second = first + 1 if INDEX_INTERLEAVED else first + HALF
            live = turns < ROPE
            a = _layer_normed(row_ptr, norm_ptr, bias_ptr, first, live, mean, scale, narrow).to(tl.float32)
            b = _layer_normed(row_ptr, norm_ptr, bias_ptr, second, live, mean, scale, narrow).to(tl.float32)
            cos = tl.load(cos_ptr + token * HALF + pair, mask=live, other=0.0)
            sin = tl.load(sin_ptr + token * HALF + pair, mask=live, other=0.0)
            key = tl.where(turns < HALF, a * cos - b * sin, b * cos + a * sin)
            tl.store(line_ptr + turns, key.to(narrow), mask=live)


@triton.jit
def _layer_normed(row_ptr, norm_ptr, bias_ptr, at, live, mean, scale, narrow: tl.constexpr):
    """Return the normalized elements ``at`` of a row, rounded to ``narrow``."""
    x = tl.load(row_ptr + at, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + at, mask=live, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + at, mask=live, other=0.0).to(tl.float32)
    return ((x - mean) * scale * weight + bias).to(narrow)


def index_entries(
    q: Tensor,
    full: Tensor,
    angles: tuple[Tensor, Tensor],
    interleaved: bool,
    index: IndexParts | None,
    eps: float,
    cache: Tensor,
    writes: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """Write the rotated parts of the queries to ``full``, and with ``index`` the indexer's keys to ``cache``.

    q: [T, heads, line], of which the last rope elements are rotated by ``angles``, float32 [T, rope / 2]
    each. full: [T, heads, lora + rope]. cache: [blocks, block, width], writes: int64 [T]. Return with
    ``index`` (queries of the indexer [T, heads, dim], weights float32 [T, heads]).
    """
    tokens, heads, line = q.shape
    cos, sin = (one.contiguous() for one in angles)
    rope = 2 * cos.shape[1]
    assert q.stride(2) == 1 and q.stride(1) == line, "heads of a query are contiguous"  # noqa: PT018
    assert full.is_contiguous() and cache.is_contiguous(), "written in place"  # noqa: PT018
    index_heads = dim = 1
    parts = (q, q, q, q)
    turned = weights = full
    if index is not None:
        index_heads, dim = index.heads, len(index.norm)
        assert rope <= dim, "a key is shorter than its rotated part"
        assert index.q.stride(1) == index.joined.stride(1) == 1, "rows are contiguous"
        parts = (index.q, index.joined, index.norm, index.bias)
        turned = torch.empty(tokens, index_heads, dim, dtype=q.dtype, device=q.device)
        weights = torch.empty(tokens, index_heads, dtype=torch.float32, device=q.device)
    if tokens:
        _index_entries[(tokens, 1 if index is None else 3)](
            *(q, full, cos, sin, *parts, cache, writes, turned, weights),
            *(q.stride(0), parts[0].stride(0), parts[1].stride(0), eps),
            HEADS=heads,
            HEADS_P2=power(heads),
            LINE=line,
            LORA=full.shape[2] - rope,
            ROPE=rope,
            ROPE_P2=power(rope),
            INTERLEAVED=interleaved,
            INDEX=index is not None,
            INDEX_HEADS=index_heads,
            INDEX_HEADS_P2=power(index_heads),
            DIM=dim,
            DIM_P2=power(dim),
            INDEX_INTERLEAVED=index is not None and index.interleaved,
            WIDTH=cache.shape[2],
            num_warps=8,
        )
    return None if index is None else (turned, weights)


# --- products of heads ---

_TILE_M, _TILE_N, _TILE_K = 16, 64, 64


@triton.jit(do_not_specialize=["rows"])
def _head_product(
    x_ptr,  # [T, heads, K], strided
    matrices_ptr,  # [heads, N, K], strided
    out_ptr,  # [T, heads, N], strided
    rows,
    x_token,
    x_head,
    m_head,
    m_out,
    m_in,
    out_token,
    out_head,
    N: tl.constexpr,
    K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute a tile of one head. Inputs are added in one order for any number of rows."""
    head = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    column = tl.program_id(2) * TILE_N + tl.arange(0, TILE_N)
    acc = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    for k in range(0, K, TILE_K):
        at = k + tl.arange(0, TILE_K)
        x = tl.load(
            x_ptr + token[:, None] * x_token + head * x_head + at[None, :],
            mask=(token < rows)[:, None] & (at < K)[None, :],
            other=0.0,
        )
        m = tl.load(
            matrices_ptr + head * m_head + column[None, :] * m_out + at[:, None] * m_in,
            mask=(column < N)[None, :] & (at < K)[:, None],
            other=0.0,
        )
        if WIDEN:
            x = x.to(tl.float32)
            m = m.to(tl.float32)
        acc = tl.dot(x, m, acc, input_precision="ieee")
    to_ptrs = out_ptr + token[:, None] * out_token + head * out_head + column[None, :]
    tl.store(to_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(token < rows)[:, None] & (column < N)[None, :])


def head_product_into(x: Tensor, matrices: Tensor, out: Tensor) -> None:
    """Write the products of x [T, heads, n] and each head's matrix of ``matrices`` [heads, m, n] to out [T,
    heads, m]. The bits of a token do not depend on other tokens. Last dims of x and out are contiguous."""
    assert x.stride(2) == out.stride(2) == 1, "heads are contiguous"
    rows, heads, inputs = x.shape
    if not rows:
        return
    _head_product[(-(-rows // _TILE_M), heads, -(-out.shape[2] // _TILE_N))](
        *(x, matrices, out, rows, x.stride(0), x.stride(1), *matrices.stride(), out.stride(0), out.stride(1)),
        N=out.shape[2],
        K=inputs,
        TILE_M=_TILE_M,
        TILE_N=_TILE_N,
        TILE_K=_TILE_K,
        WIDEN=interpreting(),
        num_warps=4,
        num_stages=2,
    )


def kernels_of() -> Callable[..., tuple[Tensor, Tensor] | None]:
    """Return the function that does the small work of an indexer; see ``latent_ops.op_by_op``."""
    return index_entries
