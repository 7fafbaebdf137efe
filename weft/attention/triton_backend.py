"""Paged attention by Triton kernels on CUDA devices, in two forms.

    TritonAttention   rows of few queries: one tile a row, keys in splits, so that few rows fill the device;
                      else large tiles, keys in one piece, or in splits where there are too few tiles. What is
                      beside a row chooses between them, and they differ in their last bits: not invariant.
    TritonInvariant   one form for everything: equal tiles, splits of 1,024 keys at absolute multiples, every
                      step masked. A query's bits depend on its own row alone.

Neither asks the device anything; with one tile a row no host column is uploaded either, so that a decode
segment can be captured in a CUDA graph. Triton is imported when the first segment comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from weft.attention.base import AttentionBackend, SegmentInput, refuse_fp8
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops import triton as kernels
from weft.ops.triton import forms
from weft.ops.upload import upload

Tensor = torch.Tensor

NARROW = 64
"""Lines of a row (queries times the heads that share a KV head) that still make one narrow tile."""
SHORT_SPLIT = 256
"""Keys of a split in narrow tiles; more where rows are so long that there were over ``MOST_SPLITS``."""
MOST_SPLITS = 32
LONG_SPLIT = 1024
"""Keys of a split in wide tiles and in the invariant form."""
FEW_TILES = 64
"""Wide tiles times KV heads below which keys are split: an H200 has 132 multiprocessors."""
STATES = 1 << 26
"""float32 elements that the states of one launch may take; tokens beyond them are launched separately."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The tiles of one launch. Where keys are split they hold exactly the tokens [begin, end)."""

    tiles: Tensor
    """int64 [n]: row << 32 | first query."""
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A segment, cut up for the heads of a layer."""

    form: forms.KernelForm
    split: int
    """Keys of a split, 0 for one piece."""
    splits: int
    parts: tuple[_Part, ...]


@dataclass(slots=True)
class _Prepared:
    """The cut of a segment: made for the first layer (which knows its heads), kept for the others."""

    cut: Cut | None = None


class TritonAttention(AttentionBackend):
    """Paged attention by Triton kernels, in the fast form. Stateless; any number of threads may share it."""

    capturable = True
    _name = "triton"

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        name = self._name
        if device.type != "cuda" and not kernels.interpreting():
            raise ConfigError(f"attention backend {name!r} does not run on {device.type}", param="--device")
        if not kernels.available():
            raise ConfigError(
                f"attention backend {name!r} needs Triton: pip install 'weft[cuda]'",
                param="--attention-backend",
            )
        refuse_fp8(name, cache)
        if dtype not in kernels.DTYPES:
            raise ConfigError(f"attention backend {name!r} has no {dtype}", param="--dtype")
        if spec.heads % cache.kv_heads or spec.heads // cache.kv_heads > 128:
            raise ConfigError(
                f"{spec.heads} query heads cannot share {cache.kv_heads} KV heads", param="--model"
            )
        if cache.head_dim > 256:
            raise ConfigError(
                f"attention backend {name!r} has no heads of more than 256 dims", param="--attention-backend"
            )

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> _Prepared:
        return _Prepared()

    def attend(
        self,
        q: Tensor,
        out: Tensor,
        cache: Tensor,
        segment: SegmentInput,
        kind: int,
        spec: CacheSpec,
        scale: float,
        prepared: object = None,
        sinks: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> None:
        if not segment.tokens:
            return
        from weft.ops.triton.attention import attend

        if not isinstance(prepared, _Prepared):
            prepared = _Prepared()
        if prepared.cut is None:
            prepared.cut = self._cut(segment, q.shape[1], spec, q.dtype)
        cut = prepared.cut
        whole = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        for part in cut.parts:
            attend(
                q.contiguous(),
                whole,
                cache,
                segment.q_offsets,
                segment.starts,
                segment.tables[kind],
                part.tiles,
                form=cut.form,
                window=spec.window,
                scale=scale,
                split=cut.split,
                splits=cut.splits,
                tokens=(part.begin, part.end),
                sinks=sinks,
            )
        if whole is not out:
            out.copy_(whole)

    def _cut(self, segment: SegmentInput, heads: int, spec: CacheSpec, dtype: torch.dtype) -> Cut:
        group = heads // spec.kv_heads
        most = longest(segment)
        lines = int(segment.host_counts.max()) * group
        if lines <= max(NARROW, group):
            form = forms.narrow(lines, spec.head_dim, dtype)
            split = max(SHORT_SPLIT, forms.power(-(-most // MOST_SPLITS)))
        else:
            form = forms.wide(group, spec.head_dim, dtype)
            tiles = int((-(-segment.host_counts // (form.tile_m // group))).sum())
            split = LONG_SPLIT if tiles * spec.kv_heads < FEW_TILES else 0
        return make_cut(segment, heads, spec, form, split if most > split else 0)


class TritonInvariant(TritonAttention):
    """The same kernels in a form whose bits depend neither on the batch nor on how a prompt was cut."""

    invariant = True
    _name = "triton-invariant"

    def _cut(self, segment: SegmentInput, heads: int, spec: CacheSpec, dtype: torch.dtype) -> Cut:
        form = forms.invariant(heads // spec.kv_heads, spec.head_dim, dtype)
        return make_cut(segment, heads, spec, form, LONG_SPLIT)


def longest(segment: SegmentInput) -> int:
    """Keys of the longest row, its own included: an upper bound."""
    return int((segment.host_starts.astype(np.int64) + segment.host_counts).max())


def make_cut(segment: SegmentInput, heads: int, spec: CacheSpec, form: forms.KernelForm, split: int) -> Cut:
    """Tiles in the order of their tokens; without splits those with the most keys first.

    Of ``spec`` the KV heads and their dim count: as many parts of the heads, states as wide.
    """
    queries = form.tile_m // (heads // spec.kv_heads)
    device = segment.starts.device
    splits = -(-longest(segment) // split) if split else 1
    limit = max(1, STATES // (heads * spec.head_dim * splits)) if split else segment.tokens
    counts = segment.host_counts.astype(np.int64)
    if int(counts.max()) <= queries:
        # Made on the device, without a copy from the host, so that it can be captured.
        tiles = torch.arange(0, segment.rows << 32, 1 << 32, device=device)
        ends = np.cumsum(counts)
    else:
        each = -(-counts // queries)  # tiles of each row
        rows = np.repeat(np.arange(segment.rows), each)
        firsts = (np.arange(len(rows)) - np.repeat(np.cumsum(each) - each, each)) * queries
        lasts = np.minimum(firsts + queries, counts[rows])
        ends = (np.cumsum(counts) - counts)[rows] + lasts
        packed = (rows << 32) + firsts
        if not split:
            packed = packed[np.argsort(-(segment.host_starts[rows] + lasts), kind="stable")]
        tiles = upload(packed, device)
    return Cut(form=form, split=split, splits=splits, parts=tuple(_parts(tiles, ends, limit)))


def _parts(tiles: Tensor, ends: np.ndarray, limit: int) -> Iterator[_Part]:
    """Consecutive tiles of at most ``limit`` tokens together (one tile may have more).

    ends: int64 [tiles], the first token after each tile; read only where that makes more than one part.
    """
    first = begin = 0
    while first < len(ends):
        stop = max(first + 1, int(np.searchsorted(ends, begin + limit, side="right")))
        yield _Part(tiles[first:stop], begin, int(ends[stop - 1]))
        first = stop
        begin = int(ends[stop - 1])
