"""Blocks of models with Mamba2 or Mamba 1 layers."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import nn

from weft.attention.base import LayerCache
from weft.attention.gqa.gqa import Attention, AttentionInput
from weft.attention.mamba.mamba import Mamba
from weft.attention.mamba1.mamba1 import Mamba1
from weft.config.spec import ModelSpec
from weft.layers.build import Build, FeedForward
from weft.layers.dense import RMSNorm
from weft.models.decoder import Block
from weft.ops.moe import Contribution
from weft.parallel.comm import Pending, reduced

Tensor = torch.Tensor


class MixerBlock(Block):
    """A recurrent mixer or attention, then perhaps a feed-forward, each on a normalized copy of the
    stream.
    """

    def __init__(self, spec: ModelSpec, layer: int, build: Build, feed_forward: FeedForward | None) -> None:
        nn.Module.__init__(self)
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_eps, build)
        self.attention = _mixer(spec, layer, build)
        self._feeds = feed_forward is not None
        if feed_forward is not None:
            self.feed_forward_norm = RMSNorm(spec.hidden, spec.norm_eps, build)
            self.feed_forward = feed_forward
        self._scale = spec.scales.residual
        self._comm = build.comm

    def steps(
        self,
        x: Tensor,
        delta: Contribution | None,
        shared: AttentionInput,
        caches: LayerCache,
        logits_indices: Tensor | None = None,
    ) -> Generator[Pending, None, tuple[Tensor, Contribution | None]]:
        """Run the block; see ``Block.steps``."""
        x, normed = self.attention_norm.add(x, delta)
        if isinstance(self.attention, Mamba | Mamba1):
            partial = yield from self.attention.steps(normed, shared, caches, logits_indices)
        else:
            partial = self.attention(normed, shared, caches, logits_indices)
        if logits_indices is not None:
            x = x[logits_indices]
        delta = self._scaled((yield from reduced(self._comm, partial)))
        if not self._feeds:
            return x, delta
        x, normed = self.feed_forward_norm.add(x, delta)
        adapters = shared.step.adapters_at(logits_indices)
        step = shared.step
        delta = yield from self.feed_forward.steps(
            self._comm, normed, None, step.exchange, adapters, step.routes
        )
        return x, self._scaled(delta)

    def _scaled(self, made: Tensor) -> Tensor:
        """Return the contribution of a part to the stream, from the part's output [T, hidden]."""
        return made if self._scale == 1 else made * self._scale


def _mixer(spec: ModelSpec, layer: int, build: Build) -> Mamba | Mamba1 | Attention:
    """Build the mixer of ``layer`` with unset weights."""
    if spec.mamba is not None and layer in spec.mamba.layers:
        return Mamba(spec, layer, build)
    if spec.mamba1 is not None and layer in spec.mamba1.layers:
        return Mamba1(spec, layer, build)
    return Attention(spec, layer, build)
