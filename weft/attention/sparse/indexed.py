"""Latent attention to positions chosen by an indexer, always in the absorbed form.

For sparse attention an entry is a group of one position. All heads share ``[latent | rotated key]`` as key,
and the latent as value. The indexer's key follows in the same entry, and stays in the model's dtype in a
cache of 8 bits: the choice is then that of exact keys. Source: DeepSeek-V3.2 (2025), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft.attention.base import Backends, CoreInput, LayerCache, StepInput
from weft.attention.mla.latent import Form
from weft.attention.mla.mla import LatentAttention
from weft.attention.mla.up_adapters import UpRows
from weft.attention.sparse.sparse import Reads, SparseBackend
from weft.config.spec import IndexSpec, ModelSpec
from weft.layers.build import Build, Layer, Packs
from weft.layers.paired import PairedLinear
from weft.ops.latent_ops import IndexParts, Rotation
from weft.ops.low_rank import AdapterRows

Tensor = torch.Tensor

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


class IndexQueries(NamedTuple):
    """Input of the choice for T tokens."""

    queries: Tensor
    """[T, heads, dim], not rotated."""
    weights: Tensor
    """Weight of each head's scores, [T, heads]."""


class SparseQueries(NamedTuple):
    """Queries of T tokens for the backend, not rotated."""

    absorbed: Tensor
    """[T, heads, kv_lora]: the first part of the queries, in the space of latents."""
    q: Tensor
    """[T, heads, nope + rope]: the last rope elements are the rest of the queries. Tokens may lie apart."""
    indexed: IndexQueries | None
    """None for a layer without an indexer."""


class Indexer(Layer):
    """Indexer: queries from the low-rank queries, keys and weights from the hidden states.

    Both products are parts of products of the attention; see ``IndexedAttention.pack``.
    """

    def __init__(self, hidden: int, q_lora: int, spec: IndexSpec, build: Build) -> None:
        super().__init__()
        self.q_up = PairedLinear(q_lora, spec.heads * spec.dim, build)
        self.down = PairedLinear(hidden, spec.dim + spec.heads, build)
        self.key_norm = build.weight(spec.dim)
        self.key_bias = build.weight(spec.dim)
        self._spec = spec

    def parts(self, joined: Tensor) -> IndexParts:
        """Return the input of the key's computation. joined: [T, dim + heads], the result of ``down``."""
        return IndexParts(joined, self.key_norm, self.key_bias, _EPS, self._spec.interleaved)

    def split(self, q: Tensor, joined: Tensor) -> IndexQueries:
        """Return the input of the choice, as views of the results of ``q_up`` and ``down``."""
        spec = self._spec
        return IndexQueries(q.unflatten(1, (spec.heads, spec.dim)), joined[:, spec.dim :])


class IndexedAttention(LatentAttention, Packs):
    """Latent attention to chosen positions. Returns a partial sum, to be reduced over the ranks."""

    def __init__(self, spec: ModelSpec, layer: int, build: Build) -> None:
        super().__init__(spec, layer, build)
        assert spec.index is not None
        assert spec.mla is not None
        assert spec.mla.q_lora is not None
        self._reads = reads_of(build.local(spec), self._kind)
        self._index_interleaved = spec.index.interleaved
        self._write_entries = build.op("entry_writer").run(self._cache_spec.fp8)
        # Only the op that runs is chosen: ``build`` notes the choice, and requires invariance if asked.
        self._product = build.op("head_product" if self._write_entries is None else "head_product_into").run
        self.indexer = None
        if layer in spec.index.layers:
            self.indexer = Indexer(spec.hidden, spec.mla.q_lora, spec.index, build)

    def pack(self) -> None:
        """Join the products of the indexer with the products over the same inputs, where formats permit."""
        if self.indexer is not None:
            assert self.q_up is not None
            self.down.pack_with(self.indexer.down)
            self.q_up.pack_with(self.indexer.q_up)

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
        made = self._prepare(x, shared, caches, logits_indices is None or len(logits_indices) > 0)
        if made is None:  # only the cache entries were needed
            return self.out(x.new_empty(0, self._heads * self._mla.v))
        latents = self._attend(made, shared, caches)
        if logits_indices is not None:
            latents = latents[logits_indices]
        up = self.kv_up.matrices
        changes = self._changes(step.adapters_at(logits_indices))
        if self._write_entries is None:
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

    def _down_of(self, x: Tensor, step: StepInput) -> tuple[Tensor, IndexParts | None]:
        """Return ([T, q_lora + kv_lora + rope], input of the indexer's key) for x [T, hidden]."""
        if self.indexer is None:
            return self.down(x, step.adapters), None
        joined, index = self.down.both(self.indexer.down, x, step.adapters)
        return joined, self.indexer.parts(index)

    def _queries_of(
        self, low: Tensor, index: IndexParts | None, step: StepInput
    ) -> tuple[Tensor, IndexQueries | None]:
        """Return (q, indexed) of ``SparseQueries`` for low [T, q_lora]."""
        assert self.q_up is not None
        if self.indexer is None or index is None:
            return self.q_up(low, step.adapters).unflatten(1, (self._heads, -1)), None
        q, index_q = self.q_up.both(self.indexer.q_up, low, step.adapters)
        return q.unflatten(1, (self._heads, -1)), self.indexer.split(index_q, index.joined)

    def _prepare(
        self, x: Tensor, shared: IndexedInput, caches: LayerCache, wanted: bool
    ) -> SparseQueries | None:
        """Write the entries of the step, and return the queries; None unless ``wanted``."""
        step, mla = shared.step, self._mla
        joined, index = self._down_of(x, step)
        low = self._write(joined, index, shared, caches[self._kind])
        if not wanted:
            return None
        q, indexed = self._queries_of(low, index, step)
        nope = q[..., : mla.nope]
        changes = self._changes(step.adapters)
        if changes is not None:
            nope = changes.scaled_queries(nope)
        up = self.kv_up.matrices
        # [T, heads, kv_lora]: queries in the space of latents
        if self._write_entries is None:
            absorb = None if up.packed is None else up.packed.absorb
            absorbed = self._product(nope, up.keys.transpose(1, 2), absorb)
        else:
            absorbed = q.new_empty(*q.shape[:2], mla.kv_lora)
            self._product(nope, up.keys.transpose(1, 2), absorbed)
        if changes is not None:
            absorbed += changes.queries(nope)
        return SparseQueries(absorbed, q, indexed)

    def _write(
        self, joined: Tensor, index: IndexParts | None, shared: IndexedInput, own: tuple[Tensor, ...]
    ) -> Tensor:
        """Write the entries of the step into the layer's caches ``own``. Return the normalized input of the
        queries [T, q_lora].

        A line is [latent | rotated key | key of the indexer]. In 8 bits only the latent has codes.
        """
        mla, writes = self._mla, shared.step.writes[self._kind]
        assert self.q_norm is not None
        norms = (self.q_norm.weight, self.kv_norm.weight, mla.norm_eps)
        given = (joined, *norms, *shared.angles, mla.interleaved, *own, writes)
        if self._write_entries is not None:
            return self._write_entries(*given, index)
        low: Tensor = self._rotate_and_cache(*given)
        if index is not None:
            key, exact = index.key(*shared.angles), own[-1]
            exact.view(-1, exact.shape[2])[:, -key.shape[1] :].index_copy_(0, writes, key.to(exact.dtype))
        return low

    def _attend(self, queries: SparseQueries, shared: IndexedInput, caches: LayerCache) -> Tensor:
        """Attend to the chosen entries; return sums of latents [T, heads, kv_lora].

        With ``queries.indexed``, choose first and store the choice in ``shared.chosen``; None reuses the last
        choice.
        """
        backend = shared.backends["sparse"]
        assert isinstance(backend, SparseBackend)
        absorbed, q, indexed = queries
        out = absorbed.new_empty(absorbed.shape)
        parts = zip(shared.step.segments, shared.plans[self._kind], strict=True)
        for number, (segment, plan) in enumerate(parts):
            if not segment.tokens:
                continue
            rows = slice(segment.begin, segment.begin + segment.tokens)
            core = CoreInput(segment, caches, self._mla.scale, plan)
            cos, sin = (one[rows] for one in shared.angles)
            # A layer without an indexer reuses the choice of the last layer with an indexer.
            if indexed is not None:
                rotation = Rotation(cos, sin, self._index_interleaved)
                shared.chosen[number] = backend.select_rotated(
                    indexed.queries[rows], rotation, indexed.weights[rows], core, self._reads
                )
            backend.attend_rotated(
                absorbed[rows],
                q[rows],
                Rotation(cos, sin, self._mla.interleaved),
                out[rows],
                core,
                self._reads,
                shared.chosen[number],
            )
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
