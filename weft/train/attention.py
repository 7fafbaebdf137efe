"""Grouped-query attention with gradients: the engine's backend forward, differentiable torch backward."""

from __future__ import annotations

from typing import Any

import torch

from weft.attention.base import AttentionBackend, Backend, Backends, CoreInput, SegmentInput
from weft.attention.gqa.reach import first_read
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.train.masters import Masters
from weft.train.recorded import run_recorded

Tensor = torch.Tensor


class RecordedAttention(AttentionBackend):
    """Attention of another backend, with gradients for queries, cache and sinks."""

    def __init__(self, engine: AttentionBackend, masters: Masters) -> None:
        self._engine = engine
        self._masters = masters
        self.invariant = engine.invariant

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise the ConfigError of the engine's backend."""
        self._engine.check(cache, spec, block_size, dtype, device)

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> object:
        """Return the data of the engine's backend."""
        return self._engine.prepare(segment, kind, spec, block_size, dtype)

    def attend(self, q: Tensor, out: Tensor, core: CoreInput, kind: int, spec: CacheSpec) -> None:
        """Write ``out``; see ``AttentionBackend.attend``."""
        cache = core.caches[kind][0]

        def forward(q: Tensor, cache: Tensor, sinks: Tensor | None) -> Tensor:
            made = torch.empty_like(q)
            caches = {kind: (cache, *core.caches[kind][1:])}
            self._engine.attend(q, made, core._replace(caches=caches, sinks=sinks), kind, spec)
            return made

        def recompute(q: Tensor, cache: Tensor, sinks: Tensor | None) -> Tensor:
            return attended(q, cache, sinks, core, kind, spec)

        made = run_recorded(self._masters, forward, recompute, q, cache, core.sinks)
        out.copy_(made)


def attended(
    q: Tensor, cache: Tensor, sinks: Tensor | None, core: CoreInput, kind: int, spec: CacheSpec
) -> Tensor:
    """Attend the queries of a segment, [T, heads, head_dim], row by row. Every operation is differentiable.

    cache: [1 + blocks, 2, kv_heads, block, head_dim]. Returns the shape and dtype of q.
    """
    segment = core.segment
    made = []
    begin = 0
    rows = zip(segment.host_starts.tolist(), segment.host_counts.tolist(), strict=True)
    for row, (start, count) in enumerate(rows):
        length = start + count
        blocks = segment.tables[kind][row, : -(-length // cache.shape[3])]
        # [2, kv_heads, length, head_dim]
        kv = cache[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        # [kv_heads, group, count, head_dim]: the query heads of one KV head lie side by side
        own = q[begin : begin + count].unflatten(1, (spec.kv_heads, -1)).permute(1, 2, 0, 3)
        scores = (own @ kv[0].unsqueeze(1).transpose(-2, -1)) * core.scale
        if core.softcap:
            scores = torch.tanh(scores / core.softcap) * core.softcap
        positions = torch.arange(start, length, device=q.device).unsqueeze(1)
        keys = torch.arange(length, device=q.device)
        hidden = (keys > positions) | (keys < first_read(positions, spec))
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.view(spec.kv_heads, -1, 1, 1).expand(-1, -1, count, 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(dim=-1)[..., :length]
        made.append((weights @ kv[1].unsqueeze(1)).permute(2, 0, 1, 3).flatten(1, 2))
        begin += count
    return torch.cat(made)


def recorded_backends(backends: Backends, masters: Masters) -> Backends:
    """Return ``backends`` with gradients. Raises ConfigError for forms other than grouped queries."""

    def recorded(backend: Backend) -> Any:
        if not isinstance(backend, AttentionBackend):
            raise ConfigError(
                f"this model cannot be trained: attention of the form {backend.form!r} has no gradient",
                param="--model",
            )
        return RecordedAttention(backend, masters)

    return Backends(recorded(backend) for backend in backends)
