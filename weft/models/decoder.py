"""The frame of a decoder-only model: embedding, blocks, norm, head. Families fill the blocks.

Only ``Block.steps`` and ``Decoder.steps`` yield, once for each collective; on one rank they yield nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from torch import nn

from weft.attention.base import AttentionBackend, StepInput
from weft.attention.gqa import AttentionInput
from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.layers.linear import Embedding, Head
from weft.layers.norm import RMSNorm
from weft.layers.rope import Rope
from weft.models.base import Model
from weft.parallel.comm import Pending, reduced

Tensor = torch.Tensor


class Block(nn.Module):
    """Attention and feed-forward, each on a normalized copy of the residual stream (pre-norm)."""

    def __init__(self, spec: ModelSpec, build: Build, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_eps, build)
        self.attention = attention
        self.feed_forward_norm = RMSNorm(spec.hidden, spec.norm_eps, build)
        self.feed_forward = feed_forward
        self._comm = build.comm

    def steps(self, x: Tensor, shared: AttentionInput, cache: Tensor) -> Generator[Pending, None, Tensor]:
        """x: [T, hidden]; writes this layer's cache; returns [T, hidden]."""
        partial = self.attention(self.attention_norm(x), shared, cache)
        x = x + (yield from reduced(self._comm, partial))
        partial = self.feed_forward(self.feed_forward_norm(x))
        return x + (yield from reduced(self._comm, partial))


class Decoder(Model):
    """Embedding, blocks, norm, head."""

    def __init__(
        self, spec: ModelSpec, build: Build, make_block: Callable[[ModelSpec, int, Build], Block]
    ) -> None:
        super().__init__(spec, build)
        self.embedding = Embedding(spec.vocab_size, spec.hidden, build)
        self.blocks = nn.ModuleList(make_block(spec, layer, build) for layer in range(spec.layers))
        self.norm = RMSNorm(spec.hidden, spec.norm_eps, build)
        self.head = Head(self.embedding, build, tied=spec.tied)
        self._rope = Rope(spec.rope, build)

    def steps(
        self, step: StepInput, kv: Sequence[Tensor], backend: AttentionBackend
    ) -> Generator[Pending, None, Tensor]:
        shared = self._share(step, kv, backend)
        x = self.embedding(step.ids)
        for block, cache in zip(self.blocks, kv, strict=True):
            assert isinstance(block, Block)
            x = yield from block.steps(x, shared, cache)
        return self.head(self.norm(x[step.logits_index]))

    def _share(self, step: StepInput, kv: Sequence[Tensor], backend: AttentionBackend) -> AttentionInput:
        kinds = [(cache, kv[cache.layers[0]].shape[3]) for cache in self.spec.caches]
        return AttentionInput(
            step=step,
            angles=self._rope.angles(step.positions),
            backend=backend,
            prepared=tuple(
                tuple(
                    backend.prepare(segment, kind, cache, block_size, self.dtype)
                    for kind, (cache, block_size) in enumerate(kinds)
                )
                for segment in step.segments
            ),
        )
