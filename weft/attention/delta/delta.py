"""Gated delta net: a recurrent layer in place of attention. Projections run on merged rows, the core per
segment.

Source: Yang et al. 2024, arXiv 2412.06464.
"""

from __future__ import annotations

import torch
from torch import nn

from weft.attention.base import LayerCache
from weft.attention.delta.delta_backend import DeltaBackend, DeltaInput, DeltaInputs, DeltaWeights
from weft.attention.gqa.gqa import AttentionInput
from weft.config.spec import DeltaSpec, ModelSpec
from weft.layers.build import Build, Packs
from weft.layers.dense import RowLinear
from weft.layers.paired import PairedLinear
from weft.layers.shard import Shard, joined
from weft.ops.low_rank import AdapterRows

Tensor = torch.Tensor


class DeltaNet(Packs):
    """Layer of a gated delta net. Returns a partial sum, to be reduced over the ranks.

    qkvz        [q heads | k heads | v heads | z heads, hidden]; value head i reads key head
                i * k_heads // v_heads
    gates       [b | a, hidden], one b per value head; one a per value head, or per key channel of each
    conv        [q, k and v channels, 1, taps], the tap of the oldest input first; None after ``pack``
    log_rate, step_bias    [v_heads]: g = -exp(log_rate) * softplus(a + step_bias). step_bias like a
    norm        [v_dim]
    out         [hidden, v heads]
    """

    adapted: tuple[str, ...] = ("qkvz", "gates", "out")

    def __init__(self, spec: ModelSpec, layer: int, build: Build) -> None:
        super().__init__()
        delta = spec.delta
        assert delta is not None
        assert layer in delta.layers
        heads = build.part(delta.v_heads)
        key = build.part(delta.k_heads).times(delta.k_dim)
        value = heads.times(delta.v_dim)
        # Kimi Delta Attention has a decay for every key channel.
        decays = heads.times(delta.k_dim if delta.by_channel else 1)
        self._kind = spec.cache_of(layer)
        self._decays = (heads.count, delta.k_dim) if delta.by_channel else (heads.count,)
        self._sigmoid = delta.by_channel
        self._value = value.count
        self._eps = spec.norm_eps if delta.norm_eps is None else delta.norm_eps
        self._bounds = (delta.reach, delta.floor)
        self._add_inputs(spec.hidden, delta, key, heads, decays, build)
        channels = joined(key, key, value)
        self.conv: nn.Parameter | None = build.weight(
            channels.count, 1, delta.conv, shard=channels, wide=True
        )
        self.log_rate = build.weight(heads.count, shard=heads, wide=True)
        self.step_bias = build.weight(decays.count, shard=decays, wide=True)
        self.norm = build.weight(delta.v_dim, wide=True)
        self.out = RowLinear(value, spec.hidden, build)
        self._weights: DeltaWeights | None = None

    def _add_inputs(
        self, hidden: int, delta: DeltaSpec, key: Shard, heads: Shard, decays: Shard, build: Build
    ) -> None:
        """Add the input projections. ``key``: this rank's key channels; ``heads``: its value heads;
        ``decays``: the decays of its value heads."""
        value = heads.times(delta.v_dim)
        self.qkvz = PairedLinear(hidden, joined(key, key, value, value), build)
        self.gates = PairedLinear(hidden, joined(heads, decays), build)
        self._sizes = (heads.count, decays.count)

    def _pack_inputs(self) -> None:
        self.qkvz.pack_with(self.gates)

    def _inputs(self, x: Tensor, adapters: AdapterRows | None) -> DeltaInputs:
        """Return the inputs of the core for x [T, hidden]."""
        qkvz, gates = self.qkvz.both(self.gates, x, adapters)
        qkv, z = qkvz.split((qkvz.shape[1] - self._value, self._value), dim=1)
        b, a = gates.split(self._sizes, dim=1)
        return DeltaInputs(qkv, z, b, a)

    def pack(self) -> None:
        """Compute the weights in the form of the backend, drop ``conv``, and join the input projections.

        Call once, before ``forward``.
        """
        self._pack_inputs()
        assert self.conv is not None
        self._weights = DeltaWeights(
            taps=self.conv.data[:, 0].T.contiguous(),
            rate=self.log_rate.data.exp(),
            bias=self.step_bias.data.view(self._decays),
            norm=self.norm.data,
            eps=self._eps,
            reach=self._bounds[0],
            floor=self._bounds[1],
            sigmoid=self._sigmoid,
        )
        self.conv = None

    def forward(
        self, x: Tensor, shared: AttentionInput, caches: LayerCache, logits_indices: Tensor | None = None
    ) -> Tensor:
        """Return [T or L, hidden] for x [T, hidden]. Advances the recurrent states of the layer in
        ``caches``.

        logits_indices: rows to return (None: all).
        """
        backend = shared.backends["delta"]
        assert isinstance(backend, DeltaBackend)
        assert self._weights is not None, "not packed"
        step = shared.step
        inputs = self._inputs(x, step.adapters)
        out = x.new_empty(len(x), self._value)
        # Only decode rows may be cut back to an earlier token (rejected drafts), so only decode rows store a
        # state per token.
        for segment, prepared, each in zip(step.segments, step.prepared, (False, True), strict=True):
            if not segment.tokens:
                continue
            rows = slice(segment.begin, segment.begin + segment.tokens)
            alone = segment.tokens == len(x)
            backend.run(
                inputs if alone else inputs.of(rows),
                out if alone else out[rows],
                DeltaInput(segment, caches[self._kind], self._weights, each, prepared[self._kind]),
            )
        wanted = out if logits_indices is None else out[logits_indices]
        result: Tensor = self.out(wanted, step.adapters_at(logits_indices))
        return result
