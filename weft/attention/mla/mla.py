"""Latent attention: the cache stores the latents that keys and values are computed from.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1. Projections, norms and cache writes run on merged rows.
Core attention, including the rotation of queries, runs per segment.

    x -> down -> [q part | latent | key]      one matrix
    q part: norm, ``q_up`` -> queries         if queries have a low rank; else the q part is the queries
    latent: norm; key: rotated -> cache entry of the token
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from weft.attention.base import CoreInput, LayerCache
from weft.attention.gqa.gqa import AttentionInput
from weft.attention.mla.latent import Form, LatentBackend, LatentInput, UpMatrices
from weft.attention.mla.up_adapters import UpAdapters
from weft.attention.recurrent import sigmoid
from weft.config.spec import MLASpec, ModelSpec
from weft.layers.build import Build, Layer, Packs
from weft.layers.dense import Linear, RMSNorm, RowLinear
from weft.layers.paired import PairedLinear
from weft.layers.shard import Shard, joined, whole
from weft.ops.low_rank import AdapterRows

Tensor = torch.Tensor


class UpLayer(Packs):
    """Matrices that turn latents into keys and values, as published: per head, first nope rows, then v
    rows."""

    matrices: UpMatrices
    """Set by ``pack``."""

    def __init__(self, heads: Shard, mla: MLASpec, build: Build) -> None:
        """``heads``: this rank's part of the heads."""
        super().__init__()
        rows = heads.times(mla.nope + mla.v)
        self.weight = build.weight(rows.count, mla.kv_lora, shard=rows)
        self._heads = heads.count
        self._sizes = (mla.nope, mla.v)
        self._pack = build.op("latent_up").run
        self.low = UpAdapters(build, heads.count, mla) if build.adapters.places else None
        """Adapters of the matrix; None without places for adapters."""
        if self.low is not None:
            self.low.base = lambda x: F.linear(x, self.weight)

    def pack(self) -> None:
        keys, values = self.weight.data.view(self._heads, sum(self._sizes), -1).split(self._sizes, dim=1)
        self.matrices = UpMatrices(keys=keys, values=values, packed=self._pack(keys, values))


class _Down(PairedLinear):
    """Input matrix. If the first outputs are the queries themselves (no low rank), the queries have no
    bias."""

    def __init__(self, hidden: int, first: Shard, mla: MLASpec, build: Build) -> None:
        """``first``: outputs before the cache entry: this rank's queries, or all low-rank queries."""
        entries = whole(mla.kv_lora + mla.rope)
        super().__init__(hidden, joined(first, entries), build)
        if mla.bias:
            self.bias = build.weight(entries.count if mla.q_lora is None else self._outputs)

    def pack(self) -> None:
        """Pack the weight. A shorter bias is padded with zeros in front."""
        self._pad_bias()
        super().pack()

    def pack_with(self, other: PairedLinear) -> None:
        """Pack both layers; see ``PairedLinear``. A shorter bias is padded as in ``pack``."""
        self._pad_bias()
        super().pack_with(other)

    def _pad_bias(self) -> None:
        """Pad the bias with zeros for the queries, so that the product sees one bias for all outputs."""
        if self.bias is not None and len(self.bias) < self._outputs:
            missing = self._outputs - len(self.bias)
            self.bias = nn.Parameter(F.pad(self.bias.data, (missing, 0)), requires_grad=False)


class LatentAttention(Layer):
    """Latent attention with rotary positions. Returns a partial sum, to be reduced over the ranks.

    Every rank caches all entries and computes its own heads.
    """

    adapted = ("down", "q_up", "kv_up", "gate", "out")

    def __init__(self, spec: ModelSpec, layer: int, build: Build) -> None:
        super().__init__()
        mla = spec.mla
        assert mla is not None
        heads = build.part(spec.heads)
        self._heads = heads.count
        self._mla = mla
        self._kind = spec.cache_of(layer)
        self._cache_spec = spec.caches[self._kind]
        queries = heads.times(mla.nope + mla.rope)
        first = queries if mla.q_lora is None else whole(mla.q_lora)
        self.down = _Down(spec.hidden, first, mla, build)
        self.q_norm = self.q_up = None
        if mla.q_lora is not None:
            self.q_norm = RMSNorm(mla.q_lora, mla.norm_eps, build)
            self.q_up = PairedLinear(mla.q_lora, queries, build)
        self.kv_norm = RMSNorm(mla.kv_lora, mla.norm_eps, build)
        self.kv_up = UpLayer(heads, mla, build)
        self.out = RowLinear(heads.times(mla.v), spec.hidden, build, bias=spec.o_bias)
        self.gate = Linear(spec.hidden, heads, build) if mla.head_gate else None
        fp8 = self._cache_spec.fp8
        self._rotate_and_cache = build.op("latent_rope_cache_fp8" if fp8 else "latent_rope_cache").run
        self._wide = build.wide
        self._forms = self._choose_forms(build)

    @staticmethod
    def _choose_forms(build: Build) -> tuple[Form, Form]:
        """Return the form of the prefill segment and the form of the decode segment."""
        return cast(tuple[Form, Form], build.op("latent_forms").run())

    def forward(
        self, x: Tensor, shared: AttentionInput, caches: LayerCache, logits_indices: Tensor | None = None
    ) -> Tensor:
        """Return [T or L, hidden] for x [T, hidden]. Writes the entries of the step into ``caches`` before
        reading.

        logits_indices: rows to return (None: all).
        """
        step = shared.step
        mla = self._mla
        backend = shared.backends["latent"]
        assert isinstance(backend, LatentBackend)
        cos, sin = shared.angles
        q = self._rotate_and_cache(
            self.down(x, step.adapters),
            None if self.q_norm is None else self.q_norm.weight,
            self.kv_norm.weight,
            mla.norm_eps,
            cos,
            sin,
            mla.interleaved,
            *caches[self._kind],
            step.writes[self._kind],
        )
        if logits_indices is not None and not len(logits_indices):  # only the cache entries were needed
            return self.out(x.new_empty(0, self._heads * mla.v))
        if self.q_up is not None:
            q = self.q_up(q, step.adapters)
        # [T, heads, nope + rope]
        q = q.unflatten(1, (self._heads, -1))
        low = self.kv_up.low
        changes = None if low is None else low.of(step.adapters)
        if changes is not None:
            q = changes.scaled_heads(q)
        out = x.new_empty(len(x), self._heads, mla.v)
        for segment, prepared, form in zip(step.segments, step.prepared, self._forms, strict=True):
            if not segment.tokens:
                continue
            rows = slice(segment.begin, segment.begin + segment.tokens)
            alone = segment.tokens == len(x)
            # Entries are expanded with the matrices of one adapter only, so such rows are absorbed.
            own = None if changes is None else changes.low.of(changes.rows.segment(rows.start, rows.stop))
            backend.attend(
                q if alone else q[rows],
                out if alone else out[rows],
                CoreInput(segment, caches, mla.scale, prepared[self._kind]),
                LatentInput(
                    shared.angles if alone else (cos[rows], sin[rows]),
                    self._kind,
                    self._cache_spec,
                    mla,
                    self.kv_up.matrices,
                    form if own is None else "absorbed",
                    own,
                ),
            )
        adapters = step.adapters_at(logits_indices)
        wanted = out if logits_indices is None else out[logits_indices]
        if self.gate is not None:
            wanted = self._gated(wanted, x if logits_indices is None else x[logits_indices], adapters)
        return self.out(wanted.view(len(wanted), self._heads * mla.v), adapters)

    def _gated(self, out: Tensor, x: Tensor, adapters: AdapterRows | None) -> Tensor:
        """Return attention's out [T, heads, v], each head scaled by the gate for the layer's input x [T,
        hidden]."""
        assert self.gate is not None
        return (out * sigmoid(self.gate(x, adapters).to(self._wide)).unsqueeze(2)).to(x.dtype)
