"""Attention with grouped queries: projections on merged rows, core attention per segment.

Source: Vaswani et al. 2017, arXiv 1706.03762; Ainslie et al. 2023, arXiv 2305.13245.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from weft.attention.base import AttentionBackend, StepInput
from weft.config.spec import CacheSpec, ModelSpec
from weft.layers.build import Build
from weft.layers.linear import Linear, RowLinear
from weft.layers.norm import RMSNorm
from weft.ops.registry import choose

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInput:
    """What every layer of a step shares."""

    step: StepInput
    angles: tuple[Tensor, Tensor]
    """cos and sin of the step's positions."""
    backend: AttentionBackend
    prepared: tuple[tuple[object, ...], ...]
    """For each segment and cache kind, what the backend prepared."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; returns a partial.

    ``qkv`` holds the three input matrices, [(heads + 2 * kv_heads) * head_dim, hidden].
    """

    def __init__(self, spec: ModelSpec, layer: int, build: Build) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._dim = spec.heads, spec.kv_heads, spec.head_dim
        self._kind = spec.cache_of(layer)
        self._cache_spec: CacheSpec = spec.caches[self._kind]
        rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self.qkv = Linear(spec.hidden, rows, build, bias=spec.qkv_bias)
        self.out = RowLinear(spec.heads * spec.head_dim, spec.hidden, build, bias=spec.o_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, build) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, build) if spec.qk_norm else None
        self._rotate = choose("rotate", build.dtype, build.device)

    def forward(self, x: Tensor, shared: AttentionInput, cache: Tensor) -> Tensor:
        """x: [T, hidden]; cache: this layer's, written and read."""
        heads, kv_heads, dim = self._heads, self._kv_heads, self._dim
        rows = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, dim)
        q, k, v = rows.split((heads, kv_heads, kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self._rotate(q, *shared.angles), self._rotate(k, *shared.angles)
        return self.out(self._core(q, k, v, shared, cache).reshape(x.shape[0], heads * dim))

    def _core(self, q: Tensor, k: Tensor, v: Tensor, shared: AttentionInput, cache: Tensor) -> Tensor:
        parts = []
        for segment, prepared in zip(shared.step.segments, shared.prepared, strict=True):
            rows = slice(segment.begin, segment.begin + segment.tokens)
            parts.append(
                shared.backend.attend(
                    q[rows],
                    k[rows],
                    v[rows],
                    cache,
                    segment,
                    self._kind,
                    self._cache_spec,
                    self._dim**-0.5,
                    prepared[self._kind],
                )
            )
        return torch.cat(parts)
