"""Gated short convolution: a layer with a small state in place of attention. Projections run on merged rows,
the core per segment.

Source: LFM2, arXiv 2511.23404, section 2.
"""

from __future__ import annotations

import torch
from torch import nn

from weft.attention.base import LayerCache
from weft.attention.conv.conv_backend import ConvBackend, ConvInput, ConvWeights
from weft.attention.gqa.gqa import AttentionInput
from weft.config.spec import ModelSpec
from weft.layers.build import Build, Packs
from weft.layers.dense import Linear, RowLinear
from weft.layers.shard import joined

Tensor = torch.Tensor


class ShortConv(Packs):
    """Layer of a gated short convolution. Returns a partial sum, to be reduced over the ranks.

    bcx         [B | C | x, hidden], each of all channels
    conv        [channels, 1, taps], the tap of the oldest input first; None after ``pack``
    conv_bias   [channels]
    out         [hidden, channels]
    """

    adapted = ("bcx", "out")

    def __init__(self, spec: ModelSpec, layer: int, build: Build) -> None:
        super().__init__()
        conv = spec.conv
        assert conv is not None
        assert layer in conv.layers
        channels = build.part(conv.heads).times(conv.dim)
        self._kind = spec.cache_of(layer)
        self._channels = channels.count
        self.bcx = Linear(spec.hidden, joined(channels, channels, channels), build, bias=conv.bias)
        self.conv: nn.Parameter | None = build.weight(channels.count, 1, conv.taps, shard=channels, wide=True)
        self.conv_bias = build.weight(channels.count, shard=channels, wide=True) if conv.bias else None
        self.out = RowLinear(channels, spec.hidden, build, bias=conv.bias)
        self._weights: ConvWeights | None = None

    def pack(self) -> None:
        """Compute the weights in the form of the backend, and drop ``conv``.

        Call once, before ``forward``.
        """
        assert self.conv is not None
        self._weights = ConvWeights(
            taps=self.conv.data[:, 0].T.contiguous(),
            bias=None if self.conv_bias is None else self.conv_bias.data,
        )
        self.conv = None

    def forward(
        self, x: Tensor, shared: AttentionInput, caches: LayerCache, logits_indices: Tensor | None = None
    ) -> Tensor:
        """Return [T or L, hidden] for x [T, hidden]. Advances the states of the layer in ``caches``.

        logits_indices: rows to return (None: all).
        """
        backend = shared.backends["conv"]
        assert isinstance(backend, ConvBackend)
        assert self._weights is not None, "not packed"
        step = shared.step
        bcx = self.bcx(x, shared.step.adapters)
        out = bcx.new_empty(x.shape[0], self._channels)
        # Only decode rows may be cut back to an earlier token (rejected drafts), so only decode rows store a
        # state per token.
        for segment, prepared, each in zip(step.segments, step.prepared, (False, True), strict=True):
            if not segment.tokens:
                continue
            rows = slice(segment.begin, segment.begin + segment.tokens)
            backend.run(
                bcx[rows],
                out[rows],
                ConvInput(segment, caches[self._kind], self._weights, each, prepared[self._kind]),
            )
        wanted = out if logits_indices is None else out[logits_indices]
        result: Tensor = self.out(wanted, shared.step.adapters_at(logits_indices))
        return result
