"""Mamba2: a recurrent layer in place of attention. Projections run on merged rows, the core per segment.

Source: Dao and Gu 2024, arXiv 2405.21060.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import nn

from weft.attention.base import LayerCache
from weft.attention.gqa.gqa import AttentionInput
from weft.attention.mamba.mamba_backend import Finish, MambaBackend, MambaInput, MambaWeights
from weft.attention.recurrent import silu
from weft.config.spec import ModelSpec
from weft.layers.build import Build, Packs
from weft.layers.dense import Linear, RowLinear
from weft.layers.shard import joined
from weft.parallel.comm import Pending, reduced

Tensor = torch.Tensor


class Mamba(Packs):
    """Layer of Mamba2. Returns a partial sum, to be reduced over the ranks.

    zxbcdt      [z heads | x heads | B groups | C groups | time steps, hidden]
    conv        [x, B and C channels, 1, taps], the tap of the oldest input first; None after ``pack``
    conv_bias   [x, B and C channels]
    log_rate, step_bias, skip    [heads]
    norm        [heads * dim]
    out         [hidden, heads * dim]
    """

    adapted = ("zxbcdt", "out")

    def __init__(self, spec: ModelSpec, layer: int, build: Build) -> None:
        super().__init__()
        mamba = spec.mamba
        assert mamba is not None
        assert layer in mamba.layers
        heads = build.part(mamba.heads)
        groups = build.kv_part(mamba.groups)
        inner = heads.times(mamba.dim)
        shared = groups.times(mamba.state)
        self._mamba = mamba
        self._kind = spec.cache_of(layer)
        self._inner = inner.count
        self._groups = groups.count
        self._eps = spec.norm_eps
        self._wide = build.wide
        self._comm = build.comm
        self.zxbcdt = Linear(spec.hidden, joined(inner, inner, shared, shared, heads), build, bias=mamba.bias)
        channels = joined(inner, shared, shared)
        self.conv: nn.Parameter | None = build.weight(
            channels.count, 1, mamba.conv, shard=channels, wide=True
        )
        self.conv_bias = build.weight(channels.count, shard=channels, wide=True) if mamba.conv_bias else None
        self.log_rate = build.weight(heads.count, shard=heads, wide=True)
        self.step_bias = build.weight(heads.count, shard=heads, wide=True)
        self.skip = build.weight(heads.count, shard=heads, wide=True)
        self.norm = None if mamba.norm == "none" else build.weight(inner.count, shard=inner, wide=True)
        self.out = RowLinear(inner, spec.hidden, build, bias=mamba.bias)
        # A norm over the channels of several ranks needs a sum over the ranks.
        self._sums = mamba.norm != "none" and mamba.norm_groups < build.comm.size
        self._weights: MambaWeights | None = None

    def pack(self) -> None:
        """Compute the weights in the form of the backend, and drop ``conv``.

        Call once, before ``steps``.
        """
        assert self.conv is not None
        mamba = self._mamba
        finish: Finish = "later" if self._sums else mamba.norm
        self._weights = MambaWeights(
            groups=self._groups,
            taps=self.conv.data[:, 0].T.contiguous(),
            conv_bias=None if self.conv_bias is None else self.conv_bias.data,
            rate=self.log_rate.data.exp(),
            step_bias=self.step_bias.data,
            skip=self.skip.data,
            low=mamba.low,
            high=mamba.high,
            finish=finish,
            norm=None if self._sums or self.norm is None else self.norm.data,
            norm_groups=max(mamba.norm_groups // self._comm.size, 1),
            eps=self._eps,
        )
        self.conv = None

    def steps(
        self, x: Tensor, shared: AttentionInput, caches: LayerCache, logits_indices: Tensor | None = None
    ) -> Generator[Pending, None, Tensor]:
        """Return [T or L, hidden] for x [T, hidden]. Advances the states of the layer in ``caches``.

        Yields once if the norm covers channels of several ranks. logits_indices: rows to return (None: all).
        """
        backend = shared.backends["mamba"]
        assert isinstance(backend, MambaBackend)
        assert self._weights is not None, "not packed"
        step = shared.step
        zxbcdt = self.zxbcdt(x, shared.step.adapters)
        out = zxbcdt.new_empty(x.shape[0], self._inner, dtype=self._wide if self._sums else x.dtype)
        # Only decode rows may be cut back to an earlier token (rejected drafts), so only decode rows store a
        # state per token.
        for segment, prepared, each in zip(step.segments, step.prepared, (False, True), strict=True):
            if not segment.tokens:
                continue
            rows = slice(segment.begin, segment.begin + segment.tokens)
            backend.run(
                zxbcdt[rows],
                out[rows],
                MambaInput(segment, caches[self._kind], self._weights, each, prepared[self._kind]),
            )
        z = zxbcdt[:, : self._inner]
        if logits_indices is not None:
            out, z = out[logits_indices], z[logits_indices]
        if self._sums:
            out = yield from self._normed(out, z.to(self._wide), backend)
        result: Tensor = self.out(out.to(x.dtype), shared.step.adapters_at(logits_indices))
        return result

    def _normed(self, y: Tensor, z: Tensor, backend: MambaBackend) -> Generator[Pending, None, Tensor]:
        """Return norm and gate of y [T, channels of this rank], with one norm over the channels of all
        ranks.
        """
        assert self.norm is not None
        gated = self._mamba.norm == "gated"
        y = y * silu(z) if gated else y
        total = yield from reduced(self._comm, backend.sum(y.square(), 1))
        mean = total / (self._mamba.heads * self._mamba.dim)
        y = y * torch.rsqrt(mean + self._eps) * self.norm
        return y if gated else y * silu(z)
