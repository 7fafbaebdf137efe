"""Sparse attention with torch operations, for CPU and CUDA and every dtype: the reference.

Rows are cut into pieces of neighbouring queries. Similar pieces are computed together, as a tile:

    n queries   positions p .. p + n - 1 of a row
    keys        entries in the window of any query, then entries of groups: all visible groups, masked by the
                choice of each query; or only the chosen groups, for single queries that choose few of many
    zeros       for keys invisible to all queries of the piece: such keys may hold another sequence's NaN

Sums, scores and exponentials are float32 (float64 in float64 models). Shapes come from host columns,
positions from device columns, so nothing waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from weft.attention.base import CoreInput, LayerCache, SegmentInput
from weft.attention.sparse.sparse import Reads, SparseBackend, places
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops import kv_fp8
from weft.ops.registry import ALL_DTYPES
from weft.ops.sampling import top_ids
from weft.ops.torch_ops import wide
from weft.ops.upload import upload

Tensor = torch.Tensor

TILE = 128
"""Maximum queries per piece."""
SCORES = 1 << 22
"""Maximum scores of one tile (a single query may need more)."""
GATHER = 1 << 23
"""Maximum elements gathered at once (a single piece may need more)."""


@dataclass(frozen=True, slots=True)
class _SparsePiece:
    """``count`` queries of ``row``, starting at its query ``offset``; ``first``: place of the first query."""

    row: int
    offset: int
    count: int
    first: int
    entries: int
    """Maximum number of visible window entries."""
    groups: int
    """Maximum number of visible groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """B pieces of n queries each, in one computation over K keys: window entries, then groups."""

    tokens: Tensor | slice
    """Places of the B * n queries in the segment."""
    pieces: int
    queries: int
    rows: Tensor
    """int64 [B]."""
    entries: Tensor | None
    """int64 [B, K of the window]: entries of the cache seen as [blocks * block, width]."""
    groups: Tensor | None
    """int64 [B, K of the groups]: entries of the groups' cache; None if only chosen groups are gathered."""
    visible: Tensor
    """bool [B, n, K]; without the groups if ``groups`` is None."""
    chooses: bool
    """True if some query sees more groups than ``top``, so that choices apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    tiles: tuple[_Tile, ...]
    scored: tuple[_Tile, ...]
    """Tiles over the groups of pieces with more visible groups than a token chooses."""
    limits: Tensor
    """int64 [T]: number of visible groups of each token."""


class TorchSparse(SparseBackend):
    """Reference backend of sparse attention. Stateless, so threads may share an instance."""

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError for a dtype, device or cache without support."""
        if dtype not in ALL_DTYPES:
            raise ConfigError(f"attention backend 'torch' has no {dtype}", param="--dtype")
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"attention backend 'torch' does not run on {device.type}", param="--device")

    def plan(self, segment: SegmentInput, reads: Reads, caches: LayerCache) -> _Plan:
        """Return the tiles of a segment for attention and for scores, staged on the device."""
        pieces = list(_cut(segment, reads))
        tiles = tuple(_tile(some, segment, reads, caches) for some in _alike(pieces, reads))
        scored: tuple[_Tile, ...] = ()
        if reads.top:
            alone = replace(reads, entries=None, heads=reads.index_heads, top=0)
            pieces = [piece for piece in _cut(segment, alone) if piece.groups > reads.top]
            scored = tuple(_tile(some, segment, alone, caches) for some in _alike(pieces, alone))
        return _Plan(tiles=tiles, scored=scored, limits=_limits(segment, reads))

    def select(self, q: Tensor, weights: Tensor, core: CoreInput, reads: Reads) -> Tensor | None:
        """Return the chosen groups, int64 [T, top], -1 for no group.

        Return None if no query has more than ``top`` groups to choose from.
        """
        plan = cast(_Plan, core.prepared)
        if not plan.scored:
            return None
        assert reads.groups is not None
        cache = core.caches[reads.groups][-1]
        keys = cache.view(-1, cache.shape[2])[:, -q.shape[2] :]
        # [T, top]: tokens without scores choose groups 0, 1, ..; invisible groups become -1 below.
        chosen = torch.arange(reads.top, device=q.device).expand(len(q), -1).clone()
        for tile in plan.scored:
            chosen[tile.tokens] = top_ids(_scores(q, weights, keys, tile), reads.top)
        return chosen.masked_fill_(chosen >= plan.limits.unsqueeze(1), -1)

    def attend(self, q: Tensor, out: Tensor, core: CoreInput, reads: Reads, selected: Tensor | None) -> None:
        """Write ``out`` tile by tile; see ``SparseBackend.attend``."""
        for tile in cast(_Plan, core.prepared).tiles:
            keys, visible = _keys(tile, selected, core.caches, core.segment, reads)
            made = _attend(q[tile.tokens], keys, visible, out.shape[2], core.sinks, core.scale)
            out[tile.tokens] = made.to(out.dtype)


# --- pieces and tiles ---


def _cut(segment: SegmentInput, reads: Reads) -> Iterator[_SparsePiece]:
    """Yield all queries of the segment as pieces, in order. Sizes come from upper bounds of the starts."""
    begin = 0
    for row, (start, count) in enumerate(
        zip(segment.host_starts.tolist(), segment.host_counts.tolist(), strict=True)
    ):
        offset = 0
        while offset < count:
            piece = _sized(row, start, offset, min(TILE, count - offset), begin, reads)
            # A piece must not need more than ``SCORES`` scores.
            most = max(1, SCORES // (reads.heads * max(1, piece.entries + piece.groups)))
            if piece.count > most:
                piece = _sized(row, start, offset, most, begin, reads)
            if reads.top and piece.count * reads.top < piece.groups:
                # If each query chooses few of many groups, gathering only the chosen groups of single queries
                # is cheaper.
                for i in range(offset, offset + piece.count):
                    yield _sized(row, start, i, 1, begin, reads)
            else:
                yield piece
            offset += piece.count
        begin += count


def _sized(row: int, start: int, offset: int, count: int, begin: int, reads: Reads) -> _SparsePiece:
    end = start + offset + count
    entries = 0 if reads.entries is None else min(count + reads.window - 1, end)
    groups = 0 if reads.groups is None else end // reads.ratio
    return _SparsePiece(row, offset, count, begin + offset, entries, groups)


def _picks(piece: _SparsePiece, reads: Reads) -> bool:
    return 0 < reads.top < piece.groups and piece.count == 1


def _alike(pieces: list[_SparsePiece], reads: Reads) -> Iterator[list[_SparsePiece]]:
    """Yield pieces to compute together: equal counts, similar numbers of keys, within the memory limits."""
    alike: dict[tuple[int, bool, int], list[_SparsePiece]] = {}
    for piece in pieces:
        picks = _picks(piece, reads)
        chooses = 0 < reads.top < piece.groups
        size = 0 if picks else (piece.groups + 1).bit_length()
        alike.setdefault((piece.count, chooses, size), []).append(piece)
    for batch in alike.values():
        keys = max(piece.entries + (reads.top if _picks(piece, reads) else piece.groups) for piece in batch)
        keys = max(keys, 1)
        most = min(GATHER // (keys * reads.dim), SCORES // (keys * batch[0].count * reads.heads))
        for i in range(0, len(batch), max(1, most)):
            yield batch[i : i + max(1, most)]


def _tile(pieces: list[_SparsePiece], segment: SegmentInput, reads: Reads, caches: LayerCache) -> _Tile:
    """Return pieces of equal counts as one tile, staged on the device.

    Positions are exact, sizes are upper bounds.
    """
    device = segment.starts.device
    n = pieces[0].count
    rows = _column([piece.row for piece in pieces], device)
    p = segment.starts[rows] + _column([piece.offset for piece in pieces], device)  # [B]: first position
    queries = p.unsqueeze(1) + torch.arange(n, device=device)  # [B, n]
    entries = groups = None
    seen = []
    if reads.entries is not None:
        lowest = (p - reads.window + 1).clamp(min=0)
        keys = lowest.unsqueeze(1) + torch.arange(max(piece.entries for piece in pieces), device=device)
        entries = places(segment.tables[reads.entries], rows, keys, caches[reads.entries][0].shape[1])
        keys = keys.unsqueeze(1)
        # [B, n, K of the window]
        at = queries.unsqueeze(2)
        seen.append((keys <= at) & (keys > at - reads.window))
    picks = _picks(pieces[0], reads)
    if reads.groups is not None and not picks:
        ids = torch.arange(max(piece.groups for piece in pieces), device=device)
        per_block = caches[reads.groups][0].shape[1]
        groups = places(segment.tables[reads.groups], rows, ids.expand(len(pieces), -1), per_block)
        # [B, n, K of the groups]: groups that are complete at the query
        seen.append(ids < ((queries + 1) // reads.ratio).unsqueeze(2))
    return _Tile(
        tokens=_tokens(pieces, device),
        pieces=len(pieces),
        queries=n,
        rows=rows,
        entries=entries,
        groups=groups,
        visible=torch.cat(seen, dim=2) if seen else queries.new_empty(*queries.shape, 0, dtype=torch.bool),
        chooses=0 < reads.top < pieces[0].groups,
    )


def _column(values: list[int], device: torch.device) -> Tensor:
    return upload(np.array(values, np.int64), device)


def _tokens(pieces: list[_SparsePiece], device: torch.device) -> Tensor | slice:
    """Return the tokens of the pieces, in order: a slice if consecutive, else int64 [B * n]."""
    n = pieces[0].count
    first = pieces[0].first
    if all(piece.first == first + i * n for i, piece in enumerate(pieces)):
        return slice(first, first + n * len(pieces))
    begins = _column([piece.first for piece in pieces], device)
    return (begins.unsqueeze(1) + torch.arange(n, device=device)).view(-1)


def _limits(segment: SegmentInput, reads: Reads) -> Tensor:
    """Return the number of complete groups at each token, int64 [T]."""
    counts = segment.host_counts.astype(np.int64)
    device = segment.starts.device
    rows = np.repeat(np.arange(segment.rows), counts)
    within = np.arange(segment.tokens) - np.repeat(np.cumsum(counts) - counts, counts)
    return (segment.starts[upload(rows, device)] + upload(within, device) + 1) // reads.ratio


# --- what is computed ---


def _scores(q: Tensor, weights: Tensor, keys: Tensor, tile: _Tile) -> Tensor:
    """Return scores, wide [B * n, groups]; -inf for groups invisible to a query.

    q: [T, heads, dim]; weights: wide [T, heads]; keys: [entries, dim].
    """
    assert tile.groups is not None
    b = tile.pieces
    n = tile.queries
    heads = q.shape[1]
    found = keys.index_select(0, tile.groups.reshape(-1)).view(b, -1, q.shape[2]).to(weights.dtype)
    folded = q[tile.tokens].reshape(b, n * heads, -1).to(weights.dtype)
    # [B * n, heads, groups]
    each = torch.bmm(folded, found.transpose(1, 2)).relu_().view(b * n, heads, -1)
    made = torch.bmm(weights[tile.tokens].unsqueeze(1), each).squeeze(1)
    # An unwritten entry may turn its own column into NaN; no column affects another column.
    return made.masked_fill_(~tile.visible.view(b * n, -1), -torch.inf)


def _keys(
    tile: _Tile, selected: Tensor | None, caches: LayerCache, segment: SegmentInput, reads: Reads
) -> tuple[Tensor, Tensor]:
    """Return (keys [B, K, dim], visible bool [B, n, K]) of a tile. Keys invisible to all queries are zero."""
    b = tile.pieces
    n = tile.queries
    visible = tile.visible
    found = []
    if reads.entries is not None:
        assert tile.entries is not None
        found.append(_take(caches[reads.entries], tile.entries, reads.dim))
    if reads.groups is not None:
        cache = caches[reads.groups]
        groups = tile.groups
        if tile.chooses:
            assert selected is not None
            chosen = selected[tile.tokens]  # [B * n, top]
            # ``groups`` None: single queries (n = 1), gather the chosen groups. Else mask the visible groups
            # by the choice.
            if groups is None:
                per_block = cache[0].shape[1]
                groups = places(segment.tables[reads.groups], tile.rows, chosen.clamp(min=0), per_block)
                visible = torch.cat((visible, (chosen >= 0).unsqueeze(1)), dim=2)
            else:
                count = groups.shape[1]
                mask = visible.new_zeros(b * n, count + 1)  # the last column is for no group
                mask.scatter_(1, torch.where(chosen < 0, count, chosen), True)
                before = visible.shape[2] - count
                mask = mask[:, :count].view(b, n, count) & visible[..., before:]
                visible = torch.cat((visible[..., :before], mask), dim=2)
        assert groups is not None
        found.append(_take(cache, groups, reads.dim))
    keys = torch.cat(found, dim=1)
    return keys.masked_fill_(~visible.any(dim=1).unsqueeze(2), 0.0), visible


def _take(caches: tuple[Tensor, ...], entries: Tensor, dim: int) -> Tensor:
    """Return [B, K, dim]: the first elements of the entries [B, K]."""
    return kv_fp8.take_lines(caches, entries.reshape(-1), dim).view(*entries.shape, dim)


def _attend(
    q: Tensor, keys: Tensor, visible: Tensor, values: int, sinks: Tensor | None, scale: float
) -> Tensor:
    """Attend q [B * n, heads, dim] to keys [B, K, dim], visible: bool [B, n, K]. Return wide [B * n, heads,
    values].

    A query without visible keys gets zeros.
    """
    exact = wide(q.dtype)
    b = visible.shape[0]
    n = visible.shape[1]
    heads = q.shape[1]
    keys = keys.to(exact)
    folded = q.reshape(b, n * heads, -1).to(exact) * scale
    scores = torch.bmm(folded, keys.transpose(1, 2)).view(b, n, heads, -1)
    scores.masked_fill_(~visible.unsqueeze(2), -torch.inf)
    # Finite for queries without visible keys: -inf - -inf would be NaN.
    top = scores.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(exact).min)
    if sinks is not None:
        sinks = sinks.to(exact).unsqueeze(1)
        top = torch.maximum(top, sinks)
    weights = scores.sub_(top).exp_()
    mass = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        mass = mass + (sinks - top).exp()
    made = torch.bmm(weights.view(b, n * heads, -1), keys[..., :values]).view(b, n, heads, values)
    return (made / mass.clamp(min=torch.finfo(exact).tiny)).view(b * n, heads, values)
