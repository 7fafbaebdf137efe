"""Paged attention by Triton kernels on CUDA devices, in two forms.

    TritonAttention   rows of few queries: one tile per row and keys in splits, so that few rows fill the
                      device. Otherwise large tiles, with keys in one piece, or in splits if there are few
                      tiles. The batch decides between these, and last bits differ: not invariant.
    TritonInvariant   one form for all rows: equal tiles, splits of 1,024 keys at absolute multiples, every
                      step masked. The bits of a query depend on its own row alone.

Neither form reads values from the device. With one tile per row no host column is uploaded either, so a
decode segment can be captured in a CUDA graph. In a ragged segment the device derives the tiles from the
lengths of the rows, so prompts can be captured, too. Triton is imported at the first segment.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from weft.attention.base import AttentionBackend, CoreInput, SegmentInput
from weft.attention.gqa.reach import kernel_window
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops import triton as kernels
from weft.ops.triton import forms
from weft.ops.upload import upload

Tensor = torch.Tensor

NARROW = 64
"""Maximum lines of a row (queries times heads per KV head) in one narrow tile."""
SHORT_SPLIT = 256
"""Keys per split in narrow tiles. Splits are longer if a row would have more than ``MOST_SPLITS`` splits."""
MOST_SPLITS = 32
LONG_SPLIT = 1024
"""Keys per split in wide tiles and in the invariant form."""
FEW_TILES = 64
"""Number of wide tiles times KV heads below which keys are split: an H200 has 132 multiprocessors."""
STATES = 1 << 26
"""Maximum float32 elements for the split states of one launch; more tokens take further launches."""


@dataclass(frozen=True, slots=True)
class _TritonPart:
    """Tiles of one launch. With split keys, the tiles cover exactly the tokens [begin, end)."""

    tiles: Tensor
    """int64 [n]: row << 32 | first query."""
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A segment, cut into tiles for the heads of a layer."""

    form: forms.KernelForm
    split: int
    """Keys per split; 0: keys in one piece."""
    splits: int
    parts: tuple[_TritonPart, ...]
    counters: Tensor | None = None
    """int32 zeros [rows, KV heads] if rows have one query, and keys in splits: see ``ops.triton.attention``.
    The layers of a step use the counters in turn, on one stream."""


@dataclass(slots=True)
class _TritonPrepared:
    """Cut of a segment, computed at the first layer and reused: ``prepare`` does not know the heads."""

    cut: Cut | None = None


class TritonAttention(AttentionBackend):
    """Paged attention by Triton kernels, fast form. Stateless, so threads may share an instance."""

    capturable = True
    _name = "triton"

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError without Triton, and for a model, dtype or device without support."""
        name = self._name
        kernels.check_served(f"attention backend {name!r}", dtype, device)
        if spec.heads % cache.kv_heads or spec.heads // cache.kv_heads > 128:
            raise ConfigError(
                f"{spec.heads} query heads cannot share {cache.kv_heads} KV heads", param="--model"
            )
        if cache.head_dim > 256:
            raise ConfigError(
                f"attention backend {name!r} has no heads of more than 256 dims", param="--attention-backend"
            )

    def ragged_context(self, spec: ModelSpec, tokens: int) -> int:
        return sys.maxsize

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> _TritonPrepared:
        return _TritonPrepared()

    def attend(self, q: Tensor, out: Tensor, core: CoreInput, kind: int, spec: CacheSpec) -> None:
        """Write ``out``; see ``AttentionBackend.attend``.

        The first layer of a step chooses the tiles, which stay in ``prepared``.
        """
        segment = core.segment
        if not segment.tokens:
            return
        from weft.ops.triton.attention import attend

        cache = core.caches[kind]
        prepared = core.prepared if isinstance(core.prepared, _TritonPrepared) else _TritonPrepared()
        if prepared.cut is None:
            cut = self._cut(segment, q.shape[1], spec, q.dtype)
            prepared.cut = replace(cut, counters=_counters(segment, cut, q.shape[1], spec))
        cut = prepared.cut
        whole = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        for part in cut.parts:
            attend(
                q.contiguous(),
                whole,
                cache[0],
                segment.q_offsets,
                segment.starts,
                segment.tables[kind],
                part.tiles,
                form=cut.form,
                window=kernel_window(spec),
                scale=core.scale,
                split=cut.split,
                splits=cut.splits,
                tokens=(part.begin, part.end),
                sinks=core.sinks,
                softcap=core.softcap,
                ends=segment.end_of(kind),
                scales=cache[1] if spec.fp8 else None,
                counters=cut.counters,
            )
        if whole is not out:
            out.copy_(whole)

    def _cut(self, segment: SegmentInput, heads: int, spec: CacheSpec, dtype: torch.dtype) -> Cut:
        """Return the tiles and the kernel form: narrow for few queries per row, wide for many.

        Keys are split where few tiles would leave the device idle.
        """
        group = heads // spec.kv_heads
        most = longest(segment)
        lines = int(segment.host_counts.max()) * group
        if lines <= max(NARROW, group):
            form = forms.narrow(lines, spec.head_dim, dtype)
            split = max(SHORT_SPLIT, forms.power(-(-most // MOST_SPLITS)))
        else:
            form = forms.wide(group, spec.head_dim, dtype)
            split = LONG_SPLIT if most_tiles(segment, form.tile_m // group) * spec.kv_heads < FEW_TILES else 0
        if segment.ragged and split and segment.tokens > _most_tokens(heads, spec, -(-most // split)):
            split = 0
        return make_cut(segment, heads, spec, form, split if most > split else 0)


class TritonInvariant(TritonAttention):
    """Same kernels in one fixed form: output bits depend neither on the batch nor on chunking."""

    invariant = True
    _name = "triton-invariant"

    def ragged_context(self, spec: ModelSpec, tokens: int) -> int:
        # Splits are fixed, and the states of all splits of a captured segment are in memory at once.
        widest = max(cache.head_dim for cache in spec.caches)
        return STATES // (spec.heads * widest * tokens) * LONG_SPLIT

    def _cut(self, segment: SegmentInput, heads: int, spec: CacheSpec, dtype: torch.dtype) -> Cut:
        form = forms.invariant(heads // spec.kv_heads, spec.head_dim, dtype)
        return make_cut(segment, heads, spec, form, LONG_SPLIT)


def _counters(segment: SegmentInput, cut: Cut, heads: int, spec: CacheSpec) -> Tensor | None:
    """Return ``Cut.counters``; None if the merge of the states is a kernel of its own."""
    from weft.ops.triton.attention import MOST_MERGED_HEADS, MOST_MERGED_STATES

    group = heads // spec.kv_heads
    one = not segment.ragged and int(segment.host_counts.max()) == 1
    if not cut.split or not one or group > MOST_MERGED_HEADS or group * cut.splits > MOST_MERGED_STATES:
        return None
    return torch.zeros(segment.rows, spec.kv_heads, dtype=torch.int32, device=segment.starts.device)


def longest(segment: SegmentInput) -> int:
    """Return an upper bound of the keys of the longest row, including its own tokens."""
    return int((segment.host_starts.astype(np.int64) + segment.host_counts).max())


def most_tiles(segment: SegmentInput, queries: int) -> int:
    """Return the number of tiles of ``queries`` queries; an upper bound for a ragged segment."""
    if segment.ragged:
        return (segment.tokens + segment.rows * (queries - 1)) // queries
    return int((-(-segment.host_counts // queries)).sum())


def _most_tokens(heads: int, spec: CacheSpec, splits: int) -> int:
    """Return the maximum tokens of a launch with ``splits`` split states per token and head."""
    return max(1, STATES // (heads * spec.head_dim * splits))


def _ragged_tiles(segment: SegmentInput, queries: int) -> Tensor:
    """Return the tiles of a ragged segment in token order, int64 [``most_tiles``], made on the device. Tiles
    behind the last one are in the last row, behind its queries: nothing is computed for these tiles."""
    counts = segment.q_offsets.diff().long()
    each = (counts + (queries - 1)).div(queries, rounding_mode="floor")  # [rows], tiles of each row
    ends = each.cumsum(0)
    tile = torch.arange(most_tiles(segment, queries), device=ends.device)
    row = torch.searchsorted(ends, tile, right=True).clamp(max=segment.rows - 1)
    return (row << 32) + (tile - (ends - each)[row]) * queries


def make_cut(segment: SegmentInput, heads: int, spec: CacheSpec, form: forms.KernelForm, split: int) -> Cut:
    """Build the tiles in token order. Without splits, tiles with the most keys come first.

    ``spec`` supplies KV heads and head_dim: the number of head groups, and the width of the split states.
    """
    queries = form.tile_m // (heads // spec.kv_heads)
    splits = -(-longest(segment) // split) if split else 1
    if segment.ragged:
        part = _TritonPart(_ragged_tiles(segment, queries), 0, segment.tokens)
        return Cut(form=form, split=split, splits=splits, parts=(part,))
    limit = _most_tokens(heads, spec, splits) if split else segment.tokens
    tiles, ends = tiles_of(segment, queries, longest_first=not split)
    return Cut(form=form, split=split, splits=splits, parts=tuple(parts_of(tiles, ends, limit)))


def tiles_of(
    segment: SegmentInput, queries: int, *, longest_first: bool = False
) -> tuple[Tensor, np.ndarray]:
    """Return (tiles of ``queries`` queries, int64 [n] of row << 32 | first query; end token of each tile).

    Tiles are in token order, or those of most keys come first. In token order, rows of one tile or of equal
    counts copy nothing from the host, so that a captured graph may contain the tiles.
    """
    counts = segment.host_counts.astype(np.int64)
    most = int(counts.max())
    if most > queries and (longest_first or int(counts.min()) < most):
        return _host_tiles(segment, queries, longest_first)
    device = segment.starts.device
    rows = torch.arange(0, segment.rows << 32, 1 << 32, device=device)
    if most <= queries:
        return rows, np.cumsum(counts)
    firsts = np.arange(0, most, queries)
    ends = np.arange(segment.rows)[:, None] * most + np.minimum(firsts + queries, most)
    return (rows.unsqueeze(1) + torch.arange(0, most, queries, device=device)).view(-1), ends.reshape(-1)


def _host_tiles(segment: SegmentInput, queries: int, longest_first: bool) -> tuple[Tensor, np.ndarray]:
    """Compute ``tiles_of`` for any rows, with an upload."""
    counts = segment.host_counts.astype(np.int64)
    each = -(-counts // queries)  # tiles of each row
    rows = np.repeat(np.arange(segment.rows), each)
    firsts = (np.arange(len(rows)) - np.repeat(np.cumsum(each) - each, each)) * queries
    lasts = np.minimum(firsts + queries, counts[rows])
    ends = (np.cumsum(counts) - counts)[rows] + lasts
    packed = (rows << 32) + firsts
    if longest_first:
        packed = packed[np.argsort(-(segment.host_starts[rows] + lasts), kind="stable")]
    return upload(packed, segment.starts.device), ends


def parts_of(tiles: Tensor, ends: np.ndarray, limit: int) -> Iterator[_TritonPart]:
    """Yield consecutive tiles with at most ``limit`` tokens together (a single tile may have more).

    ends: int64 [tiles], end token of each tile. Correct ``ends`` matter only if keys are split.
    """
    first = begin = 0
    while first < len(ends):
        stop = max(first + 1, int(np.searchsorted(ends, begin + limit, side="right")))
        yield _TritonPart(tiles[first:stop], begin, int(ends[stop - 1]))
        first = stop
        begin = int(ends[stop - 1])
