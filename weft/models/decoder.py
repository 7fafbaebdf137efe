"""The frame of a decoder-only model: embedding, blocks, norm, head. Families fill the blocks.

Only ``Block.steps`` and ``Decoder.steps`` yield, once for each collective; on one rank they yield nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from torch import nn

from weft.attention.base import Backends, LayerCache, StepInput
from weft.attention.gqa import AttentionInput
from weft.config.spec import ModelSpec
from weft.layers.build import Build, Layer
from weft.layers.linear import Embedding, Head
from weft.layers.norm import RMSNorm
from weft.layers.rope import Rope
from weft.models.base import Model
from weft.parallel.comm import Pending, reduced

Tensor = torch.Tensor


class Block(nn.Module):
    """Attention and feed-forward, each on a normalized copy of the residual stream (pre-norm).

    What a layer adds to the stream is added where the stream is normalized next: one pass over memory.
    """

    def __init__(self, spec: ModelSpec, build: Build, attention: Layer, feed_forward: Layer) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_eps, build, wide=spec.centred_norms)
        self.attention = attention
        self.feed_forward_norm = RMSNorm(spec.hidden, spec.norm_eps, build, wide=spec.centred_norms)
        self.feed_forward = feed_forward
        self._comm = build.comm

    def steps(
        self,
        x: Tensor,
        delta: Tensor | None,
        shared: AttentionInput,
        caches: LayerCache,
        keep: Tensor | None = None,
    ) -> Generator[Pending, None, tuple[Tensor, Tensor]]:
        """x: [T, hidden], the stream, may be overwritten; delta: [T, hidden] still to be added to it.

        Writes this layer's caches. Returns stream and delta of the rows ``keep`` (int64 [L]), or of all.
        """
        x, normed = self.attention_norm.add(x, delta)
        partial = self.attention(normed, shared, caches, keep)
        if keep is not None:
            x = x[keep]
        delta = yield from reduced(self._comm, partial)
        x, normed = self.feed_forward_norm.add(x, delta)
        ids = None
        if self.feed_forward.reads_ids:
            ids = shared.step.ids if keep is None else shared.step.ids[keep]
        delta = yield from reduced(self._comm, self.feed_forward(normed, ids))
        return x, delta


class Decoder(Model):
    """Embedding, blocks, norm, head."""

    def __init__(
        self, spec: ModelSpec, build: Build, make_block: Callable[[ModelSpec, int, Build], Block]
    ) -> None:
        super().__init__(spec, build)
        self.embedding = Embedding(spec.vocab_size, spec.hidden, build, tied=spec.tied)
        self.blocks = nn.ModuleList(make_block(spec, layer, build) for layer in range(spec.layers))
        self.norm = RMSNorm(spec.hidden, spec.norm_eps, build, wide=spec.centred_norms)
        self.head = Head(self.embedding, build, tied=spec.tied)
        self._rope = Rope(spec.rope, build)

    def steps(
        self, step: StepInput, kv: Sequence[LayerCache], backends: Backends
    ) -> Generator[Pending, None, Tensor]:
        shared = AttentionInput(step=step, angles=self._rope.angles(step.positions), backends=backends)
        x, delta = self.embedding(step.ids), None
        last = len(self.blocks) - 1
        for layer, (block, caches) in enumerate(zip(self.blocks, kv, strict=True)):
            assert isinstance(block, Block)
            # After the last layer's keys and values nothing is needed but the rows whose logits are wanted.
            keep = step.logits_index if layer == last else None
            x, delta = yield from block.steps(x, delta, shared, caches, keep)
        return self.head(self.norm.add(x, delta)[1])
