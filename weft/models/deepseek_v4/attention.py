"""Attention of DeepSeek V4: entries that are key and value of all heads, in a window and of groups before it.

On merged rows: all projections, every cache entry and the groups that the step completes. Per segment: the
choice of groups, and core attention. Source: DeepSeek-V4 (2026), section 2.3.

    x -> down -> [q part | entry | sources of groups | index weights]      one matrix
    q part: norm, ``q_up`` -> [queries | index queries]; each query normalized, rotated
    entry: norm, rotated -> the token's cache entry
    what heads got: rotated back by the token's position, since values are rotated; then a low-rank
    projection for each group of heads, and one for all
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.attention.base import Backends, LayerCache, StepInput
from weft.attention.compress import ByToken, Completed, Compressor
from weft.attention.sparse import Reads, SparseBackend
from weft.config.spec import ModelSpec
from weft.layers.build import Build, Layer, Packs
from weft.layers.held import take_codes
from weft.layers.linear import Linear, RowLinear
from weft.layers.norm import RMSNorm
from weft.layers.shard import Shard, joined, whole
from weft.ops.sparse_ops import rotate_pairs_

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeInput:
    """What the layers of one type share in a step."""

    reads: Reads
    angles: tuple[Tensor, Tensor]
    """cos and sin of the step's positions."""
    plans: tuple[object, object]
    """The backend's, for each segment."""
    completed: Completed | ByToken | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseInput:
    """What every layer of a step shares."""

    step: StepInput
    backends: Backends
    types: dict[str, TypeInput]


def overlap_of(kind: str) -> int:
    """Groups that a source entry has a part in, for layers of the type ``kind``."""
    return {"window": 0, "chosen": 2, "all": 1}[kind]


class DownLinear(Linear):
    """The projection from the hidden size. Published sources come vector by vector, each with its parts.

    Packing puts what one group needs of a source together: from ``[kv a | kv b | gate a | gate b]`` (a and b
    the parts, each of all dims in turn) rows go to ``[kv a | gate a | kv b | gate b]``.
    """

    def __init__(
        self, inputs: int, before: int, dims: tuple[int, ...], overlap: int, after: int, build: Build
    ) -> None:
        super().__init__(inputs, before + 2 * overlap * sum(dims) + after, build)
        self._before = before
        self._dims = dims
        self._overlap = overlap

    def pack(self) -> None:
        take_codes(self.weight, allowed=False)
        if self._overlap > 1:
            rows = list[Tensor]()
            end = self._before
            parts = []  # of kv, then of gate: for each vector its parts
            for dim in self._dims * 2:
                parts.append(torch.arange(end, end + self._overlap * dim).chunk(self._overlap))
                end += self._overlap * dim
            for part in range(self._overlap):
                rows += [of_vector[part] for of_vector in parts]
            order = torch.cat([torch.arange(self._before), *rows, torch.arange(end, self.weight.shape[0])])
            self.weight.data = self.weight.data[order.to(self.weight.device)]
        super().pack()


class GroupedLinear(Packs):
    """A matrix for each of ``groups`` equal parts of the input; weight: [groups * outputs, inputs]."""

    def __init__(self, groups: Shard, inputs: int, outputs: int, build: Build) -> None:
        super().__init__()
        self._groups = groups.count
        self.weight = build.weight(groups.count * outputs, inputs, shard=groups.times(outputs))
        self._op = build.matrix_op("linear")
        self._packed: list[object] = []

    def pack(self) -> None:
        each = self.weight.data.chunk(self._groups)
        if self._op.pack is None:
            self._packed = list(each)
            return
        self._packed = [self._op.pack(part.clone()) for part in each]
        self.weight = None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, groups * inputs]; returns [T, groups * outputs]."""
        parts = x.unflatten(1, (self._groups, -1)).unbind(1)
        made = [self._op.run(part.contiguous(), w, None) for part, w in zip(parts, self._packed, strict=True)]
        return torch.cat(made, dim=1)


class SparseAttention(Layer):
    """Sparse attention of one layer; returns a partial."""

    def __init__(self, spec: ModelSpec, layer: int, build: Build) -> None:
        super().__init__()
        sparse = spec.sparse
        assert sparse is not None
        self._type = kind = sparse.types[layer]
        self._kinds = spec.caches_of(layer)
        heads = build.part(spec.heads)
        groups = build.part(sparse.o_groups)
        self._heads = heads.count
        self._dim = spec.head_dim
        chooses = kind == "chosen"
        dims = {"window": (), "chosen": (spec.head_dim, sparse.index_dim), "all": (spec.head_dim,)}[kind]
        overlap = overlap_of(kind)
        self._index = (sparse.index_heads, sparse.index_dim) if chooses else (0, 0)
        self._sizes = (sparse.q_lora, spec.head_dim, 2 * overlap * sum(dims), self._index[0])
        self.down = DownLinear(
            spec.hidden, sparse.q_lora + spec.head_dim, dims, overlap, self._index[0], build
        )
        self.q_norm = RMSNorm(sparse.q_lora, spec.norm_eps, build)
        queries = joined(heads.times(spec.head_dim), whole(self._index[0] * self._index[1]))
        self.q_up = Linear(sparse.q_lora, queries, build)
        self.line_norm = RMSNorm(spec.head_dim, spec.norm_eps, build)
        self.compressor = None
        if dims:
            ratio = spec.caches[self._kinds[-1]].ratio
            self.compressor = Compressor(dims, ratio, overlap, spec.norm_eps, build)
        self.sinks = build.weight(heads.count, shard=heads, wide=True)
        inputs = spec.heads * spec.head_dim // sparse.o_groups
        self.out_low = GroupedLinear(groups, inputs, sparse.o_lora, build)
        self.out = RowLinear(groups.times(sparse.o_lora), spec.hidden, build)
        self._unit = torch.ones(spec.head_dim, dtype=build.dtype, device=build.device)
        self._norm = build.op("rms_norm").run
        self._eps = spec.norm_eps
        self._wide = build.wide

    def forward(
        self, x: Tensor, shared: SparseInput, caches: LayerCache, logits_indices: Tensor | None = None
    ) -> Tensor:
        """x: [T, hidden]; caches: this layer's, written and read; logits_indices: rows wanted (None: all)."""
        mine = shared.types[self._type]
        cos, sin = mine.angles
        low, entry, sources, index_weights = self.down(x).split(self._sizes, dim=1)
        q = self.q_up(self.q_norm(low.contiguous()))
        queries = self._heads * self._dim
        index_q = rotate_pairs_(q[:, queries:].unflatten(1, self._index), cos, sin) if self._index[0] else q
        q = q[:, :queries].unflatten(1, (self._heads, self._dim)).contiguous()
        q = rotate_pairs_(self._norm(q, self._unit, self._eps), cos, sin)
        self._write(entry, sources, shared.step, mine, caches)
        out = self._attend(q, index_q, index_weights.to(self._wide), shared, caches)
        if logits_indices is not None:
            out = out[logits_indices]
            cos = cos[logits_indices]
            sin = sin[logits_indices]
        partial: Tensor = self.out(self.out_low(rotate_pairs_(out, cos, -sin).flatten(1)))
        return partial

    def _write(
        self, entry: Tensor, sources: Tensor, step: StepInput, mine: TypeInput, caches: LayerCache
    ) -> None:
        """All entries of the step, of both segments, before any attention.

        A prefill row's later entries may be there before its earlier tokens attend: these do not see them,
        since positions decide what a token sees, of window and groups alike. So it is the same as writing
        the window's entries of prefill rows afterwards, where a ring of the window's size would lose some.
        """
        entry = rotate_pairs_(self.line_norm(entry.contiguous()).unsqueeze(1), *mine.angles).squeeze(1)
        entries = [entry, sources] if self.compressor is not None else [entry]
        for kind, new in zip(self._kinds, entries, strict=False):
            (cache,) = caches[kind]
            cache.view(-1, cache.shape[2]).index_copy_(0, step.writes[kind], new.to(cache.dtype))
        if self.compressor is not None and mine.completed is not None:
            self.compressor(caches[self._kinds[1]][0], caches[self._kinds[2]][0], mine.completed)

    def _attend(
        self, q: Tensor, index_q: Tensor, index_weights: Tensor, shared: SparseInput, caches: LayerCache
    ) -> Tensor:
        backend = shared.backends["sparse"]
        mine = shared.types[self._type]
        assert isinstance(backend, SparseBackend)
        out = torch.empty_like(q)
        for segment, plan in zip(shared.step.segments, mine.plans, strict=True):
            if not segment.tokens:
                continue
            rows = slice(segment.begin, segment.begin + segment.tokens)
            selected = None
            if mine.reads.top:
                selected = backend.select(
                    index_q[rows], index_weights[rows], caches, segment, mine.reads, plan
                )
            backend.attend(
                q[rows],
                out[rows],
                caches,
                segment,
                mine.reads,
                plan,
                selected,
                self.sinks,
                self._dim**-0.5,
            )
        return out
