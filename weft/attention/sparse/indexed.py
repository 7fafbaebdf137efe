"""Latent attention to positions chosen by an indexer, always in the absorbed form.

For sparse attention an entry is a group of one position. All heads share ``[latent | rotated key]`` as key,
and the latent as value. The indexer's key follows in the same entry. Source: DeepSeek-V3.2 (2025), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F

from weft.attention.base import Backends, CoreInput, LayerCache, StepInput
from weft.attention.mla.latent import Form
from weft.attention.mla.mla import LatentAttention
from weft.attention.mla.up_adapters import UpRows
from weft.attention.sparse.sparse import Reads, SparseBackend
from weft.config.spec import IndexSpec, ModelSpec
from weft.layers.build import Build, Layer
from weft.layers.dense import Linear
from weft.ops.latent_ops import IndexParts, rotate_pairs
from weft.ops.low_rank import AdapterRows

Tensor = torch.Tensor

Queries: TypeAlias = tuple[Tensor, tuple[Tensor, Tensor] | None]
"""([T, heads, kv_lora + rope], (queries of the indexer [T, heads, dim], weights wide [T, heads]) or None)."""

_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedInput:
    """Attention input shared by all layers of a step."""

    step: StepInput
    angles: tuple[Tensor, Tensor]
    backends: Backends
    plans: dict[int, tuple[object, object]]
    """Plans of the backend, per KV cache group and segment."""
    chosen: list[Tensor | None]
    """Choice of the last layer with an indexer, per segment. Layers with an indexer overwrite the choice."""


class Indexer(Layer):
    """Indexer: queries from the low-rank queries, keys and weights from the hidden states."""

    def __init__(self, hidden: int, q_lora: int, spec: IndexSpec, build: Build) -> None:
        super().__init__()
        self.q_up = Linear(q_lora, spec.heads * spec.dim, build)
        self.down = Linear(hidden, spec.dim + spec.heads, build)
        self.key_norm = build.weight(spec.dim)
        self.key_bias = build.weight(spec.dim)
        self._spec = spec
        self._wide = build.wide

    def forward(self, x: Tensor, low: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return (queries [T, heads, dim], weights wide [T, heads], keys [T, dim]) from x [T, hidden] and low
        [T, q_lora].
        """
        spec = self._spec
        key, weights = self.down(x).split((spec.dim, spec.heads), dim=1)
        exact = [tensor.to(self._wide) for tensor in (key, self.key_norm, self.key_bias)]
        key = F.layer_norm(exact[0], (spec.dim,), exact[1], exact[2], _EPS).to(x.dtype)
        q = self.q_up(low).unflatten(1, (spec.heads, spec.dim))
        return self._rotated(q, angles), weights.to(self._wide), self._rotated(key, angles)

    def parts(self, x: Tensor, low: Tensor) -> IndexParts:
        """Return the input of a kernel that computes the rest of ``forward``."""
        spec = self._spec
        return IndexParts(
            q=self.q_up(low),
            joined=self.down(x),
            norm=self.key_norm,
            bias=self.key_bias,
            heads=spec.heads,
            interleaved=spec.interleaved,
        )

    def _rotated(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        rope = 2 * angles[0].shape[1]
        turned = rotate_pairs(x[..., :rope], *angles, self._spec.interleaved)
        return torch.cat((turned, x[..., rope:]), dim=-1)


class IndexedAttention(LatentAttention):
    """Latent attention to chosen positions. Returns a partial sum, to be reduced over the ranks."""

    def __init__(self, spec: ModelSpec, layer: int, build: Build) -> None:
        super().__init__(spec, layer, build)
        assert spec.index is not None
        assert spec.mla is not None
        assert spec.mla.q_lora is not None
        self._reads = reads_of(build.local(spec), self._kind)
        self._kernel = build.op("index_entries").run()
        # Only the op that runs is chosen: ``build`` notes the choice, and requires invariance if asked.
        self._product = build.op("head_product" if self._kernel is None else "head_product_into").run
        self.indexer = None
        if layer in spec.index.layers:
            self.indexer = Indexer(spec.hidden, spec.mla.q_lora, spec.index, build)

    @staticmethod
    def _choose_forms(build: Build) -> tuple[Form, Form]:
        """Return the absorbed form: chosen entries are never expanded to keys and values."""
        return ("absorbed", "absorbed")

    def forward(
        self,
        x: Tensor,
        shared: IndexedInput,  # type: ignore[override]
        caches: LayerCache,
        logits_indices: Tensor | None = None,
    ) -> Tensor:
        """Return [T or L, hidden] for x [T, hidden]. Writes the entries of the step into ``caches`` before
        reading.

        Layers with an indexer also set ``shared.chosen``. logits_indices: rows to return (None: all).
        """
        step = shared.step
        prepare = self._op_by_op if self._kernel is None else self._by_kernel
        made = prepare(x, shared, caches, logits_indices is None or len(logits_indices) > 0)
        if made is None:  # only the cache entries were needed
            return self.out(x.new_empty(0, self._heads * self._mla.v))
        latents = self._attend(*made, shared, caches)
        if logits_indices is not None:
            latents = latents[logits_indices]
        up = self.kv_up.matrices
        changes = self._changes(step.adapters_at(logits_indices))
        if self._kernel is None:
            packed = None if up.packed is None else up.packed.values
            values = self._product(latents, up.values, packed).flatten(1).contiguous()
        else:
            values = latents.new_empty(len(latents), self._heads * self._mla.v)
            self._product(latents, up.values, values.view(len(latents), self._heads, -1))
        if changes is not None:
            changes.add_values(values.view(len(latents), self._heads, -1), latents)
        return self.out(values, step.adapters_at(logits_indices))

    def _changes(self, rows: AdapterRows | None) -> UpRows | None:
        """Return the adapters of the key and value matrices of ``rows``."""
        low = self.kv_up.low
        return None if low is None else low.of(rows)

    def _op_by_op(self, x: Tensor, shared: IndexedInput, caches: LayerCache, wanted: bool) -> Queries | None:
        """Write the entries of the step, and return (queries, ``index`` of ``_attend``); None unless
        ``wanted``."""
        step, (cache,), mla = shared.step, caches[self._kind], self._mla
        assert self.q_norm is not None
        assert self.q_up is not None
        assert mla.q_lora is not None
        low, latent, key = self.down(x, step.adapters).split((mla.q_lora, mla.kv_lora, mla.rope), dim=1)
        low = self.q_norm(low.contiguous())
        entry = [self.kv_norm(latent.contiguous()), rotate_pairs(key, *shared.angles, mla.interleaved)]
        index: tuple[Tensor, Tensor] | None = None
        if self.indexer is not None:
            index_q, weights, index_key = self.indexer(x, low, shared.angles)
            entry.append(index_key)
            index = index_q, weights
        # [T, kv_lora + rope (+ index dim)]: latent, rotated key, key of the indexer
        cache.view(-1, cache.shape[2]).index_copy_(
            0, step.writes[self._kind], torch.cat(entry, dim=1).to(cache.dtype)
        )
        if not wanted:
            return None
        q = self.q_up(low, step.adapters).unflatten(1, (self._heads, -1))
        nope, turned = q.split((mla.nope, mla.rope), dim=-1)
        turned = rotate_pairs(turned, *shared.angles, mla.interleaved)
        changes = self._changes(step.adapters)
        if changes is not None:
            nope = changes.scaled_queries(nope)
        up = self.kv_up.matrices
        absorb = None if up.packed is None else up.packed.absorb
        # [T, heads, kv_lora + rope]: queries in the space of cache entries
        absorbed = self._product(nope, up.keys.transpose(1, 2), absorb)
        if changes is not None:
            absorbed = absorbed + changes.queries(nope)
        return torch.cat((absorbed, turned), dim=-1), index

    def _by_kernel(self, x: Tensor, shared: IndexedInput, caches: LayerCache, wanted: bool) -> Queries | None:
        """Compute ``_op_by_op`` with two kernels around the products. ``wanted`` only saves the product of
        the queries."""
        step, (cache,), mla = shared.step, caches[self._kind], self._mla
        writes = step.writes[self._kind]
        assert self.q_norm is not None
        assert self.q_up is not None
        joined = self.down(x, step.adapters)
        norms = (self.q_norm.weight, self.kv_norm.weight, mla.norm_eps)
        low = self._rotate_and_cache(joined, *norms, *shared.angles, mla.interleaved, cache, writes)
        q = self.q_up(low, step.adapters).unflatten(1, (self._heads, -1))
        # [T, heads, kv_lora + rope]: queries in the space of cache entries
        full = q.new_empty(*q.shape[:2], mla.kv_lora + mla.rope)
        parts = None if self.indexer is None else self.indexer.parts(x, low)
        index = self._kernel(q, full, shared.angles, mla.interleaved, parts, _EPS, cache, writes)
        if not wanted:
            return None
        keys = self.kv_up.matrices.keys.transpose(1, 2)
        nope = q[..., : mla.nope]
        changes = self._changes(step.adapters)
        if changes is not None:
            nope = changes.scaled_queries(nope)
        self._product(nope, keys, full[..., : mla.kv_lora])
        if changes is not None:
            full[..., : mla.kv_lora] += changes.queries(nope)
        return full, index

    def _attend(
        self, q: Tensor, index: tuple[Tensor, Tensor] | None, shared: IndexedInput, caches: LayerCache
    ) -> Tensor:
        """Attend q [T, heads, kv_lora + rope] to the chosen entries; return sums of latents [T, heads,
        kv_lora].

        With ``index``, choose first and store the choice in ``shared.chosen``; None reuses the last choice.
        """
        backend = shared.backends["sparse"]
        assert isinstance(backend, SparseBackend)
        out = q.new_empty(*q.shape[:2], self._mla.kv_lora)
        parts = zip(shared.step.segments, shared.plans[self._kind], strict=True)
        for number, (segment, plan) in enumerate(parts):
            if not segment.tokens:
                continue
            rows = slice(segment.begin, segment.begin + segment.tokens)
            core = CoreInput(segment, caches, self._mla.scale, plan)
            # A layer without an indexer reuses the choice of the last layer with an indexer.
            if index is not None:
                shared.chosen[number] = backend.select(index[0][rows], index[1][rows], core, self._reads)
            backend.attend(q[rows], out[rows], core, self._reads, shared.chosen[number])
        return out


def reads_of(spec: ModelSpec, kind: int) -> Reads:
    """Return the reads of the layers of a KV cache group: single positions, as groups of one position."""
    mla = spec.mla
    index = spec.index
    assert mla is not None
    assert index is not None
    return Reads(
        entries=None,
        groups=kind,
        ratio=1,
        top=index.top,
        heads=spec.heads,
        dim=mla.kv_lora + mla.rope,
        index_heads=index.heads,
    )
