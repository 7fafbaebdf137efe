"""Sparse attention on CUDA devices by Triton kernels: scores, choice, and attention to a token's list.

    TritonSparse            splits the lists of few tokens, so that few tokens fill the device
    TritonInvariantSparse   splits of equal size for every token: output bits depend neither on the batch nor
                            on chunks

The choice has equal bits in both backends. No backend reads values from the device, and rows of equal counts
copy nothing from the host, so a decode segment can be captured in a CUDA graph. Triton is imported at the
first segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from weft.attention.base import CoreInput, LayerCache, SegmentInput
from weft.attention.gqa.triton_backend import STATES, longest, parts_of, tiles_of
from weft.attention.sparse.sparse import Reads, SparseBackend
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops import triton as kernels
from weft.ops.latent_ops import Rotation
from weft.ops.triton import forms

Tensor = torch.Tensor

QUERIES = 16
"""Queries of a row that are scored by one program, in rows of several tokens."""
SCORES = 1 << 26
"""Maximum float32 scores of one launch; more tokens take further launches."""
FILL = 512
"""Number of programs that fill a device: an H200 has 132 multiprocessors."""
SHORT_SPLIT = 64
"""Minimum places of a list per split."""
FIXED_SPLIT = 512
"""Places per split of the invariant form."""
MAX_VALUES, MAX_REST, MAX_HEADS = 512, 128, 256
"""Maximum elements of a value; of a key behind its value; heads of an indexer."""


@dataclass(slots=True, kw_only=True)
class _SparsePlan:
    """Tiles of a segment, shared by all layers of a type."""

    tokens: Tensor
    """int64 [T]: row << 32 | query, for each token."""
    scored: Tensor
    """int64 [n]: row << 32 | first query, for each tile of ``queries`` queries."""
    ends: np.ndarray
    """int64 [n]: end token of each tile of ``scored``."""
    queries: int
    groups: int
    """Maximum number of groups visible to a token."""
    listed: int
    """Maximum number of groups in a list."""


class TritonSparse(SparseBackend):
    """Sparse attention by Triton kernels. Stateless, so threads may share an instance."""

    capturable = True
    _name = "triton"

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError without Triton, and for a model, dtype or device without support."""
        name = f"attention backend {self._name!r}"
        kernels.check_served(name, dtype, device)
        values, rest, heads = _sizes(spec)
        if values > MAX_VALUES or rest > MAX_REST or heads > MAX_HEADS:
            raise ConfigError(
                f"{name} has no sparse attention with values of {values}, keys of {values + rest} elements "
                f"and {heads} index heads: the limits are {MAX_VALUES}, {MAX_VALUES + MAX_REST} and "
                f"{MAX_HEADS}",
                param="--attention-backend",
            )

    def plan(self, segment: SegmentInput, reads: Reads, caches: LayerCache) -> _SparsePlan | None:
        if not segment.tokens:
            return None
        queries = 1 if int(segment.host_counts.max()) == 1 else QUERIES
        tokens, ends = tiles_of(segment, 1)
        scored = tokens
        if queries > 1 and reads.top:
            scored, ends = tiles_of(segment, queries)
        groups = 0 if reads.groups is None else longest(segment) // reads.ratio
        return _SparsePlan(
            tokens=tokens,
            scored=scored,
            ends=ends,
            queries=queries,
            groups=groups,
            listed=min(groups, reads.top) if reads.top else groups,
        )

    def select(self, q: Tensor, weights: Tensor, core: CoreInput, reads: Reads) -> Tensor | None:
        """Return the chosen groups, int64 [T, top], ascending, then -1.

        Return None if no token can see more than ``top`` groups.
        """
        return self._select(q, None, weights, core, reads)

    def select_rotated(
        self, q: Tensor, rotation: Rotation, weights: Tensor, core: CoreInput, reads: Reads
    ) -> Tensor | None:
        """Return ``select`` of the rotated queries. The kernel of the scores rotates."""
        return self._select(q, rotation, weights, core, reads)

    def _select(
        self, q: Tensor, rotation: Rotation | None, weights: Tensor, core: CoreInput, reads: Reads
    ) -> Tensor | None:
        plan = cast(_SparsePlan | None, core.prepared)
        segment = core.segment
        if plan is None or plan.groups <= reads.top:
            return None
        from weft.ops.triton import choice

        assert reads.groups is not None
        cache = core.caches[reads.groups][-1]
        rows = (segment.q_offsets, segment.starts)
        chosen = torch.empty(len(q), reads.top, dtype=torch.int64, device=q.device)
        width = -(-plan.groups // 4) * 4  # rows of scores begin at multiples of 16 bytes
        for part in parts_of(plan.scored, plan.ends, max(1, SCORES // width)):
            count = part.end - part.begin
            scores = torch.empty(count, width, dtype=torch.float32, device=q.device)
            programs = min(-(-plan.groups // choice.SCORED), max(1, FILL // part.tiles.shape[0]))
            choice.index_scores(
                q,
                weights,
                scores,
                cache,
                *rows,
                segment.tables[reads.groups],
                part.tiles,
                ratio=reads.ratio,
                top=reads.top,
                queries=plan.queries,
                programs=programs,
                token_base=part.begin,
                rotation=rotation,
            )
            tiles = plan.tokens[part.begin : part.end]
            choice.choose(scores, chosen, *rows, tiles, ratio=reads.ratio, token_base=part.begin)
        return chosen

    def attend(self, q: Tensor, out: Tensor, core: CoreInput, reads: Reads, selected: Tensor | None) -> None:
        """Write ``out``; see ``SparseBackend.attend``."""
        self._attend(q, None, out, core, reads, selected)

    def attend_rotated(
        self,
        absorbed: Tensor,
        q: Tensor,
        rotation: Rotation,
        out: Tensor,
        core: CoreInput,
        reads: Reads,
        selected: Tensor | None,
    ) -> None:
        """Write ``out``; see ``SparseBackend.attend_rotated``. The kernel of attention rotates."""
        self._attend(absorbed, (q, rotation), out, core, reads, selected)

    def _attend(
        self,
        q: Tensor,
        rest: tuple[Tensor, Rotation] | None,
        out: Tensor,
        core: CoreInput,
        reads: Reads,
        selected: Tensor | None,
    ) -> None:
        """Write ``out``. ``rest``: end of the queries, and its rotation; see ``ops.triton.sparse.attend``."""
        plan, segment = cast(_SparsePlan | None, core.prepared), core.segment
        if plan is None:
            return
        from weft.ops.triton import sparse

        heads = q.shape[1]
        entries, groups = _cache(core, reads.entries), _cache(core, reads.groups)
        fp8 = any(one is not None and len(one[0]) > 1 for one in (entries, groups))
        form = forms.sparse(heads, q.dtype, fp8)
        group = max(size for size in range(1, form.tile_m + 1) if heads % size == 0)
        front = 0 if reads.entries is None else _steps(reads.window, form.tile_n)
        places = front + plan.listed
        split = self._split(segment.tokens * (heads // group), places, form.tile_n)
        splits = -(-places // split) if split else 1
        limit = max(1, STATES // (heads * out.shape[2] * splits)) if split else segment.tokens
        whole = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        for begin in range(0, segment.tokens, limit):
            end = min(begin + limit, segment.tokens)
            sparse.attend(
                q.contiguous(),
                whole,
                entries,
                groups,
                selected,
                segment.q_offsets,
                segment.starts,
                plan.tokens[begin:end],
                form=form,
                group=group,
                window=reads.window,
                ratio=reads.ratio,
                scale=core.scale,
                sinks=core.sinks,
                split=split,
                splits=splits,
                tokens=(begin, end),
                rest=rest,
            )
        if whole is not out:
            out.copy_(whole)

    def _split(self, programs: int, places: int, step: int) -> int:
        """Return the places per split, whole steps; 0: lists in one piece."""
        wanted = max(1, FILL // programs)
        split = max(SHORT_SPLIT, _steps(-(-places // wanted), step))
        return split if places > split else 0


class TritonInvariantSparse(TritonSparse):
    """Same kernels with splits at fixed places: output bits depend neither on the batch nor on chunks."""

    invariant = True
    _name = "triton-invariant"

    def _split(self, programs: int, places: int, step: int) -> int:
        return FIXED_SPLIT


def _steps(places: int, step: int) -> int:
    """Return ``places``, rounded up to whole steps."""
    return -(-places // step) * step


def _cache(core: CoreInput, kind: int | None) -> tuple[tuple[Tensor, ...], Tensor] | None:
    """Return (caches, block table) of a KV cache group."""
    return None if kind is None else (core.caches[kind], core.segment.tables[kind])


def _sizes(spec: ModelSpec) -> tuple[int, int, int]:
    """Return (elements of a value, elements of a key behind its value, heads of the indexer)."""
    if spec.mla is not None and spec.index is not None:
        return spec.mla.kv_lora, spec.mla.rope, spec.index.heads
    return spec.head_dim, 0, 0 if spec.sparse is None else spec.sparse.index_heads
