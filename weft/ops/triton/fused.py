"""Norms, rotary embedding with the cache write, and gates, each in one pass over memory.

One program computes a row, in an order that depends only on the row's length, so the ops are invariant.
Results are rounded where the torch references round. The references define the results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.ops import torch_ops
from weft.ops.moe import Contribution, ExpertSum, summed
from weft.ops.triton.eight_bits import coded, magnitudes, powers
from weft.ops.triton.forms import power
from weft.ops.triton.sums import sum_of_experts

Tensor = torch.Tensor

LONGEST_ROW = 1 << 15
"""Maximum row length of the kernel: a program's registers must hold a row. Longer rows use torch."""
HEADS_AT_ONCE = 8
GATED_AT_ONCE = 1024


@triton.jit
def _add_rms_norm(
    x_ptr,  # [T, N]
    delta_ptr,  # [T, N], with ADD; with TOP_K [T, TOP_K, N]
    scales_ptr,  # float32 [T, TOP_K], with TOP_K
    shared_ptr,  # [T, N], with SHARED
    share_ptr,  # float32 [T], with SHARE
    weight_ptr,  # [N]
    stream_ptr,  # [T, N], with ADD; may be x's memory
    normed_ptr,  # [T, N]
    eps,
    x_stride,
    N: tl.constexpr,
    N_P2: tl.constexpr,
    ADD: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Normalize one row; with ADD, add the row of delta first and store the sum, rounded, in the stream.

    With TOP_K, the row of delta is the sum of the token's experts, rounded as by a kernel of its own.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, N_P2)
    live = at < N
    x = tl.load(x_ptr + row * x_stride + at, mask=live, other=0.0).to(tl.float32)
    if ADD:
        if TOP_K > 0:
            total = sum_of_experts(
                delta_ptr, scales_ptr, shared_ptr, share_ptr, row, at, N, TOP_K, SHARED, SHARE
            )
            x += total.to(delta_ptr.dtype.element_ty).to(tl.float32)
        else:
            x += tl.load(delta_ptr + row * N + at, mask=live, other=0.0).to(tl.float32)
        rounded = x.to(stream_ptr.dtype.element_ty)
        tl.store(stream_ptr + row * N + at, rounded, mask=live)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    weight = tl.load(weight_ptr + at, mask=live, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row * N + at, (x * scale * weight).to(normed_ptr.dtype.element_ty), mask=live)


def _warps(width: int) -> int:
    return min(16, max(1, width // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute ``torch_ops.rms_norm``: x [..., n], weight [n]."""
    size = x.shape[-1]
    if size > LONGEST_ROW:
        return torch_ops.rms_norm(x, weight, eps)
    rows = x.reshape(-1, size)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    normed = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _normalize(rows, None, weight, eps, normed, normed)
    return normed.view(x.shape)


def add_rms_norm(x: Tensor, delta: Contribution | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute ``torch_ops.add_rms_norm``: return (sum, normalized sum). The sum overwrites a contiguous x.

    Results of experts are added here: the bits are those of ``delta.total()``.
    """
    if delta is None:
        return x, rms_norm(x, weight, eps)
    if x.shape[1] > LONGEST_ROW:
        return torch_ops.add_rms_norm(x, summed(delta), weight, eps)
    stream = x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    source = x if x.stride(1) == 1 else x.contiguous()
    _normalize(source, delta, weight, eps, stream, normed)
    return stream, normed


def _normalize(
    x: Tensor, delta: Contribution | None, weight: Tensor, eps: float, stream: Tensor, normed: Tensor
) -> None:
    """Launch the norm over rows [T, n]. Writes ``normed``, and with ``delta`` also ``stream``."""
    rows, size = x.shape
    if not rows:
        return
    width = power(size)
    given: tuple[Tensor | None, ...]
    if isinstance(delta, ExpertSum):
        given, top_k = (delta.made, delta.scales, delta.shared, delta.share), delta.made.shape[1]
    else:
        given, top_k = (delta, None, None, None), 0
    _add_rms_norm[(rows,)](
        x,
        *(x if one is None else one.contiguous() for one in given),
        weight,
        stream,
        normed,
        eps,
        x.stride(0),
        N=size,
        N_P2=width,
        ADD=delta is not None,
        TOP_K=top_k,
        SHARED=given[2] is not None,
        SHARE=given[3] is not None,
        num_warps=_warps(width),
    )


@triton.jit
def _qkv_rope_cache(
    qkv_ptr,  # [T, HEADS + 2 * KV_HEADS, DIM]; tokens lie apart
    q_weight_ptr,  # [DIM], with Q_NORM
    k_weight_ptr,  # [DIM], with K_NORM
    cos_ptr,  # [T, HALF] float32
    sin_ptr,
    cache_ptr,  # [blocks, 2, KV_HEADS, BLOCK, DIM]; with FP8 codes, uint8
    scales_ptr,  # float32 [blocks, 2, KV_HEADS, BLOCK], with FP8
    writes_ptr,  # int64 [T]
    q_ptr,  # [T, HEADS, DIM]
    eps,
    qkv_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_P2: tl.constexpr,
    REST_P2: tl.constexpr,
    BLOCK: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    FP8: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Process heads [program 1 * AT_ONCE, ...) of one token. A head is two rotated halves and the rest."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    live = head < HEADS + 2 * KV_HEADS
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    half = tl.arange(0, HALF_P2)
    rest = 2 * HALF + tl.arange(0, REST_P2)
    halves = live[:, None] & (half < HALF)[None, :]
    rests = live[:, None] & (rest < DIM)[None, :]
    heads_ptr = qkv_ptr + token * qkv_stride + head[:, None] * DIM
    first = tl.load(heads_ptr + half[None, :], mask=halves, other=0.0).to(tl.float32)
    second = tl.load(heads_ptr + HALF + half[None, :], mask=halves, other=0.0).to(tl.float32)
    last = tl.load(heads_ptr + rest[None, :], mask=rests, other=0.0).to(tl.float32)

    if Q_NORM or K_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(last * last, 1)
        scale = tl.rsqrt(squares / DIM + eps)
        normed = tl.zeros([AT_ONCE], dtype=tl.int1)
        weight1 = tl.zeros([AT_ONCE, HALF_P2], dtype=tl.float32)
        weight2 = tl.zeros([AT_ONCE, HALF_P2], dtype=tl.float32)
        weight3 = tl.zeros([AT_ONCE, REST_P2], dtype=tl.float32)
        if Q_NORM:
            normed = normed | is_q
            weight1 = _weight(weight1, q_weight_ptr, half, half < HALF, is_q)
            weight2 = _weight(weight2, q_weight_ptr, HALF + half, half < HALF, is_q)
            weight3 = _weight(weight3, q_weight_ptr, rest, rest < DIM, is_q)
        if K_NORM:
            normed = normed | is_k
            weight1 = _weight(weight1, k_weight_ptr, half, half < HALF, is_k)
            weight2 = _weight(weight2, k_weight_ptr, HALF + half, half < HALF, is_k)
            weight3 = _weight(weight3, k_weight_ptr, rest, rest < DIM, is_k)
        # Rounded to the model's dtype here, like the result of a separate norm.
        narrow = q_ptr.dtype.element_ty
        first = tl.where(normed[:, None], (first * scale[:, None] * weight1).to(narrow).to(tl.float32), first)
        second = tl.where(
            normed[:, None], (second * scale[:, None] * weight2).to(narrow).to(tl.float32), second
        )
        last = tl.where(normed[:, None], (last * scale[:, None] * weight3).to(narrow).to(tl.float32), last)

    cos = tl.load(cos_ptr + token * HALF + half, mask=half < HALF, other=1.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + half, mask=half < HALF, other=0.0)[None, :]
    turns = (is_q | is_k)[:, None]
    turned = tl.where(turns, first * cos - second * sin, first)
    second = tl.where(turns, second * cos + first * sin, second)

    to_q = q_ptr + (token * HEADS + head)[:, None] * DIM
    narrow = q_ptr.dtype.element_ty
    tl.store(to_q + half[None, :], turned.to(narrow), mask=halves & is_q[:, None])
    tl.store(to_q + HALF + half[None, :], second.to(narrow), mask=halves & is_q[:, None])
    tl.store(to_q + rest[None, :], last.to(narrow), mask=rests & is_q[:, None])

    write = tl.load(writes_ptr + token)
    # Key heads, then value heads: lines (block * 2 * KV_HEADS + kv head) * BLOCK + offset of the cache.
    line = (write // BLOCK * (2 * KV_HEADS) + (head - HEADS)) * BLOCK + write % BLOCK
    to_kv = cache_ptr + line[:, None] * DIM
    turned = turned.to(narrow)
    second = second.to(narrow)
    last = last.to(narrow)
    if FP8:
        # Codes of the rounded numbers. Elements that no mask selects are 0.
        turned = turned.to(tl.float32)
        second = second.to(tl.float32)
        last = last.to(tl.float32)
        top = tl.maximum(tl.max(magnitudes(turned), 1), tl.max(magnitudes(second), 1))
        factor, scale = powers(tl.maximum(top, tl.max(magnitudes(last), 1)))
        tl.store(scales_ptr + line, scale, mask=live & ~is_q)
        turned = coded(turned * factor[:, None])
        second = coded(second * factor[:, None])
        last = coded(last * factor[:, None])
    tl.store(to_kv + half[None, :], turned, mask=halves & ~is_q[:, None])
    tl.store(to_kv + HALF + half[None, :], second, mask=halves & ~is_q[:, None])
    tl.store(to_kv + rest[None, :], last, mask=rests & ~is_q[:, None])


@triton.jit
def _weight(weights, ptr, at, inside, heads):
    """Return ``weights`` [heads, dims], with the norm's weight at dims ``at`` for the selected ``heads``."""
    read = tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)
    return tl.where(heads[:, None], read[None, :], weights)


def qkv_rope_cache(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    writes: Tensor,
) -> Tensor:
    """Compute ``torch_ops.qkv_rope_cache``: write keys and values into ``cache``, return the queries.

    The cache must be contiguous; cos and sin are float32.
    """
    norms = (q_weight, k_weight)
    return _rope_cache(qkv, heads, kv_heads, norms, eps, (cos, sin), cache, None, writes)


def qkv_rope_cache_fp8(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    scales: Tensor,
    writes: Tensor,
) -> Tensor:
    """Compute ``kv_fp8.qkv_rope_cache_fp8``: ``qkv_rope_cache`` with a cache in 8 bits."""
    norms = (q_weight, k_weight)
    return _rope_cache(qkv, heads, kv_heads, norms, eps, (cos, sin), cache, scales, writes)


def _rope_cache(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    norms: tuple[Tensor | None, Tensor | None],
    eps: float,
    angles: tuple[Tensor, Tensor],
    cache: Tensor,
    scales: Tensor | None,
    writes: Tensor,
) -> Tensor:
    """Launch the kernel; with ``scales``, the cache has 8 bits. norms: weights of queries and keys."""
    q_weight, k_weight = norms
    cos, sin = angles
    tokens, dim, half = qkv.shape[0], cache.shape[4], cos.shape[1]
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    assert cache.is_contiguous(), "the cache is written in place"
    assert cos.dtype == torch.float32, "angles are wide"
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    _qkv_rope_cache[(tokens, -(-(heads + 2 * kv_heads) // HEADS_AT_ONCE))](
        qkv,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        cos.contiguous(),
        sin.contiguous(),
        cache if scales is None else cache.view(torch.uint8),
        cos if scales is None else scales,
        writes,
        q,
        eps,
        qkv.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=half,
        HALF_P2=power(max(half, 1)),
        REST_P2=power(max(dim - 2 * half, 1)),
        BLOCK=cache.shape[3],
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        FP8=scales is not None,
        AT_ONCE=HEADS_AT_ONCE,
        num_warps=4,
    )
    return q


@triton.jit
def _gated_silu(
    gate_up_ptr,  # [T, 2 * N]
    out_ptr,  # [T, N]
    N,
    AT_ONCE: tl.constexpr,
):
    """Compute ``silu(gate) * up`` for AT_ONCE columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    live = at < N
    gate = tl.load(gate_up_ptr + row * (2 * N) + at, mask=live, other=0.0)
    up = tl.load(gate_up_ptr + row * (2 * N) + N + at, mask=live, other=0.0)
    x = gate.to(tl.float32)
    # Rounded between the two operations, as in separate ops.
    activated = (x / (1.0 + tl.exp(-x))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * N + at, (activated * up.to(tl.float32)).to(gate.dtype), mask=live)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Compute ``torch_ops.gated``: [..., 2 n] to [..., n]. Activations except silu use the reference."""
    if activation != "silu" or not gate_up.is_contiguous():
        return torch_ops.gated(gate_up, activation)
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    rows = gate_up.numel() // max(2 * size, 1)
    if rows:
        grid = (rows, -(-size // GATED_AT_ONCE))
        _gated_silu[grid](gate_up, out, size, AT_ONCE=GATED_AT_ONCE, num_warps=4)
    return out


@triton.jit
def _sigmoid_gate(
    x_ptr,  # [T, N]
    gate_ptr,  # [T, N]; both of wider rows
    out_ptr,  # [T, N]
    x_stride,
    gate_stride,
    N,
    AT_ONCE: tl.constexpr,
):
    """Compute ``x * sigmoid(gate)`` for AT_ONCE columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    x = tl.load(x_ptr + row * x_stride + at, mask=at < N, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=at < N, other=0.0).to(tl.float32)
    made = x / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * N + at, made.to(out_ptr.dtype.element_ty), mask=at < N)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Compute ``torch_ops.sigmoid_gate``: ``x * sigmoid(gate)``, both [T, n], which may be columns of wider
    rows."""
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x, gate = (one if one.stride(1) == 1 else one.contiguous() for one in (x, gate))
    grid = (rows, -(-size // GATED_AT_ONCE))
    _sigmoid_gate[grid](x, gate, out, x.stride(0), gate.stride(0), size, AT_ONCE=GATED_AT_ONCE, num_warps=4)
    return out
