"""The reference implementation of every op, in torch, for CPU and CUDA.

Nothing is downcast on the way: float64 stays float64, everything narrower than float32 is computed in
float32 where sums or exponentials are taken, and rounded once at the end. Importing registers the ops.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from weft.ops.registry import Implementation, register

Tensor = torch.Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums and exponentials of ``dtype`` are computed in: float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim, in x's dtype. x: [..., n], weight: [n].

    Source: Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    y = x.to(wide(x.dtype))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight.to(y.dtype)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, dim] by cos, sin [T, dim / 2] (wide); i is paired with i + dim / 2.

    Source: Su et al. 2021, arXiv 2104.09864; halves instead of neighbours, as published checkpoints have it.
    """
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up`` of gate_up [..., 2 n], the two halves; [..., n] in the same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate) * up


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The ``top_k`` experts of each token: (ids int64 [T, k], weights [T, k] in the logits' wide dtype).

    Weights are the softmax over all experts, scaled to sum to 1 if ``renormalize``. Order: logit descending,
    then id ascending, so that ties go to the lowest id.
    """
    logits = logits.to(wide(logits.dtype))
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = torch.softmax(logits, dim=-1).gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights


def experts(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Each token through each of its experts: [T, k, hidden], in x's dtype.

    x: [T, hidden]; ids: int64 [T, k]; gate_up: [E, 2 n, hidden]; down: [E, hidden, n]. Tokens are grouped by
    expert, so the host learns the group sizes: one synchronisation a call on a GPU.
    """
    tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    sizes = torch.bincount(flat, minlength=gate_up.shape[0]).tolist()
    grouped = x[order // top_k]  # [T * k, hidden]
    made = torch.empty_like(grouped)
    begin = 0
    for expert, size in enumerate(sizes):
        if not size:
            continue
        rows = slice(begin, begin + size)
        made[rows] = F.linear(gated(F.linear(grouped[rows], gate_up[expert]), activation), down[expert])
        begin += size
    out = torch.empty_like(made)
    out[order] = made
    return out.view(tokens, top_k, x.shape[1])


def combine(expert_out: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over each token's experts in top-k order: [T, hidden] in expert_out's dtype.

    expert_out: [T, k, hidden]; weights: [T, k] in a wide dtype, which the sum is computed in.
    """
    total = expert_out[:, 0].to(weights.dtype) * weights[:, :1]
    for choice in range(1, weights.shape[1]):
        total = total + expert_out[:, choice].to(weights.dtype) * weights[:, choice : choice + 1]
    return total.to(expert_out.dtype)


register("linear", Implementation(name="torch", run=F.linear))
# Every output element of these is a function of its own row alone, computed in one fixed order.
register("rms_norm", Implementation(name="torch", run=rms_norm, invariant=True))
register("rotate", Implementation(name="torch", run=rotate, invariant=True))
register("gated", Implementation(name="torch", run=gated, invariant=True))
register("route", Implementation(name="torch", run=route, invariant=True))
register("experts", Implementation(name="torch", run=experts))
register("combine", Implementation(name="torch", run=combine, invariant=True))
