"""Hyper-connections: weights of N residual streams with the input of a layer, and the streams after a layer.
Also the rotation of neighbours.

One program computes some columns of a token. The weights of a token are few numbers, so every program of the
token computes the weights again; program 0 writes the weights. Sums of streams run in order; no sum depends
on other tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.ops.triton.forms import power

Tensor = torch.Tensor

COLUMNS = 1024
"""Columns of a program."""


@triton.jit
def _mix_streams(
    mixed_ptr,  # float32 [T, (2 + N) * N]
    scale_ptr,  # float32 [3]
    base_ptr,  # float32 [(2 + N) * N]
    x_ptr,  # [T, N, HIDDEN]
    one_ptr,  # [T, HIDDEN]
    out_ptr,  # float32 [T, N]
    mix_ptr,  # float32 [T, N, N]
    eps,
    N: tl.constexpr,
    N_P2: tl.constexpr,
    HIDDEN: tl.constexpr,
    ITERATIONS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute ``sparse_ops.mix_streams`` for some columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    row_ptr = mixed_ptr + token * (2 + N) * N
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < HIDDEN
    made = tl.zeros([COLUMNS], dtype=tl.float32)
    scale = tl.load(scale_ptr)
    for i in tl.static_range(N):
        share = 1.0 / (1.0 + tl.exp(-(tl.load(row_ptr + i) * scale + tl.load(base_ptr + i)))) + eps
        x = tl.load(x_ptr + (token * N + i) * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
        made += share * x
    tl.store(one_ptr + token * HIDDEN + columns, made.to(one_ptr.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        streams = tl.arange(0, N_P2)
        own = streams < N
        out = tl.load(row_ptr + N + streams, mask=own, other=0.0) * tl.load(scale_ptr + 1)
        out = 2.0 / (1.0 + tl.exp(-(out + tl.load(base_ptr + N + streams, mask=own, other=0.0))))
        tl.store(out_ptr + token * N + streams, out, mask=own)
        # mix[i, j]: contribution of stream i to stream j
        places = streams[:, None] * N + streams[None, :]
        live = own[:, None] & own[None, :]
        mix = tl.load(row_ptr + 2 * N + places, mask=live, other=0.0) * tl.load(scale_ptr + 2)
        mix = mix + tl.load(base_ptr + 2 * N + places, mask=live, other=0.0)
        mix = tl.where(live, mix, float("-inf"))
        # Rows of padding have no largest element.
        top = tl.where(own, tl.max(mix, 1), 0.0)
        mix = tl.exp(mix - top[:, None])
        mix = mix / tl.where(own, tl.sum(mix, 1), 1.0)[:, None] + eps
        mix = tl.where(live, mix, 0.0)
        mix = mix / tl.where(own, tl.sum(mix, 0) + eps, 1.0)[None, :]
        for _ in range(ITERATIONS - 1):
            mix = mix / tl.where(own, tl.sum(mix, 1) + eps, 1.0)[:, None]
            mix = mix / tl.where(own, tl.sum(mix, 0) + eps, 1.0)[None, :]
        tl.store(mix_ptr + token * N * N + places, mix, mask=live)


@triton.jit
def _add_streams(
    x_ptr,  # [T, N, HIDDEN]
    made_ptr,  # [T, HIDDEN]
    out_ptr,  # float32 [T, N]
    mix_ptr,  # float32 [T, N, N]
    to_ptr,  # [T, N, HIDDEN]
    N: tl.constexpr,
    N_P2: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute ``sparse_ops.add_streams`` for some columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < HIDDEN
    streams = tl.arange(0, N_P2)
    own = streams < N
    acc = tl.zeros([N_P2, COLUMNS], dtype=tl.float32)
    for i in tl.static_range(N):
        share = tl.load(mix_ptr + (token * N + i) * N + streams, mask=own, other=0.0)
        x = tl.load(x_ptr + (token * N + i) * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
        acc += share[:, None] * x[None, :]
    made = tl.load(made_ptr + token * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + token * N + streams, mask=own, other=0.0)
    acc += made[None, :] * out[:, None]
    to_ptrs = to_ptr + (token * N + streams)[:, None] * HIDDEN + columns[None, :]
    tl.store(to_ptrs, acc.to(to_ptr.dtype.element_ty), mask=own[:, None] & inside[None, :])


def mix_streams(
    mixed: Tensor, scale: Tensor, base: Tensor, x: Tensor, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``sparse_ops.mix_streams`` in one pass. mixed, scale and base are float32."""
    tokens, streams, hidden = x.shape
    one = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, streams, dtype=torch.float32, device=x.device)
    mix = torch.empty(tokens, streams, streams, dtype=torch.float32, device=x.device)
    if tokens:
        columns = min(COLUMNS, power(hidden))
        _mix_streams[(tokens, -(-hidden // columns))](
            *(mixed.contiguous(), scale, base, x.contiguous(), one, out, mix, eps),
            N=streams,
            N_P2=power(streams),
            HIDDEN=hidden,
            ITERATIONS=iterations,
            COLUMNS=columns,
            num_warps=4,
        )
    return one, out, mix


def add_streams(x: Tensor, made: Tensor, out: Tensor, mix: Tensor) -> Tensor:
    """Compute ``sparse_ops.add_streams`` in one pass. out and mix are float32."""
    tokens, streams, hidden = x.shape
    added = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        columns = min(COLUMNS, power(hidden))
        _add_streams[(tokens, -(-hidden // columns))](
            *(x.contiguous(), made.contiguous(), out.contiguous(), mix.contiguous(), added),
            N=streams,
            N_P2=power(streams),
            HIDDEN=hidden,
            COLUMNS=columns,
            num_warps=8,
        )
    return added


# --- rotation ---


@triton.jit
def _rotate_neighbours(
    x_ptr,  # [T, HEADS, DIM]; tokens and heads lie apart
    cos_ptr,  # float32 [T, HALF]
    sin_ptr,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    HEADS_P2: tl.constexpr,
    FIRST: tl.constexpr,
    HALF: tl.constexpr,
    HALF_P2: tl.constexpr,
):
    """Rotate the elements from FIRST on of all heads of one token, in place: a thread has both of a pair."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_P2 + tl.arange(0, HEADS_P2)
    pair = tl.arange(0, HALF_P2)
    live = (heads < HEADS)[:, None] & (pair < HALF)[None, :]
    cos = tl.load(cos_ptr + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    ptrs = x_ptr + token * token_stride + heads[:, None] * head_stride + FIRST + 2 * pair[None, :]
    a = tl.load(ptrs, mask=live, other=0.0).to(tl.float32)
    b = tl.load(ptrs + 1, mask=live, other=0.0).to(tl.float32)
    tl.store(ptrs, (a * cos - b * sin).to(x_ptr.dtype.element_ty), mask=live)
    tl.store(ptrs + 1, (b * cos + a * sin).to(x_ptr.dtype.element_ty), mask=live)


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute ``sparse_ops.rotate_pairs_`` in one pass. cos and sin are float32."""
    tokens, heads, dim = x.shape
    half = cos.shape[1]
    assert x.stride(2) == 1, "elements of a head are contiguous"
    if tokens and heads:
        at_once = min(power(heads), max(1, 4096 // power(half)))
        _rotate_neighbours[(tokens, -(-heads // at_once))](
            *(x, cos.contiguous(), sin.contiguous(), x.stride(0), x.stride(1)),
            HEADS=heads,
            HEADS_P2=at_once,
            FIRST=dim - 2 * half,
            HALF=half,
            HALF_P2=power(half),
            num_warps=4,
        )
    return x
