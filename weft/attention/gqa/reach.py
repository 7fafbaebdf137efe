"""The positions that a query reads, and the cap of scores: shared by the backends on torch."""

from __future__ import annotations

import torch

from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops.torch_ops import wide

Tensor = torch.Tensor


def first_read(positions: Tensor, spec: CacheSpec) -> Tensor:
    """Return the first position that a query at each of ``positions`` (int64, any shape) reads."""
    if spec.kind == "chunk":
        return positions - positions % spec.window
    if spec.window:
        return (positions - spec.window + 1).clamp(min=0)
    return torch.zeros_like(positions)


def kernel_window(spec: CacheSpec) -> int:
    """Return the window as kernels take it: 0 for none, negative for the size of chunks."""
    return -spec.window if spec.kind == "chunk" else spec.window


def refuse_traits(name: str, cache: CacheSpec, spec: ModelSpec) -> None:
    """Raise ConfigError for chunks, or for capped scores. For backends without them."""
    trait = "attention in chunks" if cache.kind == "chunk" else ""
    trait = trait or ("capped attention scores" if spec.scales.attention_softcap else "")
    if trait:
        raise ConfigError(
            f"attention backend {name!r} has no {trait}: choose another --attention-backend",
            param="--attention-backend",
        )


def cap_(scores: Tensor, cap: float) -> Tensor:
    """Return ``cap * tanh(scores / cap)``, in place. Equal scores get equal bits, at any place.

    torch computes tanh in two ways, by the place of an element, and exp in one way.
    """
    grown = scores.mul_(2 / cap).exp_().add_(1)
    return grown.reciprocal_().mul_(-2 * cap).add_(cap)


def capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    """Attend q [.., queries, dim] to k and v [.., keys, dim] with capped scores; return the shape of q.

    mask: bool, True for visible keys, or scores to add behind the cap. A query without visible keys gets 0.
    """
    dtype = wide(q.dtype)
    scores = torch.tanh(q.to(dtype) @ k.to(dtype).transpose(-2, -1) * (scale / cap)) * cap
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    else:
        scores = scores + mask.to(dtype)
    top = scores.amax(dim=-1, keepdim=True)
    weights = (scores - top.masked_fill(top == float("-inf"), 0)).exp()
    total = weights.sum(dim=-1, keepdim=True)
    made = (weights / total.masked_fill(total == 0, 1)) @ v.to(dtype)
    return made.to(q.dtype)
