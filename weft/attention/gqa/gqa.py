"""Attention with grouped queries: projections on merged rows, core attention per segment.

Source: Vaswani et al. 2017, arXiv 1706.03762; Ainslie et al. 2023, arXiv 2305.13245.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.attention.base import AttentionBackend, Backends, CoreInput, LayerCache, StepInput
from weft.config.spec import CacheSpec, ModelSpec
from weft.layers.build import Build, Layer
from weft.layers.dense import Linear, RMSNorm, RowLinear
from weft.layers.shard import joined

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInput:
    """Attention input shared by all layers of a step."""

    step: StepInput
    angles: tuple[Tensor, Tensor]
    """cos and sin of the positions of the step."""
    backends: Backends


class Attention(Layer):
    """Grouped-query attention with rotary positions. Returns a partial sum, to be reduced over the ranks.

    ``qkv`` contains the input matrices, [(heads + 2 * kv_heads) * head_dim, hidden]. With ``output_gate``,
    the matrix of the gate comes first, [heads * head_dim, hidden].
    """

    adapted = ("qkv", "out")

    def __init__(
        self, spec: ModelSpec, layer: int, build: Build, *, kv_parts: int = 2, inputs: int = 0
    ) -> None:
        """``kv_parts``: matrices of keys and values in ``qkv``, for subclasses: 2, 1 (keys) or 0. ``inputs``:
        elements of the input; 0 for the hidden size."""
        super().__init__()
        self._kind = spec.cache_of(layer)
        cache = spec.caches[self._kind]
        heads = build.part(spec.heads)
        kv_heads = build.kv_part(cache.kv_heads)
        self._heads = heads.count
        self._kv_heads = kv_heads.count
        self._dim = cache.head_dim
        self._scale = spec.scales.attention or cache.head_dim**-0.5
        self._softcap = spec.scales.attention_softcap
        self._cache_spec: CacheSpec = build.local(spec).caches[self._kind]
        q = heads.times(cache.head_dim)
        kv = kv_heads.times(cache.head_dim)
        self._gate = q.count if spec.output_gate else 0
        outputs = joined(*([q] if spec.output_gate else []), q, *[kv] * kv_parts)
        self.qkv = Linear(inputs or spec.hidden, outputs, build, bias=spec.qkv_bias)
        self.out = RowLinear(q, spec.hidden, build, bias=spec.o_bias)
        self.q_norm = self.k_norm = None
        if spec.qk_norm and spec.attention.norm == "head":
            self.q_norm = RMSNorm(cache.head_dim, spec.norm_eps, build, wide=spec.centred_norms)
            self.k_norm = RMSNorm(cache.head_dim, spec.norm_eps, build, wide=spec.centred_norms)
        self.sinks = build.weight(heads.count, shard=heads) if spec.sinks else None
        self._eps = spec.norm_eps
        fp8 = self._cache_spec.fp8
        self._rotate_and_cache = build.op("qkv_rope_cache_fp8" if fp8 else "qkv_rope_cache").run
        self._weigh = build.op("sigmoid_gate").run if spec.output_gate else None

    def forward(
        self, x: Tensor, shared: AttentionInput, caches: LayerCache, logits_indices: Tensor | None = None
    ) -> Tensor:
        """Return [T or L, hidden] for x [T, hidden]. Writes the entries of the step into ``caches`` before
        reading.

        logits_indices: rows to return (None: all).
        """
        made = self.qkv(x, shared.step.adapters)
        q = self._rotate_and_cache(
            made[:, self._gate :] if self._gate else made,
            self._heads,
            self._kv_heads,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self._eps,
            *shared.angles,
            *caches[self._kind],
            shared.step.writes[self._kind],
        )
        return self._attended(q, made, shared, caches, logits_indices)

    def _attended(
        self,
        q: Tensor,
        made: Tensor,
        shared: AttentionInput,
        caches: LayerCache,
        logits_indices: Tensor | None,
    ) -> Tensor:
        """Return the partial sum of ``forward`` for rotated queries q [T, heads, head_dim].

        The caches have the entries of the step. ``made``: result of ``qkv``.
        """
        step = shared.step
        backend = shared.backends["gqa"]
        assert isinstance(backend, AttentionBackend)
        if logits_indices is not None and not len(logits_indices):  # only the cache entries were needed
            return self.out(q.new_empty(0, self._heads * self._dim))
        out = torch.empty_like(q)
        for segment, prepared in zip(step.segments, step.prepared, strict=True):
            if not segment.tokens:
                continue
            alone = segment.tokens == len(q)
            rows = slice(segment.begin, segment.begin + segment.tokens)
            # [tokens of the segment, heads, head_dim]; a slice only if both segments have tokens
            backend.attend(
                q if alone else q[rows],
                out if alone else out[rows],
                CoreInput(segment, caches, self._scale, prepared[self._kind], self.sinks, self._softcap),
                self._kind,
                self._cache_spec,
            )
        out = out.view(len(q), self._heads * self._dim)
        if logits_indices is not None:
            out = out[logits_indices]
            made = made[logits_indices]
        if self._weigh is not None:
            out = self._weigh(out, made[:, : self._gate])
        return self.out(out, step.adapters_at(logits_indices))
