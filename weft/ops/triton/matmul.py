"""A matrix product in which rows do not affect each other, for ``--deterministic``.

cuBLAS chooses tiles, and the split of K, by the number of rows. Here both are fixed for every number of rows:
an output element is one chain of matrix instructions over K in steps of ``TILE_K`` from 0 up. Without a split
of K, decode sizes are slower, so the product is chosen only if invariance is required.

Source of the idea: He et al. 2025, "Defeating nondeterminism in LLM inference", thinkingmachines.ai/blog.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.ops.triton import interpreting

Tensor = torch.Tensor

TILE_M, TILE_N, TILE_K = 64, 64, 64
TILE_K_EXACT = 32
"""Inputs of a step for float32, which needs twice the memory and uses no matrix unit."""
GROUP = 8
"""Row tiles that use the same columns of the weight one after another, so the weight stays in L2."""


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x_ptr,  # [rows, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N], with BIAS
    out_ptr,  # [rows, N]
    rows,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute one tile of ``x @ weight.T + bias``, as one chain over K."""
    tiles_m = tl.cdiv(rows, TILE_M)
    tiles_n: tl.constexpr = (N + TILE_N - 1) // TILE_N
    group = tl.program_id(0) // (GROUP * tiles_n)
    inside = tl.program_id(0) % (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    m = (group * GROUP + inside % height) * TILE_M + tl.arange(0, TILE_M)
    n = (inside // height) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_ptrs = weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    for begin in range(0, K, TILE_K):
        if K % TILE_K == 0:
            x = tl.load(x_ptrs + begin, mask=(m < rows)[:, None], other=0.0)
            w = tl.load(w_ptrs + begin, mask=(n < N)[:, None], other=0.0)
        else:
            inner = (begin + k < K)[None, :]
            x = tl.load(x_ptrs + begin, mask=(m < rows)[:, None] & inner, other=0.0)
            w = tl.load(w_ptrs + begin, mask=(n < N)[:, None] & inner, other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``: x [T, K], weight [N, K], bias [N]; [T, N] in x's dtype."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    weight = weight.contiguous()
    exact = x.dtype == torch.float32
    _linear[(-(-rows // TILE_M) * -(-outputs // TILE_N),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        x.stride(0),
        N=outputs,
        K=inputs,
        TILE_M=TILE_M,
        TILE_N=TILE_N,
        TILE_K=TILE_K_EXACT if exact else TILE_K,
        GROUP=GROUP,
        BIAS=bias is not None,
        WIDEN=interpreting(),
        num_warps=4,
        num_stages=2 if exact else 4,
    )
    return out
