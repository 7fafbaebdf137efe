"""Paged attention with torch operations, for CPU and CUDA and every dtype.

Rows are cut into pieces of at most ``TILE`` queries. Pieces with equal query counts and similar block counts
are computed together. So decode rows form batches, prefill chunks mostly run alone, and both use the same
code:

    piece    queries          row r, positions p .. p + n - 1
    blocks   full             0 .. block of p + n - 1
             window           block of max(0, p - window + 1) .. block of p + n - 1
             chunk            block of p - p % window .. block of p + n - 1
    gather   [2, B, kv_heads, width * block, head_dim]    one copy, whole blocks
    zero     positions invisible to all queries of the piece: such a position may hold another sequence's
             NaN, and 0 * NaN is NaN
    attend   queries of one KV head folded into one matrix, [B, kv_heads, group * n, head_dim]

Shapes come from host columns, positions from device columns, so nothing waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from weft.attention.base import AttentionBackend, CoreInput, SegmentInput, check_served
from weft.attention.gqa.reach import capped_attention, first_read
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops import kv_fp8
from weft.ops.upload import upload

Tensor = torch.Tensor

TILE = 128
"""Maximum queries per piece. Bounds the mask and, where scores are materialized, the scores."""
GATHER = 1 << 24
"""Maximum elements gathered at once (a single piece may need more)."""

#: Supported dtypes of models (the last: of 8-bit caches), with the integer dtype of the same width.
BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    kv_fp8.VALUES: torch.int8,
}


@dataclass(frozen=True, slots=True)
class QueryPiece:
    """``count`` queries of ``row``, starting at its query ``offset``; ``first``: place of the first query."""

    row: int
    offset: int
    count: int
    first: int
    width: int
    """Number of blocks that covers every position visible to the queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceGroup:
    """B pieces of n queries each, in one computation."""

    tokens: Tensor | slice
    """Places of the B * n queries in the segment."""
    pieces: int
    queries: int
    gather: Tensor
    """int64 [2 * B * kv_heads * width]: rows of the cache seen as [blocks * 2 * kv_heads, block * head_dim].
    For a latent cache [B * width]: rows of [blocks, block * width]."""
    seen: Tensor
    """[B, 1, width * block, 1], integers of the cache dtype's width: all bits set if some query may see the
    position, else 0."""
    visible: Tensor
    """bool [B, 1, n, width * block]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TorchPrepared:
    groups: tuple[PieceGroup, ...]


class TorchAttention(AttentionBackend):
    """Reference backend of grouped-query attention. Stateless, so threads may share an instance."""

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError for a model, dtype or device without support."""
        check_served("torch", dtype, device, BITS, "cpu", "cuda")
        if spec.heads % cache.kv_heads:
            raise ConfigError(
                f"{spec.heads} query heads cannot share {cache.kv_heads} KV heads", param="--model"
            )

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> _TorchPrepared:
        """Return the queries in groups of equal shape, staged on the device for all layers of the group."""
        pieces = cut(segment, spec.window, block_size, whole=segment.end_of(kind) is not None)
        planes = 2 * spec.kv_heads
        limit = GATHER // (planes * block_size * spec.head_dim)
        return _TorchPrepared(
            groups=tuple(
                make_group(g, segment, kind, spec, block_size, dtype, planes=planes)
                for g in batches(pieces, limit)
            ),
        )

    def attend(self, q: Tensor, out: Tensor, core: CoreInput, kind: int, spec: CacheSpec) -> None:
        """Write ``out``; see ``AttentionBackend.attend``."""
        cache = core.caches[kind][0]
        scales = core.caches[kind][1] if spec.fp8 else None
        prepared = core.prepared
        if not isinstance(prepared, _TorchPrepared):
            prepared = self.prepare(core.segment, kind, spec, cache.shape[3], q.dtype)
        if not core.segment.tokens:
            return
        entries = cache.view(-1, cache.shape[3] * spec.head_dim)
        for group in prepared.groups:
            out[group.tokens] = _attend(q[group.tokens], entries, group, spec, core, scales)


def cut(segment: SegmentInput, window: int, block_size: int, *, whole: bool = False) -> list[QueryPiece]:
    """Cut all queries of the segment into pieces, in order. Block counts come from upper bounds of the
    starts.

    ``whole``: a query may see all tokens of its row.
    """
    pieces = []
    begin = 0
    for row, (start, count) in enumerate(
        zip(segment.host_starts.tolist(), segment.host_counts.tolist(), strict=True)
    ):
        for offset in range(0, count, TILE):
            n = min(TILE, count - offset)
            reach = count - offset if whole else n
            width = -(-(start + offset + reach) // block_size)
            if window:
                # at most reach + window - 1 positions that begin anywhere in a block
                width = min(width, (reach + window - 2) // block_size + 2)
            pieces.append(QueryPiece(row, offset, n, begin + offset, width))
        begin += count
    return pieces


def batches(pieces: list[QueryPiece], limit: int) -> Iterator[list[QueryPiece]]:
    """Yield pieces to compute together: equal counts, widths within a factor of two, at most ``limit``
    blocks."""
    alike: dict[tuple[int, int], list[QueryPiece]] = {}
    for piece in pieces:
        alike.setdefault((piece.count, piece.width.bit_length()), []).append(piece)
    for batch in alike.values():
        most = max(1, limit // max(piece.width for piece in batch))
        for i in range(0, len(batch), most):
            yield batch[i : i + most]


def _column(values: list[int], device: torch.device) -> Tensor:
    return upload(np.array(values, np.int64), device)


def make_group(
    pieces: list[QueryPiece],
    segment: SegmentInput,
    kind: int,
    spec: CacheSpec,
    block_size: int,
    dtype: torch.dtype,
    *,
    planes: int,
) -> PieceGroup:
    """Return ``pieces`` of equal counts as one group on the device, for all layers of a KV cache group.

    ``planes``: number of planes of entries per position, 2 * kv_heads or 1.
    """
    table = segment.tables[kind]
    starts = segment.starts
    device = starts.device
    n = pieces[0].count
    width = max(piece.width for piece in pieces)
    rows = _column([piece.row for piece in pieces], device)
    # Positions are exact (device), shapes are upper bounds (host).
    p = starts[rows] + _column([piece.offset for piece in pieces], device)  # [B]: position of the first query
    lowest = first_read(p, spec)
    table_index = (lowest // block_size).unsqueeze(1) + torch.arange(width, device=device)  # [B, width]
    blocks = table[rows.unsqueeze(1), table_index.clamp(max=table.shape[1] - 1)]
    keys = table_index.unsqueeze(2) * block_size + torch.arange(block_size, device=device)
    keys = keys.view(len(pieces), -1)  # [B, width * block]: absolute positions
    queries = p.unsqueeze(1) + torch.arange(n, device=device)  # [B, n]
    ends = queries + 1
    if (given := segment.end_of(kind)) is not None:
        firsts = _column([piece.first for piece in pieces], device)
        ends = torch.maximum(ends, given[firsts.unsqueeze(1) + torch.arange(n, device=device)])
    visible = keys.unsqueeze(1) < ends.unsqueeze(2)
    if spec.window:
        visible &= keys.unsqueeze(1) >= first_read(queries, spec).unsqueeze(2)
    seen = (keys >= lowest.unsqueeze(1)) & (keys < ends[:, -1:])
    # An entry beyond the table was clamped to a wrong block, but its positions lie beyond the end of the row.
    plane = torch.arange(planes, device=device).view(-1, 1, max(1, planes // 2), 1)
    return PieceGroup(
        tokens=_places(pieces, device),
        pieces=len(pieces),
        queries=n,
        gather=(blocks[None, :, None, :] * planes + plane).view(-1),
        seen=-seen[:, None, :, None].to(BITS[kv_fp8.VALUES if spec.fp8 else dtype]),
        visible=visible.unsqueeze(1),
    )


def _places(pieces: list[QueryPiece], device: torch.device) -> Tensor | slice:
    """Return the tokens of the pieces, in order: a slice if consecutive, else int64 [B * n]."""
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
    core: CoreInput,
    scales: Tensor | None,
) -> Tensor:
    """Attend q [B * n, heads, head_dim] to the keys of the group; return the same shape."""
    b = group.pieces
    n = group.queries
    kv_heads = spec.kv_heads
    dim = spec.head_dim
    shared = q.shape[1] // kv_heads
    # [2, B, kv_heads, keys, dim]
    kv = kv_fp8.take(entries, group.gather).view(2, b, kv_heads, -1, dim)
    kv.view(group.seen.dtype).bitwise_and_(group.seen)  # +0.0 for any previous content, NaN included
    if scales is not None:
        own = scales.view(-1, scales.shape[3]).index_select(0, group.gather).view(kv.shape[:-1])
        kv = kv_fp8.dequantize(kv, own.where(group.seen.squeeze(-1) != 0, 0.0), q.dtype)
    # [B, kv_heads, group * n, dim]: the heads of one KV head become rows
    folded = q.view(b, n, kv_heads, shared, dim).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, shared * n, dim)
    mask = group.visible
    if n > 1 and shared > 1:
        mask = mask.unsqueeze(1).expand(b, 1, shared, n, -1).reshape(b, 1, shared * n, -1)
    k, v = kv.to(q.dtype)
    if core.sinks is not None:
        k, v, mask = _with_sinks(k, v, mask.expand(b, 1, shared * n, -1), core.sinks)
    if core.softcap:
        made = capped_attention(folded, k, v, mask, core.scale, core.softcap)
    else:
        made = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=core.scale)
    return made.view(b, kv_heads, shared, n, dim).permute(0, 3, 1, 2, 4).reshape(b * n, -1, dim)


def _with_sinks(k: Tensor, v: Tensor, visible: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Append a zero key and value, so that the sink becomes the score of an ordinary key.

    k, v: [B, kv_heads, keys, dim]; visible: bool [B, 1, group * n, keys]. Returns keys and values with one
    more position, and scores to add [B, kv_heads, group * n, keys + 1]: -inf where not visible, the sink at
    the end.
    """
    b, kv_heads, _, dim = k.shape
    queries = visible.shape[2]
    column = sinks.to(k.dtype).view(kv_heads, -1)
    column = column.repeat_interleave(queries // column.shape[1], dim=1)  # [kv_heads, group * n]
    added = k.new_zeros(visible.shape).masked_fill_(~visible, float("-inf")).expand(b, kv_heads, queries, -1)
    added = torch.cat((added, column.view(1, kv_heads, queries, 1).expand(b, -1, -1, 1)), dim=-1)
    nothing = k.new_zeros(b, kv_heads, 1, dim)
    return torch.cat((k, nothing), dim=2), torch.cat((v, nothing), dim=2), added
