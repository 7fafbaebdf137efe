"""Paged attention with torch operations in one fixed form: for ``--deterministic``, any CPU dtype.

The output bits of a query depend on the query, on its own keys and values, and on their absolute positions.

    pieces   queries of one row, and the heads that share a KV head, form a matrix of a fixed number of rows
             (few rows for decode, many for prefill), padded with zeros
    tiles    of 64 keys at absolute multiples of 64, so that a key has the same place in its tile for every
             query
    scores   [M, dim] x [dim, 64] for each piece and tile: products of fixed shapes (``ops.fixed_shapes``)
    weights  exp(score - largest score that the query sees), 0 for invisible keys
    sums     [M, 64] x [64, dim] for each tile, added in the order of the tiles, starting at zero; a tile
             without visible keys adds zero, which changes no bit

The largest score is exact in any order, so nothing is rescaled. Pieces of similar widths are computed
together. Keys and values invisible to all queries of a piece are set to zero first, because such entries may
hold another sequence's NaN. Computes in float32 (float64 for float64 inputs) and rounds once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch

from weft.attention.base import AttentionBackend, CoreInput, SegmentInput, check_served
from weft.attention.gqa.reach import cap_, first_read
from weft.attention.gqa.torch_backend import BITS
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops import kv_fp8
from weft.ops.fixed_shapes import ProductShapes, product_shapes, products
from weft.ops.torch_ops import wide
from weft.ops.upload import upload

Tensor = torch.Tensor

TILE = 64
"""Keys per tile."""
ROWS = (64, 16)
"""Row counts of query matrices, largest first."""
LIMIT = 1 << 24
"""Maximum elements of keys, or of scores, computed at once (a single piece may need more)."""


@dataclass(frozen=True, slots=True)
class TilePiece:
    """``count`` queries of ``row``, starting at its query ``offset``; ``first``: place of the first query."""

    row: int
    offset: int
    count: int
    first: int
    tiles: int
    """Maximum number of tiles with positions visible to the queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileGroup:
    """P pieces of at most n queries, in one computation over W tiles each."""

    queries: Tensor
    """int64 [P, n]: places in the segment; padding points at the first query of the piece."""
    real: Tensor
    """int64: indices of real queries among the P * n."""
    places: Tensor
    """int64: places of the real queries in the segment."""
    entries: Tensor
    """int64 [planes * P * W * TILE / g]: rows of the cache, seen as entries of g positions."""
    seen: Tensor
    """[P, 1, W * TILE, 1], integers of the cache dtype's width: all bits set if some query may see the
    position."""
    hidden: Tensor
    """bool [P, 1, W, 1, n, TILE]: True for keys that a query must not see."""


@dataclass(slots=True)
class _InvariantPrepared:
    """Cut of a segment, computed at the first layer and reused: ``prepare`` does not know the heads."""

    groups: tuple[TileGroup, ...] = ()
    shared: int = 0
    """Heads that share a KV head; 0 before the first layer."""
    shapes: tuple[ProductShapes, ProductShapes] = (ProductShapes((), ()), ProductShapes((), ()))


class InvariantAttention(AttentionBackend):
    """Invariant backend on torch. Stateless, so threads may share an instance."""

    invariant = True

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError for a model, dtype or device without support.

        Tries the product shapes, which takes time.
        """
        check_served("invariant", dtype, device, BITS, "cpu")
        if spec.heads % cache.kv_heads:
            raise ConfigError(
                f"{spec.heads} query heads cannot share {cache.kv_heads} KV heads", param="--model"
            )
        pair_shapes(cache.head_dim, cache.head_dim, wide(dtype))  # try the shapes before any request

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> _InvariantPrepared:
        return _InvariantPrepared()

    def attend(self, q: Tensor, out: Tensor, core: CoreInput, kind: int, spec: CacheSpec) -> None:
        """Write ``out``; see ``AttentionBackend.attend``.

        The groups of queries are made at the first layer and stay in ``prepared``.
        """
        segment = core.segment
        if not segment.tokens:
            return
        cache = core.caches[kind][0]
        scales = core.caches[kind][1] if spec.fp8 else None
        prepared = core.prepared if isinstance(core.prepared, _InvariantPrepared) else _InvariantPrepared()
        shared = q.shape[1] // spec.kv_heads
        if prepared.shared != shared:
            prepared.shapes = pair_shapes(spec.head_dim, spec.head_dim, wide(q.dtype))
            memory = PieceMemory(2 * spec.kv_heads, spec.head_dim, cache.shape[3], cache.dtype)
            prepared.groups = tuple(cut(segment, kind, spec, memory, shared, prepared.shapes[0].rows))
            prepared.shared = shared
        g = gcd(cache.shape[3], TILE)
        entries = cache.view(-1, g * spec.head_dim)
        entry_scales = None if scales is None else scales.view(-1, g)
        for group in prepared.groups:
            _attend(q, out, entries, entry_scales, group, spec, core, prepared.shapes)


def pair_shapes(keys: int, values: int, dtype: torch.dtype) -> tuple[ProductShapes, ProductShapes]:
    """Return the shapes for (scores, sums) with equal row counts. keys, values: dims of a key and of a
    value."""
    scores = product_shapes(keys, TILE, ROWS, dtype, transposed=True)
    sums = product_shapes(TILE, values, ROWS, dtype, transposed=False)
    both = scores.rows if len(scores.rows) <= len(sums.rows) else sums.rows
    if scores.rows != sums.rows:
        both = (1,) if (1,) in (scores.rows, sums.rows) else both
    return ProductShapes(both, scores.batches), ProductShapes(both, sums.batches)


# --- cutting ---


@dataclass(frozen=True, slots=True)
class PieceMemory:
    """Layout of one layer's cache: [blocks, planes, block, dim]."""

    planes: int
    """Keys and values of each KV head (2 * kv_heads); 1 for entries that are both key and value."""
    dim: int
    block: int
    dtype: torch.dtype


def cut(
    segment: SegmentInput,
    kind: int,
    spec: CacheSpec,
    memory: PieceMemory,
    shared: int,
    rows: tuple[int, ...],
) -> Iterator[TileGroup]:
    """Yield the queries of the segment in groups of pieces of equal shape. Tile counts come from upper
    bounds.

    shared: heads that share keys; rows: allowed row counts of a query matrix.
    """
    kv_heads = max(1, memory.planes // 2)
    most = max(1, rows[0] // shared)
    alike: dict[tuple[int, int], list[TilePiece]] = {}
    begin = 0
    for row, (start, count) in enumerate(
        zip(segment.host_starts.tolist(), segment.host_counts.tolist(), strict=True)
    ):
        for offset in range(0, count, most):
            n = min(most, count - offset)
            fitting = min(size for size in rows if size >= n * shared or size == rows[0])
            reach = n if segment.end_of(kind) is None else count - offset
            tiles = -(-(start + offset + reach) // TILE)
            if spec.window:
                # at most reach + window - 1 positions that begin anywhere in a tile
                tiles = min(tiles, (reach + spec.window - 2) // TILE + 2)
            piece = TilePiece(row, offset, n, begin + offset, tiles)
            alike.setdefault((max(1, fitting // shared), tiles.bit_length()), []).append(piece)
        begin += count
    for (n, _), pieces in alike.items():
        width = max(piece.tiles for piece in pieces)
        each = width * TILE * max(memory.planes * memory.dim, kv_heads * n * shared)
        size = max(1, LIMIT // each)
        for i in range(0, len(pieces), size):
            yield make_group(pieces[i : i + size], n, segment, kind, spec, memory)


def _column(values: list[int], device: torch.device) -> Tensor:
    return upload(np.array(values, np.int64), device)


def make_group(
    pieces: list[TilePiece], n: int, segment: SegmentInput, kind: int, spec: CacheSpec, memory: PieceMemory
) -> TileGroup:
    """Return ``pieces`` of at most ``n`` queries each as one group on the device, for all layers of KV cache
    group ``kind``.
    """
    table = segment.tables[kind]
    starts = segment.starts
    block = memory.block
    device = starts.device
    width = max(piece.tiles for piece in pieces)
    rows = _column([piece.row for piece in pieces], device)
    counts = _column([piece.count for piece in pieces], device).unsqueeze(1)
    first = starts[rows] + _column([piece.offset for piece in pieces], device)  # [P]: position
    lowest = first_read(first, spec)
    keys = (lowest // TILE * TILE).unsqueeze(1) + torch.arange(width * TILE, device=device)  # [P, W * TILE]
    within = torch.arange(n, device=device)
    real = within < counts  # [P, n]
    # [P, n]; padding gets position -1 and sees nothing
    position = (first.unsqueeze(1) + within).where(real, -1)
    ends = position + 1
    if (given := segment.end_of(kind)) is not None:
        places = _column([piece.first for piece in pieces], device).unsqueeze(1) + within
        ends = torch.maximum(ends, given[places.where(real, 0)]).where(real, 0)
    hidden = keys.unsqueeze(1) >= ends.unsqueeze(2)  # [P, n, W * TILE]
    if spec.window:
        hidden |= keys.unsqueeze(1) < first_read(position, spec).unsqueeze(2)
    seen = (keys >= lowest.unsqueeze(1)) & (keys < ends.amax(1, keepdim=True))
    # Entries of g positions: block size and tile size are both multiples of g.
    g = gcd(block, TILE)
    starting = keys[:, ::g]
    table_index = (starting // block).clamp(max=table.shape[1] - 1)  # positions beyond the table are hidden
    at = table[rows.unsqueeze(1), table_index] * memory.planes
    planes = torch.arange(memory.planes, device=device).view(-1, 1, max(1, memory.planes // 2), 1)
    entries = (at[None, :, None, :] + planes) * (block // g) + (starting % block // g)[None, :, None, :]
    begins = _column([piece.first for piece in pieces], device).unsqueeze(1)
    queries = begins + within.where(real, 0)
    return TileGroup(
        queries=queries,
        real=real.view(-1).nonzero().squeeze(1),
        places=queries[real],
        entries=entries.reshape(-1),
        seen=-seen[:, None, :, None].to(BITS[memory.dtype]),
        hidden=hidden.view(len(pieces), n, width, TILE).transpose(1, 2).unsqueeze(2).unsqueeze(1),
    )


# --- computing ---


def _attend(
    q: Tensor,
    out: Tensor,
    entries: Tensor,
    scales: Tensor | None,  # [entries, g], one scale per position; None without 8-bit entries
    group: TileGroup,
    spec: CacheSpec,
    core: CoreInput,
    shapes: tuple[ProductShapes, ProductShapes],
) -> None:
    """Attend the queries of ``group`` and write their rows of ``out`` [T, heads, head_dim]."""
    (pieces, n), kv_heads, dim = group.queries.shape, spec.kv_heads, spec.head_dim
    shared = q.shape[1] // kv_heads
    dtype = wide(q.dtype)
    # [2, P, kv_heads, W * TILE, dim]
    kv = entries.index_select(0, group.entries).view(2, pieces, kv_heads, -1, dim)
    kv.view(group.seen.dtype).bitwise_and_(group.seen)  # +0.0 for any previous content, NaN included
    if scales is not None:
        kv_scales = scales.index_select(0, group.entries).view(kv.shape[:-1])
        kv = kv_fp8.dequantize(kv, kv_scales.where(group.seen.squeeze(-1) != 0, 0.0), dtype)
    k, v = kv.to(dtype).view(2, pieces, kv_heads, -1, TILE, dim)
    folded = q[group.queries].to(dtype).view(pieces, n, kv_heads, shared, dim)
    # [P, kv_heads, shared * n, dim]: the heads of one KV head become rows
    folded = folded.permute(0, 2, 3, 1, 4).reshape(pieces, kv_heads, shared * n, dim)
    size = next((rows for rows in reversed(shapes[0].rows) if rows >= shared * n), shapes[0].rows[0])
    attended = folded.new_empty(folded.shape)
    sinks = None
    if core.sinks is not None:  # [1, kv_heads, shared * n, 1]
        sinks = core.sinks.to(dtype).view(1, kv_heads, shared, 1).repeat_interleave(n, dim=2)
    for begin in range(0, shared * n, size):
        part = slice(begin, min(begin + size, shared * n))
        hidden = group.hidden.expand(-1, -1, -1, shared, -1, -1).flatten(3, 4)[:, :, :, part]
        sink = None if sinks is None else sinks[:, :, part]
        queries = folded[:, :, part]
        attended[:, :, part] = tiles(queries, k, v, hidden, core.scale, size, shapes, sink, core.softcap)
    # [P * n, heads, head_dim]: back from rows per KV head to heads per query
    attended = attended.view(pieces, kv_heads, shared, n, dim).permute(0, 3, 1, 2, 4)
    attended = attended.reshape(pieces * n, kv_heads * shared, dim)
    out[group.places] = attended[group.real].to(out.dtype)


def tiles(
    q: Tensor,  # [P, kv_heads, M or fewer, dim]
    k: Tensor,  # [P, kv_heads, W, TILE, dim]
    v: Tensor,  # [P, kv_heads, W, TILE, dim of values]
    hidden: Tensor,  # [P, 1, W, as many as in q, TILE]
    scale: float,
    size: int,
    shapes: tuple[ProductShapes, ProductShapes],
    sink: Tensor | None,  # [1, kv_heads, as many as in q, 1]
    softcap: float = 0.0,
) -> Tensor:
    """Attend matrices of queries, padded to ``size`` rows.

    Returns a new tensor with the shape of q and the dim of values. A query without visible keys gives 0 / 0
    unless there is a sink.
    """
    pieces, kv_heads, width, _, dim = k.shape
    rows = q.shape[2]
    full = q.new_zeros(pieces, kv_heads, width, size, dim)
    full[:, :, :, :rows] = q.unsqueeze(2)
    right = k.reshape(-1, TILE, dim).transpose(1, 2)
    scores = products(full.view(-1, size, dim), right, shapes[0].batches).view(
        pieces, kv_heads, width, size, TILE
    )
    scores.mul_(scale)
    if softcap:
        cap_(scores, softcap)
    scores[:, :, :, rows:] = 0
    scores[:, :, :, :rows].masked_fill_(hidden, float("-inf"))
    top = scores.amax(dim=(2, 4), keepdim=True)  # [P, kv_heads, 1, M, 1]
    top.masked_fill_(top == float("-inf"), 0)  # a query without visible keys: all weights become exp(-inf)
    weights = scores.sub_(top).exp_()
    values = v.reshape(-1, TILE, v.shape[-1])
    parts = products(weights.view(-1, size, TILE), values, shapes[1].batches)
    parts = parts.view(pieces, kv_heads, width, size, -1)
    masses = weights.sum(dim=-1, keepdim=True)  # [P, kv_heads, W, M, 1]
    # Sum tile by tile in a fixed order: a reduction by torch could choose an order by shape.
    total = torch.zeros_like(parts[:, :, 0])
    mass = torch.zeros_like(masses[:, :, 0])
    for tile in range(width):
        total += parts[:, :, tile]
        mass += masses[:, :, tile]
    total = total[:, :, :rows]
    mass = mass[:, :, :rows]
    if sink is not None:
        mass = mass + (sink - top[:, :, 0, :rows]).exp()
    return total / mass
