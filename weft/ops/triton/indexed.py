"""Kernels before and behind latent attention: cache entries, also with the key of an indexer, and products
of each head with its own matrix, with equal bits for any number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.ops.triton import interpreting
from weft.ops.triton.eight_bits import coded, magnitudes, powers

Tensor = torch.Tensor

# --- key of the indexer ---


@triton.jit
def _layer_normed(row_ptr, norm_ptr, bias_ptr, at, live, mean, scale, narrow: tl.constexpr):
    """Return the normalized elements ``at`` of a row, rounded to ``narrow``."""
    x = tl.load(row_ptr + at, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + at, mask=live, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + at, mask=live, other=0.0).to(tl.float32)
    return ((x - mean) * scale * weight + bias).to(narrow)


@triton.jit
def _write_index_key(
    line_ptr, row_ptr, norm_ptr, bias_ptr, cos_ptr, sin_ptr, token, eps, ROPE: tl.constexpr,
    ROPE_P2: tl.constexpr, DIM: tl.constexpr, DIM_P2: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Write the key of the indexer, DIM elements, to ``line_ptr``: layer norm of the elements at ``row_ptr``,
    then ``latent_ops.rotate_first``."""
    dims = tl.arange(0, DIM_P2)
    inside = dims < DIM
    x = tl.load(row_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / DIM
    apart = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(apart * apart, 0) / DIM + eps)
    narrow = line_ptr.dtype.element_ty
    rest = inside & (dims >= ROPE)
    made = _layer_normed(row_ptr, norm_ptr, bias_ptr, dims, rest, mean, scale, narrow)
    tl.store(line_ptr + dims, made, mask=rest)
    # The pairs are normalized again, because an element is not at the place of its pair.
    HALF: tl.constexpr = ROPE // 2
    turns = tl.arange(0, ROPE_P2)
    pair = turns % HALF
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + HALF
    live = turns < ROPE
    a = _layer_normed(row_ptr, norm_ptr, bias_ptr, first, live, mean, scale, narrow).to(tl.float32)
    b = _layer_normed(row_ptr, norm_ptr, bias_ptr, second, live, mean, scale, narrow).to(tl.float32)
    cos = tl.load(cos_ptr + token * HALF + pair, mask=live, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + pair, mask=live, other=0.0)
    key = tl.where(turns < HALF, a * cos - b * sin, b * cos + a * sin)
    tl.store(line_ptr + turns, key.to(narrow), mask=live)


# --- entries of latent attention ---


@triton.jit
def _rotated(line_ptrs, cos_ptr, sin_ptr, token, live, turns, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return ``latent_ops.rotate_pairs`` of ROPE elements at each of ``line_ptrs`` [N], as [N, turns]."""
    HALF: tl.constexpr = ROPE // 2
    pair = turns % HALF
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + HALF
    inside = live[:, None] & (turns < ROPE)[None, :]
    x = tl.load(line_ptrs[:, None] + first[None, :], mask=inside, other=0.0)
    y = tl.load(line_ptrs[:, None] + second[None, :], mask=inside, other=0.0)
    angles = token[:, None] * HALF + pair[None, :]
    cos = tl.load(cos_ptr + angles, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angles, mask=inside, other=0.0)
    narrow = x.dtype
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    return tl.where((turns < HALF)[None, :], x * cos - y * sin, y * cos + x * sin).to(narrow)


@triton.jit
def _latent_rope_cache(
    joined_ptr,  # [T, FIRST + LORA + ROPE] of wider rows
    q_weight_ptr,  # [FIRST], with Q_NORM
    weight_ptr,  # [LORA]
    cos_ptr,  # float32 [T, ROPE / 2]
    sin_ptr,
    cache_ptr,  # [blocks * BLOCK, WIDTH]; writes the first LORA elements of a line; with FP8 codes, uint8
    scales_ptr,  # float32 [blocks * BLOCK], with FP8
    keys_ptr,  # the cache, with rotated keys behind the latents; with FP8 [blocks * BLOCK, KEYS_WIDTH]
    writes_ptr,  # int64 [T]
    q_ptr,  # [T, FIRST], with Q_NORM
    index_ptr,  # [T, DIM] of wider rows, with INDEX; the key is the end of a line of ``keys_ptr``
    index_norm_ptr,  # [DIM], with INDEX
    index_bias_ptr,  # [DIM], with INDEX
    joined_stride,
    index_stride,
    eps,
    index_eps,
    FIRST: tl.constexpr,
    FIRST_P2: tl.constexpr,
    LORA: tl.constexpr,
    LORA_P2: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_P2: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS_WIDTH: tl.constexpr,
    FP8: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q_NORM: tl.constexpr,
    INDEX: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P2: tl.constexpr,
    INDEX_INTERLEAVED: tl.constexpr,
):
    """Write the entry of one token. Further programs of a token write the normalized queries' part, and the
    key of the indexer."""
    token = tl.program_id(0).to(tl.int64)
    row_ptr = joined_ptr + token * joined_stride
    if Q_NORM:  # noqa: SIM102 (Q_NORM is decided when the kernel compiles)
        if tl.program_id(1) == 1:
            at = tl.arange(0, FIRST_P2)
            made = _normed(row_ptr, q_weight_ptr, at, FIRST, eps)
            tl.store(q_ptr + token * FIRST + at, made.to(q_ptr.dtype.element_ty), mask=at < FIRST)
            return
    if INDEX:  # noqa: SIM102
        if tl.program_id(1) == 1 + Q_NORM:
            _write_index_key(
                keys_ptr + tl.load(writes_ptr + token) * KEYS_WIDTH + (KEYS_WIDTH - DIM),
                index_ptr + token * index_stride, index_norm_ptr, index_bias_ptr, cos_ptr, sin_ptr, token,
                index_eps, ROPE, ROPE_P2, DIM, DIM_P2, INDEX_INTERLEAVED,
            )  # fmt: skip
            return
    line = tl.load(writes_ptr + token)
    narrow = keys_ptr.dtype.element_ty
    dim = tl.arange(0, LORA_P2)
    made = _normed(row_ptr + FIRST, weight_ptr, dim, LORA, eps).to(narrow)
    if FP8:
        # The codes are those of the latent in the model's dtype, as on a CPU.
        made = made.to(tl.float32)
        factor, scale = powers(tl.max(magnitudes(made), 0))
        tl.store(scales_ptr + line, scale)
        made = coded(made * factor)
    tl.store(cache_ptr + line * WIDTH + dim, made, mask=dim < LORA)
    turns = tl.arange(0, ROPE_P2)
    own = token + tl.arange(0, 1)
    key = _rotated(
        row_ptr + FIRST + LORA + 0 * own, cos_ptr, sin_ptr, own, own >= 0, turns, ROPE, INTERLEAVED
    )
    key_ptr = keys_ptr + line * KEYS_WIDTH + (0 if FP8 else LORA)
    tl.store(key_ptr + turns[None, :], key.to(narrow), mask=(turns < ROPE)[None, :])


@triton.jit
def _normed(row_ptr, weight_ptr, at, SIZE: tl.constexpr, eps):
    """Return the RMS norm of SIZE elements, float32."""
    x = tl.load(row_ptr + at, mask=at < SIZE, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=at < SIZE, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight


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
