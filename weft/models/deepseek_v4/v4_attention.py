"""Attention of DeepSeek V4: entries serve all heads as key and value, in a window and in groups before the
window.

Merged rows: all projections, every cache entry, and the groups completed by the step. Per segment: the choice
of groups, and core attention. Source: DeepSeek-V4 (2026), section 2.3.

    x -> down -> [q part | entry | sources of groups | index weights]      one matrix
    q part: norm, ``q_up`` -> [queries | index queries]; each query normalized, rotated
    entry: norm, rotated -> cache entry of the token
    outputs of heads: rotated back by the position of the token, because values are rotated; then a low-rank
    projection per group of heads, and one projection for all groups
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.attention.base import Backends, CoreInput, LayerCache, StepInput
from weft.attention.sparse.compress import ByToken, Completed, Compressor
from weft.attention.sparse.sparse import Reads, SparseBackend
from weft.config.spec import ModelSpec
from weft.layers.build import Build, Layer, Packs
from weft.layers.dense import Linear, RMSNorm, RowLinear
from weft.layers.pending_codes import take_codes
from weft.layers.shard import Shard, joined, whole

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeInput:
    """Input shared by the layers of one type in a step."""

    reads: Reads
    angles: tuple[Tensor, Tensor]
    """cos and sin of the positions of the step."""
    plans: tuple[object, object]
    """Plans of the backend, per segment."""
    completed: Completed | ByToken | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseInput:
    """Attention input shared by all layers of a step."""

    step: StepInput
    backends: Backends
    types: dict[str, TypeInput]


def overlap_of(kind: str) -> int:
    """Return the number of groups that contain a source entry, for layers of type ``kind``."""
    return {"window": 0, "chosen": 2, "all": 1}[kind]


class DownLinear(Linear):
    """Projection from the hidden states. Published sources come vector by vector, each with its parts.

    ``pack`` reorders the rows so that one group's share of a source is contiguous: from ``[kv a | kv b | gate
    a | gate b]`` (parts a and b, each with all dims in turn) to ``[kv a | gate a | kv b | gate b]``.
    """

    def __init__(
        self, inputs: int, before: int, dims: tuple[int, ...], overlap: int, after: int, build: Build
    ) -> None:
        super().__init__(inputs, before + 2 * overlap * sum(dims) + after, build)
        self._before = before
        self._dims = dims
        self._overlap = overlap

    def pack(self) -> None:
        """Reorder the rows of the weight, in place, and pack the weight.

        Quantized codes are dequantized first.
        """
        take_codes(self._notes.weight(self.weight), allowed=False)
        if self._overlap > 1:
            rows = list[Tensor]()
            end = self._before
            parts = []  # of kv, then of gate: the parts of each vector
            for dim in self._dims * 2:
                parts.append(torch.arange(end, end + self._overlap * dim).chunk(self._overlap))
                end += self._overlap * dim
            for part in range(self._overlap):
                rows += [of_vector[part] for of_vector in parts]
            order = torch.cat([torch.arange(self._before), *rows, torch.arange(end, self.weight.shape[0])])
            self.weight.data.copy_(self.weight.data[order.to(self.weight.device)])
        super().pack()


class GroupedLinear(Packs):
    """One matrix for each of ``groups`` equal parts of the input. weight: [groups * outputs, inputs]."""

    def __init__(self, groups: Shard, inputs: int, outputs: int, build: Build) -> None:
        super().__init__()
        self._groups = groups.count
        self.weight = build.weight(groups.count * outputs, inputs, shard=groups.times(outputs))
        self._op = build.matrix_op("linear")
        self._packed: list[object] = []

    def pack(self) -> None:
        """Pack each group's part of the weight. If the operation packs, ``weight`` is dropped."""
        each = self.weight.data.chunk(self._groups)
        if self._op.pack is None:
            self._packed = list(each)
            return
        self._packed = [self._op.pack(part.clone()) for part in each]
        self.weight = None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, groups * outputs] for x [T, groups * inputs]."""
        parts = x.unflatten(1, (self._groups, -1)).unbind(1)
        made = [self._op.run(part.contiguous(), w, None) for part, w in zip(parts, self._packed, strict=True)]
        return torch.cat(made, dim=1)


class SparseAttention(Layer):
    """Sparse attention of one layer. Returns a partial sum, to be reduced over the ranks."""

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
        self._rotate = build.op("rotate_neighbours").run
        self._write_lines = build.op("write_lines").run
        self._eps = spec.norm_eps
        self._wide = build.wide

    def forward(
        self, x: Tensor, shared: SparseInput, caches: LayerCache, logits_indices: Tensor | None = None
    ) -> Tensor:
        """Return [T or L, hidden] for x [T, hidden]. Writes the entries of the step into ``caches`` before
        reading.

        logits_indices: rows to return (None: all).
        """
        mine = shared.types[self._type]
        cos, sin = mine.angles
        low, entry, sources, index_weights = self.down(x).split(self._sizes, dim=1)
        q = self.q_up(self.q_norm(low.contiguous()))
        queries = self._heads * self._dim
        index_q = self._rotate(q[:, queries:].unflatten(1, self._index), cos, sin) if self._index[0] else q
        q = q[:, :queries].unflatten(1, (self._heads, self._dim)).contiguous()
        # [T, heads, head_dim]; the norm has no learned weight
        q = self._rotate(self._norm(q, self._unit, self._eps), cos, sin)
        self._write(entry, sources, shared.step, mine, caches)
        out = self._attend(q, index_q, index_weights.to(self._wide), shared, caches)
        if logits_indices is not None:
            out = out[logits_indices]
            cos = cos[logits_indices]
            sin = sin[logits_indices]
        partial: Tensor = self.out(self.out_low(self._rotate(out, cos, -sin).flatten(1)))
        return partial

    def _write(
        self, entry: Tensor, sources: Tensor, step: StepInput, mine: TypeInput, caches: LayerCache
    ) -> None:
        """Write all entries of the step, of both segments, before any attention.

        Later entries of a prefill row may exist before its earlier tokens attend. Earlier tokens do not see
        the later entries, because visibility depends on positions only. So writing before attention gives
        the same result as writing after attention. (A ring buffer of the window's size could not write
        first: new entries would overwrite visible entries.)
        """
        entry = self._rotate(self.line_norm(entry.contiguous()).unsqueeze(1), *mine.angles).squeeze(1)
        entries = [entry, sources] if self.compressor is not None else [entry]
        for kind, new in zip(self._kinds, entries, strict=False):
            self._write_lines(caches[kind], step.writes[kind], new)
        if self.compressor is not None and mine.completed is not None:
            self.compressor(caches[self._kinds[1]][0], caches[self._kinds[2]], mine.completed)

    def _attend(
        self, q: Tensor, index_q: Tensor, index_weights: Tensor, shared: SparseInput, caches: LayerCache
    ) -> Tensor:
        """Attend q [T, heads, head_dim] to window entries and groups; return the same shape.

        With groups to choose, ``index_q`` and ``index_weights`` score the groups.
        """
        backend = shared.backends["sparse"]
        mine = shared.types[self._type]
        assert isinstance(backend, SparseBackend)
        out = torch.empty_like(q)
        for segment, plan in zip(shared.step.segments, mine.plans, strict=True):
            if not segment.tokens:
                continue
            rows = slice(segment.begin, segment.begin + segment.tokens)
            core = CoreInput(segment, caches, self._dim**-0.5, plan, self.sinks)
            selected = None
            if mine.reads.top:
                selected = backend.select(index_q[rows], index_weights[rows], core, mine.reads)
            backend.attend(q[rows], out[rows], core, mine.reads, selected)
        return out
