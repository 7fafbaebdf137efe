"""Norms, rotation with the cache write, and gating in the CPU extension (csrc/fused.cpp): bf16, float32.

Importing registers the ops, which are chosen where the extension is built. Signatures: see ``torch_ops``.
"""

from __future__ import annotations

import torch

from weft.ops import kv_fp8
from weft.ops.cpu.served import ACTIVATIONS, serve

Tensor = torch.Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last dim, in x's dtype. x [..., n]."""
    result: Tensor = torch.ops.weft_cpu.rms_norm.default(x, weight, eps)
    return result


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x + delta, RMS norm of the sum), each [T, n] in x's dtype. x is overwritten with the sum."""
    if delta is None:
        return x, rms_norm(x, weight, eps)
    normed: Tensor = torch.ops.weft_cpu.add_rms_norm_.default(x, delta, weight, eps)
    return x, normed


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
    """Compute ``torch_ops.qkv_rope_cache`` in one pass. cos, sin: float32; head size at most 512."""
    result: Tensor = torch.ops.weft_cpu.qkv_rope_cache.default(
        qkv, heads, kv_heads, q_weight, k_weight, eps, cos, sin, cache, writes
    )
    return result


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
    """Compute ``kv_fp8.qkv_rope_cache_fp8``, in one pass if the head size is a multiple of 16.

    Writes ``cache`` and ``scales``, returns the queries. cos, sin: float32.
    """
    if cache.shape[4] % 16:
        return kv_fp8.qkv_rope_cache_fp8(
            qkv, heads, kv_heads, q_weight, k_weight, eps, cos, sin, cache, scales, writes
        )
    result: Tensor = torch.ops.weft_cpu.qkv_rope_cache.default(
        qkv, heads, kv_heads, q_weight, k_weight, eps, cos, sin, cache, writes, scales
    )
    return result


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Return ``activation(gate) * up`` for gate_up [..., 2 n]: [..., n]. KeyError: unknown activation."""
    result: Tensor = torch.ops.weft_cpu.gated.default(gate_up, ACTIVATIONS[activation])
    return result


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return ``x * sigmoid(gate)``, both [T, n], in x's dtype. Both may be columns of a wider tensor."""
    result: Tensor = torch.ops.weft_cpu.sigmoid_gate.default(x, gate)
    return result


for _op in (rms_norm, add_rms_norm, qkv_rope_cache, qkv_rope_cache_fp8, gated, sigmoid_gate):
    serve(_op.__name__, _op)
