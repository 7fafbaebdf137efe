"""Paged attention with torch operations, for CPU and CUDA and every dtype.

Rows are cut into pieces of at most ``TILE`` queries; pieces with equally many queries and similarly many
blocks are computed together, so decode rows batch and prefill chunks mostly stand alone, by one path:

    piece    queries          row r, positions p .. p + n - 1
    blocks   full             0 .. block of p + n - 1
             window           block of max(0, p - window + 1) .. block of p + n - 1
    gather   [2, B, kv_heads, width * block, head_dim]    one copy, whole blocks
    zero     positions that no query of the piece may see: they can hold another sequence's NaN, and
             0 * NaN is NaN
    attend   queries of one KV head folded into one matrix, [B, kv_heads, group * n, head_dim]

Shapes come from host columns, positions from device columns; nothing here waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from weft.attention.base import AttentionBackend, SegmentInput
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops import kv_fp8
from weft.ops.upload import upload

Tensor = torch.Tensor

TILE = 128
"""Queries of one piece at most: bounds the mask and, where scores are materialized, the scores."""
GATHER = 1 << 24
"""Elements gathered at once at most (a single piece may need more)."""

#: The dtypes of models that can be served (the last: of their caches), and the integers of their width.
BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    kv_fp8.VALUES: torch.int8,
}


@dataclass(frozen=True, slots=True)
class Piece:
    """``count`` queries of ``row``, from its query ``offset`` on; ``first`` is their place in the segment."""

    row: int
    offset: int
    count: int
    first: int
    width: int
    """Blocks that hold every position the queries may see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceGroup:
    """B pieces of n queries each, computed together."""

    tokens: Tensor | slice
    """The B * n queries' places in the segment."""
    pieces: int
    queries: int
    gather: Tensor
    """int64 [2 * B * kv_heads * width]: rows of the cache as [blocks * 2 * kv_heads, block * head_dim], or
    [B * width] of a latent one as [blocks, block * width]."""
    seen: Tensor
    """[B, 1, width * block, 1], integers of the cache dtype's width: all bits set where a query may see the
    position, else 0."""
    visible: Tensor
    """bool [B, 1, n, width * block]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    groups: tuple[PieceGroup, ...]


class TorchAttention(AttentionBackend):
    """The reference backend of grouped-query attention. Stateless; any number of threads may share it."""

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if dtype not in BITS:
            raise ConfigError(f"attention backend 'torch' has no {dtype}", param="--dtype")
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"attention backend 'torch' does not run on {device.type}", param="--device")
        if spec.heads % cache.kv_heads:
            raise ConfigError(
                f"{spec.heads} query heads cannot share {cache.kv_heads} KV heads", param="--model"
            )

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> _Prepared:
        pieces = cut(segment, spec.window, block_size)
        planes = 2 * spec.kv_heads
        limit = GATHER // (planes * block_size * spec.head_dim)
        return _Prepared(
            groups=tuple(
                make_group(g, segment, kind, spec, block_size, dtype, planes=planes)
                for g in batches(pieces, limit)
            ),
        )

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
        if not isinstance(prepared, _Prepared):
            prepared = self.prepare(segment, kind, spec, cache.shape[3], q.dtype)
        if not segment.tokens:
            return
        entries = cache.view(-1, cache.shape[3] * spec.head_dim)
        for group in prepared.groups:
            out[group.tokens] = _attend(q[group.tokens], entries, group, spec, scale, sinks, scales)


def cut(segment: SegmentInput, window: int, block_size: int) -> list[Piece]:
    """All queries of the segment as pieces, in order. Widths come from upper bounds, so they suffice."""
    pieces = []
    begin = 0
    for row, (start, count) in enumerate(
        zip(segment.host_starts.tolist(), segment.host_counts.tolist(), strict=True)
    ):
        for offset in range(0, count, TILE):
            n = min(TILE, count - offset)
            width = -(-(start + offset + n) // block_size)
            if window:
                # n + window - 1 positions that begin anywhere in a block
                width = min(width, (n + window - 2) // block_size + 2)
            pieces.append(Piece(row, offset, n, begin + offset, width))
        begin += count
    return pieces


def batches(pieces: list[Piece], limit: int) -> Iterator[list[Piece]]:
    """Pieces to compute together: equal counts, widths within a factor of two, ``limit`` blocks at most."""
    alike: dict[tuple[int, int], list[Piece]] = {}
    for piece in pieces:
        alike.setdefault((piece.count, piece.width.bit_length()), []).append(piece)
    for batch in alike.values():
        most = max(1, limit // max(piece.width for piece in batch))
        for i in range(0, len(batch), most):
            yield batch[i : i + most]


def _column(values: list[int], device: torch.device) -> Tensor:
    return upload(np.array(values, np.int64), device)


def make_group(
    pieces: list[Piece],
    segment: SegmentInput,
    kind: int,
    spec: CacheSpec,
    block_size: int,
    dtype: torch.dtype,
    *,
    planes: int,
) -> PieceGroup:
    """planes: entries of one position that lie in planes of their own, 2 * kv_heads or 1."""
    table = segment.tables[kind]
    starts = segment.starts
    device = starts.device
    n = pieces[0].count
    width = max(piece.width for piece in pieces)
    rows = _column([piece.row for piece in pieces], device)
    p = starts[rows] + _column([piece.offset for piece in pieces], device)  # [B]: position of the first query
    if spec.window:
        lowest = (p - spec.window + 1).clamp(min=0)
    else:
        lowest = torch.zeros_like(p)
    table_index = (lowest // block_size).unsqueeze(1) + torch.arange(width, device=device)  # [B, width]
    blocks = table[rows.unsqueeze(1), table_index.clamp(max=table.shape[1] - 1)]
    keys = table_index.unsqueeze(2) * block_size + torch.arange(block_size, device=device)
    keys = keys.view(len(pieces), -1)  # [B, width * block]: absolute positions
    queries = p.unsqueeze(1) + torch.arange(n, device=device)  # [B, n]
    visible = keys.unsqueeze(1) <= queries.unsqueeze(2)
    if spec.window:
        visible &= keys.unsqueeze(1) > queries.unsqueeze(2) - spec.window
    seen = (keys >= lowest.unsqueeze(1)) & (keys < (p + n).unsqueeze(1))
    # An entry past the table was clamped to a block it does not name; its positions lie past the row's end.
    plane = torch.arange(planes, device=device).view(-1, 1, max(1, planes // 2), 1)
    return PieceGroup(
        tokens=_places(pieces, device),
        pieces=len(pieces),
        queries=n,
        gather=(blocks[None, :, None, :] * planes + plane).view(-1),
        seen=-seen[:, None, :, None].to(BITS[kv_fp8.VALUES if spec.fp8 else dtype]),
        visible=visible.unsqueeze(1),
    )


def _places(pieces: list[Piece], device: torch.device) -> Tensor | slice:
    n = pieces[0].count
    first = pieces[0].first
    if all(piece.first == first + i * n for i, piece in enumerate(pieces)):
        return slice(first, first + n * len(pieces))
    begins = _column([piece.first for piece in pieces], device)
    return (begins.unsqueeze(1) + torch.arange(n, device=device)).view(-1)


def _attend(
    q: Tensor,
    entries: Tensor,
    group: PieceGroup,
    spec: CacheSpec,
    scale: float,
    sinks: Tensor | None,
    scales: Tensor | None,
) -> Tensor:
    """q: [B * n, heads, head_dim]; returns the same shape."""
    b = group.pieces
    n = group.queries
    kv_heads = spec.kv_heads
    dim = spec.head_dim
    shared = q.shape[1] // kv_heads
    kv = kv_fp8.take(entries, group.gather).view(2, b, kv_heads, -1, dim)
    kv.view(group.seen.dtype).bitwise_and_(group.seen)  # +0.0, whatever was there
    if scales is not None:
        own = scales.view(-1, scales.shape[3]).index_select(0, group.gather).view(kv.shape[:-1])
        kv = kv_fp8.dequantize(kv, own.where(group.seen.squeeze(-1) != 0, 0.0), q.dtype)
    folded = q.view(b, n, kv_heads, shared, dim).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, shared * n, dim)
    mask = group.visible
    if n > 1 and shared > 1:
        mask = mask.unsqueeze(1).expand(b, 1, shared, n, -1).reshape(b, 1, shared * n, -1)
    k, v = kv.to(q.dtype)
    if sinks is not None:
        k, v, mask = _with_sinks(k, v, mask.expand(b, 1, shared * n, -1), sinks)
    made = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
    return made.view(b, kv_heads, shared, n, dim).permute(0, 3, 1, 2, 4).reshape(b * n, -1, dim)


def _with_sinks(k: Tensor, v: Tensor, visible: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values with one of zeros behind them, and scores to add: the last key has its head's sink.

    k, v: [B, kv_heads, keys, dim]; visible: bool [B, 1, group * n, keys].
    """
    b, kv_heads, _, dim = k.shape
    queries = visible.shape[2]
    column = sinks.to(k.dtype).view(kv_heads, -1)
    column = column.repeat_interleave(queries // column.shape[1], dim=1)  # [kv_heads, group * n]
    added = k.new_zeros(visible.shape).masked_fill_(~visible, float("-inf")).expand(b, kv_heads, queries, -1)
    added = torch.cat((added, column.view(1, kv_heads, queries, 1).expand(b, -1, -1, 1)), dim=-1)
    nothing = k.new_zeros(b, kv_heads, 1, dim)
    return torch.cat((k, nothing), dim=2), torch.cat((v, nothing), dim=2), added
