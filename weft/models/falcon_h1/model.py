"""Falcon-H1: Mamba2 and attention side by side on one normalized copy of the stream, then a feed-forward."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import nn

from weft.attention.base import LayerCache
from weft.attention.gqa.declared import TraitInput
from weft.attention.gqa.gqa import Attention, AttentionInput
from weft.attention.mamba.mamba import Mamba
from weft.attention.recurrent import silu
from weft.config.spec import ModelSpec
from weft.layers.build import Build, FeedForward
from weft.layers.dense import Linear, RMSNorm, RowLinear
from weft.layers.shard import joined
from weft.models.decoder import Block
from weft.ops.low_rank import AdapterRows
from weft.ops.moe import Contribution
from weft.ops.torch_ops import wide
from weft.parallel.comm import Pending, reduced

Tensor = torch.Tensor


class KeyScaledAttention(Attention):
    """Grouped-query attention with a factor of the keys, before the rotation."""

    def __init__(self, spec: ModelSpec, layer: int, build: Build) -> None:
        super().__init__(spec, layer, build)
        assert spec.parallel is not None
        self._key = spec.parallel.key

    def forward(
        self, x: Tensor, shared: AttentionInput, caches: LayerCache, logits_indices: Tensor | None = None
    ) -> Tensor:
        """See ``Attention.forward``."""
        made = self.qkv(x, shared.step.adapters)
        if self._key != 1:
            begin = self._heads * self._dim
            made[:, begin : begin + self._kv_heads * self._dim].mul_(self._key)
        q = self._rotate_and_cache(
            made,
            self._heads,
            self._kv_heads,
            None,
            None,
            self._eps,
            *shared.angles,
            *caches[self._kind],
            shared.step.writes[self._kind],
        )
        return self._attended(q, made, shared, caches, logits_indices)


class ScaledMLP(FeedForward):
    """``down(silu(factor * gate(x)) * up(x)) * factor``, a partial result."""

    adapted = ("gate_up", "down")

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        assert spec.parallel is not None
        inner = build.part(spec.intermediate)
        self.gate_up = Linear(spec.hidden, joined(inner, inner), build, bias=spec.mlp_bias)
        self.down = RowLinear(inner, spec.hidden, build, bias=spec.mlp_bias)
        self._gate, self._down = spec.parallel.gate, spec.parallel.down

    def forward(self, x: Tensor, ids: Tensor | None = None, adapters: AdapterRows | None = None) -> Tensor:
        """Return the partial result for x [T, hidden]. ``ids`` are not read."""
        gate, up = self.gate_up(x, adapters).to(wide(x.dtype)).chunk(2, dim=1)
        made = (silu(gate * self._gate) * up).to(x.dtype)
        partial: Tensor = self.down(made, adapters)
        return partial if self._down == 1 else partial * self._down


class ParallelBlock(Block):
    """Attention and Mamba2 of one layer read the same rows; one sum over the ranks adds both."""

    def __init__(self, spec: ModelSpec, layer: int, build: Build) -> None:
        nn.Module.__init__(self)
        assert spec.parallel is not None
        self._factors = spec.parallel
        self._states = spec.layers + layer
        self._comm = build.comm
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_eps, build)
        self.attention = KeyScaledAttention(spec, layer, build)
        self.mamba = Mamba(spec, self._states, build)
        self.feed_forward_norm = RMSNorm(spec.hidden, spec.norm_eps, build)
        self.feed_forward = ScaledMLP(spec, build)

    def steps(
        self,
        x: Tensor,
        delta: Contribution | None,
        shared: AttentionInput,
        caches: LayerCache,
        logits_indices: Tensor | None = None,
    ) -> Generator[Pending, None, tuple[Tensor, Contribution | None]]:
        """Run the block; see ``Block.steps``."""
        assert isinstance(shared, TraitInput)
        factors = self._factors
        x, normed = self.attention_norm.add(x, delta)
        states = shared.kv[self._states]
        mixed = yield from self.mamba.steps(normed, shared, states, logits_indices)
        rows = normed if factors.attention_in == 1 else normed * factors.attention_in
        attended = self.attention(rows, shared, caches, logits_indices)
        if logits_indices is not None:
            x = x[logits_indices]
        partial = mixed * factors.mamba_out + attended * factors.attention_out
        delta = yield from reduced(self._comm, partial)
        x, normed = self.feed_forward_norm.add(x, delta)
        adapters = shared.step.adapters_at(logits_indices)
        step = shared.step
        made = yield from self.feed_forward.steps(
            self._comm, normed, None, step.exchange, adapters, step.routes
        )
        return x, made


def make_block(spec: ModelSpec, layer: int, build: Build) -> Block:
    """Build layer ``layer`` with unset weights."""
    return ParallelBlock(spec, layer, build)
