"""Span plans: which bytes of a sender's rank go where at a receiver's rank, for any two TP and block sizes.

    sender's blocks     [ 0 1 2 3 | 4 5 6 7 ]          block 4
    receiver's blocks   [ 0 1 2 3 4 5 6 7 | 8 .. ]     block 8
    runs                  0 .. 3    4 .. 7             cut where either side's block ends
    spans                 runs x (key, value) x the heads that both ranks have, merged where both sides adjoin

Every byte of a receiver's rank comes from exactly one rank of the sender. Where several ranks of the sender
have the same heads, or the same whole tensor, the number of the receiver's rank selects one of them. Plans
of different layers are equal except for an offset. A plan depends only on the length of the sequence and
the layout of both groups.

The embedding of an image moves like a sequence with one position per row. If the receiver sets
``CacheGroupDims.shards``, each receiving rank gets a share of the rows, at the rows' own places. The shares
of all ranks are adjacent, and together cover all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from weft.config.sharding import balanced_share
from weft.disagg.protocol.group_layout import Heads, Place, Tensor, heads_of, joined, tensors_of
from weft.types.transfer import CacheGroupDims, GroupDims, TransferMessageError


class Side(NamedTuple):
    """Location of a sequence in the caches of one group."""

    dims: GroupDims
    places: tuple[Place, ...]
    """One location per KV cache group."""


class SpanPart(NamedTuple):
    """Spans from one region of the sender to one region of the receiver."""

    source: int
    """Region of the sender's rank."""
    target: int
    """Region of the receiver's rank."""
    spans: np.ndarray
    """int64 [n, 3]: offset in the source, offset in the target, length. Ordered by target offset within a
    layer."""

    @property
    def nbytes(self) -> int:
        return int(self.spans[:, 2].sum())


def first_position(sender: CacheGroupDims, receiver: CacheGroupDims, start: int, end: int) -> int:
    """Return the first position to send for a KV cache group, for a sequence of ``end`` positions.

    ``start``: end of the receiver's prefix hit. For a window or a chunk: the positions read for the next
    token, rounded down to the start of a block on both sides.
    """
    if not sender.window:
        return start
    read = end - end % sender.window if sender.kind == "chunk" else max(0, end - sender.window + 1)
    held = (read // size * size for size in (sender.block_size, receiver.block_size))
    return max(start, *held)


def rows_of(kind: CacheGroupDims, rank: int, ranks: int, begin: int, end: int, total: int) -> tuple[int, int]:
    """Return a receiving rank's part [begin, end) of positions ``begin`` .. end - 1.
    ``total``: length of the sequence. The part is the whole range, or with ``shards`` the rank's share. An
    empty part has begin == end."""
    if not kind.shards:
        return begin, end
    low, high = balanced_share(total, rank, ranks)
    begin = min(max(begin, low), end)
    return begin, max(begin, min(end, high))


class SpanPlan:
    """Spans from one rank of a sender to one rank of a receiver."""

    def __init__(
        self, sender: Side, sender_rank: int, receiver: Side, receiver_rank: int, start: int, end: int
    ) -> None:
        """``end``: positions of the sequence. ``start``: number of leading positions at the receiver
        already."""
        self._sender, self._receiver = sender, receiver
        self._ranks = sender_rank, receiver_rank
        self._start, self._end = start, end
        self._tensors = tensors_of(sender.dims), tensors_of(receiver.dims)
        self._first_region = np.cumsum([0, *(len(kind.tensors) for kind in sender.dims.kinds)]).tolist()
        self._made: dict[tuple[int, int, int], list[tuple[SpanPart, int, int]]] = {}

    def grow(self, places: tuple[Place, ...]) -> None:
        """Add ``places`` to the sender's block tables, see ``joined``."""
        pairs = zip(self._sender.places, places, strict=True)
        self._sender = self._sender._replace(places=tuple(joined(*pair) for pair in pairs))
        self._made.clear()

    def entries(self, kind: int, numbers: Sequence[int], begin: int, end: int) -> list[SpanPart]:
        """Return the parts to push for layers ``numbers`` of KV cache group ``kind`` after positions
        ``begin`` .. end - 1 are computed. Empty for a recurrent state. Raises TransferMessageError if a block
        table lacks a position."""
        sender, receiver = self._sender.dims.kinds[kind], self._receiver.dims.kinds[kind]
        if sender.kind == "state":
            return []
        begin = max(begin, first_position(sender, receiver, self._start, self._end))
        end = min(end, self._end)
        begin, end = rows_of(receiver, self._ranks[1], self._receiver.dims.ranks, begin, end, self._end)
        return self._layers(kind, numbers, begin, end)

    def state(self, kind: int, numbers: Sequence[int]) -> list[SpanPart]:
        """Return the parts to push for layers ``numbers`` of recurrent group ``kind`` after the whole
        prompt is computed. Empty for any other KV cache group."""
        if self._sender.dims.kinds[kind].kind != "state":
            return []
        return self._layers(kind, numbers, 0, 1)

    def everything(self) -> Iterator[SpanPart]:
        """Yield all parts, ordered by KV cache group, then by tensor."""
        for kind, dims in enumerate(self._sender.dims.kinds):
            numbers = range(len(dims.layers))
            yield from self.entries(kind, numbers, self._start, self._end)
            yield from self.state(kind, numbers)

    def _layers(self, kind: int, numbers: Sequence[int], begin: int, end: int) -> list[SpanPart]:
        """Return the parts of all layers ``numbers``: the cached spans of the first layer, shifted by the
        layer strides."""
        made = self._made.get((kind, begin, end))
        if made is None:
            made = self._made[kind, begin, end] = list(self._plan(kind, begin, end))
            # Chunks go forward, so drop the oldest range.
            if len(self._made) > 4 * len(self._sender.dims.kinds):
                del self._made[next(iter(self._made))]
        moved = []
        for part, source_stride, target_stride in made:
            strides = np.array([source_stride, target_stride, 0], np.int64)
            shifts = np.array(numbers, np.int64)[:, None] * strides
            # [layers, 1, 3] + [n, 3] -> [layers * n, 3]
            moved.append(part._replace(spans=(shifts[:, None] + part.spans).reshape(-1, 3)))
        return moved

    def _plan(self, kind: int, begin: int, end: int) -> Iterator[tuple[SpanPart, int, int]]:
        """Yield the parts of the KV cache group's first layer, with the layer strides of both sides in
        bytes."""
        if begin >= end:
            return
        sender, receiver = self._sender.dims.kinds[kind], self._receiver.dims.kinds[kind]
        runs = _runs(sender, self._sender.places[kind], receiver, self._receiver.places[kind], begin, end)
        if not len(runs.entries):
            return
        pairs = zip(self._tensors[0][kind], self._tensors[1][kind], strict=True)
        for number, (source, target) in enumerate(pairs):
            shared = self._shared(sender, receiver, source, target)
            if shared is None:
                continue
            spans = _spans(runs, source, target, *shared)
            region = self._first_region[kind] + number
            yield SpanPart(region, region, spans), source.layer_stride, target.layer_stride

    def _shared(
        self, sender: CacheGroupDims, receiver: CacheGroupDims, source: Tensor, target: Tensor
    ) -> tuple[int, int, int] | None:
        """Return (first head at the source, first head at the target, number of heads) exchanged by the
        pair of ranks; None if the pair exchanges nothing of the tensor."""
        rank, to = self._ranks
        ranks, ranks_to = self._sender.dims.ranks, self._receiver.dims.ranks
        # No heads: every rank has the whole tensor, so one rank of the sender serves each rank of the
        # receiver.
        if not source.heads:
            return (0, 0, 1) if rank == to * ranks // ranks_to else None
        own = heads_of(sender, source, rank, ranks)
        wanted = heads_of(receiver, target, to, ranks_to)
        begin, end = max(own.begin, wanted.begin), min(own.end, wanted.end)
        if begin >= end or rank != _owner(sender, source, own, rank, ranks, to):
            return None
        return begin - own.begin, begin - wanted.begin, end - begin


def arriving(receiver: Side, rank: int, sender: GroupDims, start: int, end: int) -> dict[int, np.ndarray]:
    """Return all spans to one rank of the receiver: region -> int64 [n, 2], offsets and lengths in bytes, in
    ascending order. Adjacent spans are merged.

    ``end``: positions of the sequence. ``start``: number of leading positions at the receiver already. A
    recurrent state always arrives whole. Raises TransferMessageError if the block tables lack a position.
    """
    expected = dict[int, np.ndarray]()
    region = 0
    for number, (kind, theirs) in enumerate(zip(receiver.dims.kinds, sender.kinds, strict=True)):
        place, is_state = receiver.places[number], kind.kind == "state"
        begin = 0 if is_state else first_position(theirs, kind, start, end)
        begin, until = rows_of(kind, rank, receiver.dims.ranks, begin, end, end)
        runs = _runs(kind, place, kind, place, begin, 1 if is_state else until)
        for dims in tensors_of(receiver.dims)[number]:
            spans = _spans(runs, dims, dims, 0, 0, max(dims.heads, 1))
            # [layers, 1] + [n] -> [layers * n]
            layers = np.arange(dims.layers, dtype=np.int64)[:, None] * dims.layer_stride
            offsets = (layers + spans[:, 1]).ravel()
            lengths = np.broadcast_to(spans[:, 2], (dims.layers, len(spans))).ravel()
            order = np.argsort(offsets, kind="stable")
            whole = np.stack([offsets[order], offsets[order], lengths[order]], axis=1)
            expected[region] = merged(whole)[:, 1:]
            region += 1
    return expected


class _Runs(NamedTuple):
    """Entries that are contiguous on both sides; int64 [n] each."""

    source_blocks: np.ndarray
    source_entries: np.ndarray
    target_blocks: np.ndarray
    target_entries: np.ndarray
    entries: np.ndarray


def _runs(
    sender: CacheGroupDims, source: Place, receiver: CacheGroupDims, target: Place, begin: int, end: int
) -> _Runs:
    """Return runs of entries for positions ``begin`` .. end - 1, cut at the block ends of both sides. A state
    is one run. Raises TransferMessageError for a missing block."""
    if sender.kind == "state":
        zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
        return _Runs(source.ids, zero, target.ids, zero, one)
    ratio = sender.ratio  # an incomplete group of `ratio` positions has no entry to send
    first, last = begin // ratio, max(end // ratio, begin // ratio)
    per_source, per_target = sender.block_size // ratio, receiver.block_size // ratio
    cuts = np.unique(np.concatenate([_cuts(first, last, per) for per in (per_source, per_target)]))
    lengths = np.diff(np.append(cuts, last))
    return _Runs(
        _blocks(source, cuts // per_source, sender),
        cuts % per_source,
        _blocks(target, cuts // per_target, receiver),
        cuts % per_target,
        lengths,
    )


def _cuts(first: int, last: int, per: int) -> np.ndarray:
    """Return int64 [n]: ``first``, and the multiples of ``per`` between ``first`` and ``last``."""
    if first >= last:
        return np.empty(0, np.int64)
    return np.concatenate([[first], np.arange((first // per + 1) * per, last, per)]).astype(np.int64)


def _blocks(place: Place, numbers: np.ndarray, kind: CacheGroupDims) -> np.ndarray:
    """Return the block ids of block table entries ``numbers``. Raises TransferMessageError for a missing
    entry or the null block."""
    at = numbers - place.first
    if len(at) and (at.min() < 0 or at.max() >= len(place.ids)):
        raise TransferMessageError(
            f"the block table of KV cache group {kind.kind} lacks positions that are sent"
        )
    ids: np.ndarray = place.ids[at]
    if len(ids) and ids.min() < 1:
        raise TransferMessageError(f"positions to send of KV cache group {kind.kind} lie in the null block")
    return ids


def _spans(
    runs: _Runs, source: Tensor, target: Tensor, source_head: int, target_head: int, heads: int
) -> np.ndarray:
    """Return the spans of a tensor's first layer, int64 [n, 3]."""
    # kv: [kv, 1]; head: [1, heads]; inside: [kv, heads]
    kv, head = np.arange(source.kv)[:, None], np.arange(heads)[None, :]
    inside = kv * source.kv_stride + (source_head + head) * source.head_stride
    inside_target = kv * target.kv_stride + (target_head + head) * target.head_stride
    froms = runs.source_blocks * source.block_stride + runs.source_entries * source.entry_bytes
    tos = runs.target_blocks * target.block_stride + runs.target_entries * target.entry_bytes
    # [runs, kv * heads, (source offset, target offset, length)]
    spans = np.empty((len(froms), inside.size, 3), np.int64)
    spans[..., 0] = froms[:, None] + inside.ravel()
    spans[..., 1] = tos[:, None] + inside_target.ravel()
    spans[..., 2] = (runs.entries * source.entry_bytes)[:, None]
    return merged(spans.reshape(-1, 3))


def merged(spans: np.ndarray) -> np.ndarray:
    """Return the spans, int64 [n, 3] (source offset, target offset, length), in the same order.

    A span adjacent to the predecessor on both sides is merged into the predecessor. The result may be
    ``spans`` itself.
    """
    if len(spans) < 2:
        return spans
    # A span starts a new run unless both its offsets continue the previous span.
    ends = spans[:-1, :2] + spans[:-1, 2:]
    begins = np.concatenate([[True], (spans[1:, :2] != ends).any(axis=1)])
    at = np.flatnonzero(begins)
    kept = spans[at]
    kept[:, 2] = np.add.reduceat(spans[:, 2], at)
    return kept


def split(spans: np.ndarray, most: int) -> np.ndarray:
    """Return ``spans``, int64 [n, 3], cut into spans of at most ``most`` bytes each, in the same order. The
    result may be ``spans``."""
    pieces = -(-spans[:, 2] // most)
    if not len(spans) or pieces.max() <= 1:
        return spans
    rows = np.repeat(np.arange(len(spans)), pieces)
    # [pieces]: bytes of the span before each piece.
    done = (np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
    cut: np.ndarray = spans[rows]
    cut[:, 0] += done
    cut[:, 1] += done
    cut[:, 2] = np.minimum(cut[:, 2] - done, most)
    return cut


def _owner(kind: CacheGroupDims, tensor: Tensor, heads: Heads, rank: int, ranks: int, to: int) -> int:
    """Return the sender's rank for sending the heads to rank ``to`` of the receiver."""
    if kind.kind == "state" or kind.kv_heads >= ranks:
        return rank
    # Fewer heads than ranks: several ranks have the same heads. Spread the receiving ranks over these
    # ranks.
    same = [r for r in range(ranks) if heads_of(kind, tensor, r, ranks) == heads]
    return same[to % len(same)]
