"""Mamba 1: a recurrent layer in place of attention. Projections run on merged rows, the core per segment.

Source: Gu and Dao 2023, arXiv 2312.00752. Norms of B, C and the time step vector: arXiv 2403.19887.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import nn

from weft.attention.base import LayerCache
from weft.attention.gqa.gqa import AttentionInput
from weft.attention.mamba1.mamba1_backend import Mamba1Backend, Mamba1Input, Mamba1Weights, Selected
from weft.config.spec import ModelSpec
from weft.layers.build import Build, Layer, Packs
from weft.layers.dense import Linear, RMSNorm, RowLinear
from weft.layers.shard import joined
from weft.parallel.comm import Pending, reduced

Tensor = torch.Tensor


class UnitNorm(Layer):
    """RMS norm without weights over the last dim, of ``size``. Keeps x's dtype."""

    def __init__(self, size: int, eps: float, build: Build) -> None:
        super().__init__()
        self._ones = torch.ones(size, dtype=build.dtype, device=build.device)
        self._eps = eps
        self._norm = build.op("rms_norm").run

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self._norm(x, self._ones, self._eps)
        return result


class Mamba1(Packs):
    """Layer of Mamba 1. Returns a partial sum, to be reduced over the ranks.

    xz          [x channels | z channels, hidden]
    conv        [channels, 1, taps], the tap of the oldest input first; None after ``pack``
    conv_bias   [channels]
    select      [time step vector | B | C, channels]
    step        [channels, time step vector]
    step_bias, skip    [channels]
    log_rate    [channels, state]; None after ``pack``
    out         [hidden, channels]
    """

    adapted = ("xz", "select", "out")

    def __init__(self, spec: ModelSpec, layer: int, build: Build) -> None:
        super().__init__()
        mamba = spec.mamba1
        assert mamba is not None
        assert layer in mamba.layers
        heads = build.part(mamba.heads)
        channels = heads.times(mamba.dim)
        self._kind = spec.cache_of(layer)
        self._channels = channels.count
        self._shape = (heads.count, mamba.dim)
        self._sizes = (mamba.rank, mamba.state, mamba.state)
        self._comm = build.comm
        self.xz = Linear(spec.hidden, joined(channels, channels), build, bias=mamba.bias)
        self.conv: nn.Parameter | None = build.weight(
            channels.count, 1, mamba.conv, shard=channels, wide=True
        )
        self.conv_bias = build.weight(channels.count, shard=channels, wide=True) if mamba.conv_bias else None
        self.select = RowLinear(channels, mamba.selected, build)
        self.norms: nn.ModuleList | None = None
        if mamba.norm != "none":
            kind = UnitNorm if mamba.norm == "unit" else RMSNorm
            self.norms = nn.ModuleList([kind(size, mamba.norm_eps, build) for size in self._sizes])
        self.step = Linear(mamba.rank, channels, build)
        self.step_bias = build.weight(channels.count, shard=channels, wide=True)
        self.skip = build.weight(channels.count, shard=channels, wide=True)
        self.log_rate: nn.Parameter | None = build.weight(
            channels.count, mamba.state, shard=channels, wide=True
        )
        self.out = RowLinear(channels, spec.hidden, build, bias=mamba.bias)
        self._weights: Mamba1Weights | None = None

    def pack(self) -> None:
        """Compute the weights in the form of the backend, and drop ``conv`` and ``log_rate``.

        Call once, before ``steps``.
        """
        assert self.conv is not None
        assert self.log_rate is not None
        rate = self.log_rate.data.exp().unflatten(0, self._shape)  # [heads, dim, state]
        self._weights = Mamba1Weights(
            taps=self.conv.data[:, 0].T.contiguous(),
            conv_bias=None if self.conv_bias is None else self.conv_bias.data,
            rate=rate.transpose(1, 2).contiguous(),
            step_bias=self.step_bias.data,
            skip=self.skip.data,
        )
        self.conv = self.log_rate = None

    def steps(
        self, x: Tensor, shared: AttentionInput, caches: LayerCache, logits_indices: Tensor | None = None
    ) -> Generator[Pending, None, Tensor]:
        """Return [T or L, hidden] for x [T, hidden]. Advances the states of the layer in ``caches``.

        Yields once on several ranks: B, C and the time step vector are sums over the channels of all ranks.
        logits_indices: rows to return (None: all).
        """
        backend = shared.backends["mamba1"]
        assert isinstance(backend, Mamba1Backend)
        step = shared.step
        segments = self._segments(shared, caches)
        xz = self.xz(x, step.adapters)
        x, z = xz.split(self._channels, dim=1)
        convolved = torch.empty_like(x, memory_format=torch.contiguous_format)
        for rows, given in segments:
            backend.convolve(x[rows], convolved[rows], given)
        selected = yield from reduced(self._comm, self.select(convolved, step.adapters))
        low, b, c = (part.contiguous() for part in selected.split(self._sizes, dim=1))
        if self.norms is not None:
            low, b, c = (norm(part) for norm, part in zip(self.norms, (low, b, c), strict=True))
        inputs = Selected(convolved, self.step(low), b, c, z)
        out = torch.empty_like(convolved)
        for rows, given in segments:
            backend.scan(Selected(*(part[rows] for part in inputs)), out[rows], given)
        wanted = out if logits_indices is None else out[logits_indices]
        result: Tensor = self.out(wanted, step.adapters_at(logits_indices))
        return result

    def _segments(self, shared: AttentionInput, caches: LayerCache) -> list[tuple[slice, Mamba1Input]]:
        """Return (rows of the step, input of the backend) for each segment with tokens."""
        assert self._weights is not None, "not packed"
        step = shared.step
        found = []
        # Only decode rows may be cut back to an earlier token (rejected drafts), so only decode rows store a
        # state per token.
        for segment, prepared, each in zip(step.segments, step.prepared, (False, True), strict=True):
            if segment.tokens:
                rows = slice(segment.begin, segment.begin + segment.tokens)
                state, ready = caches[self._kind], prepared[self._kind]
                found.append((rows, Mamba1Input(segment, state, self._weights, each, ready)))
        return found
