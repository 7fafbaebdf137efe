"""Which bytes of a sender's rank go where in a receiver's: planned as data, for any two TP and block sizes.

    sender's blocks     [ 0 1 2 3 | 4 5 6 7 ]          block 4
    receiver's blocks   [ 0 1 2 3 4 5 6 7 | 8 .. ]     block 8
    runs                  0 .. 3    4 .. 7             cut where either side's block ends
    spans                 runs x (key, value) x the heads that both ranks have, merged where both sides adjoin

Every byte of a receiver's rank comes from one rank of the sender: of heads that several ranks of the sender
have, and of what each of them has whole, one is chosen by the receiver's rank. Layers have equal plans but
for an offset. The lengths of a sequence and the layout of both groups decide all of it.

The embedding of an image is moved as a sequence of as many positions as it has rows. Where the receiver says
so (``KindDims.shards``), each of its ranks gets its share of the rows, at the rows' own places; the ranges of
all ranks are next to each other, and together they are all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from weft.config.sharding import balanced_share
from weft.transfer.group_layout import Heads, Place, Tensor, heads_of, joined, tensors_of
from weft.types.rooms import GroupDims, KindDims, RoomMessageError


class Side(NamedTuple):
    """A sequence in the caches of one group."""

    dims: GroupDims
    places: tuple[Place, ...]
    """For each kind."""


class Part(NamedTuple):
    """Bytes from one region to another."""

    source: int
    """Region of the sender's rank."""
    target: int
    """Region of the receiver's rank."""
    spans: np.ndarray
    """int64 [n, 3]: offset in the source, offset in the target, length; in order of the target's offsets
    within a layer."""

    @property
    def nbytes(self) -> int:
        return int(self.spans[:, 2].sum())


def first_position(sender: KindDims, receiver: KindDims, start: int, end: int) -> int:
    """From which position on entries of a kind are sent, of a sequence that goes on at ``end``.

    ``start``: where the receiver's prefix hit ends. Of a window, what the next token reads, and the rest of
    the blocks that hold it, as far as both sides have them.
    """
    if not sender.window:
        return start
    read = max(0, end - sender.window + 1)
    held = (read // size * size for size in (sender.block_size, receiver.block_size))
    return max(start, *held)


def rows_of(kind: KindDims, rank: int, ranks: int, begin: int, end: int, total: int) -> tuple[int, int]:
    """[begin, end) of what of positions ``begin`` .. end - 1 a rank of the receiver gets, of ``total`` that
    the sequence has: all of them, or those in its share. Where it gets none, begin == end."""
    if not kind.shards:
        return begin, end
    low, high = balanced_share(total, rank, ranks)
    begin = min(max(begin, low), end)
    return begin, max(begin, min(end, high))


class SpanPlan:
    """What one rank of a sender pushes to one rank of a receiver."""

    def __init__(
        self, sender: Side, sender_rank: int, receiver: Side, receiver_rank: int, start: int, end: int
    ) -> None:
        """Of a sequence of ``end`` positions, of which the receiver has those before ``start``."""
        self._sender, self._receiver = sender, receiver
        self._ranks = sender_rank, receiver_rank
        self._start, self._end = start, end
        self._tensors = tensors_of(sender.dims), tensors_of(receiver.dims)
        self._first_region = np.cumsum([0, *(len(kind.tensors) for kind in sender.dims.kinds)]).tolist()
        self._made: dict[tuple[int, int, int], list[tuple[Part, int, int]]] = {}

    def grow(self, places: tuple[Place, ...]) -> None:
        """The sender's block tables go on so."""
        pairs = zip(self._sender.places, places, strict=True)
        self._sender = self._sender._replace(places=tuple(joined(*pair) for pair in pairs))
        self._made.clear()

    def entries(self, kind: int, numbers: Sequence[int], begin: int, end: int) -> list[Part]:
        """What to push of the kind's layers ``numbers`` when positions ``begin`` .. end - 1 are computed."""
        sender, receiver = self._sender.dims.kinds[kind], self._receiver.dims.kinds[kind]
        if sender.kind == "state":
            return []
        begin = max(begin, first_position(sender, receiver, self._start, self._end))
        end = min(end, self._end)
        begin, end = rows_of(receiver, self._ranks[1], self._receiver.dims.ranks, begin, end, self._end)
        return self._layers(kind, numbers, begin, end)

    def state(self, kind: int, numbers: Sequence[int]) -> list[Part]:
        """What to push of a recurrent kind's layers ``numbers`` when the whole prompt is computed."""
        if self._sender.dims.kinds[kind].kind != "state":
            return []
        return self._layers(kind, numbers, 0, 1)

    def everything(self) -> Iterator[Part]:
        """All parts, kind by kind, tensor by tensor."""
        for kind, dims in enumerate(self._sender.dims.kinds):
            numbers = range(len(dims.layers))
            yield from self.entries(kind, numbers, self._start, self._end)
            yield from self.state(kind, numbers)

    def _layers(self, kind: int, numbers: Sequence[int], begin: int, end: int) -> list[Part]:
        made = self._made.get((kind, begin, end))
        if made is None:
            made = self._made[kind, begin, end] = list(self._plan(kind, begin, end))
            if len(self._made) > 4 * len(self._sender.dims.kinds):  # chunks go forward only
                del self._made[next(iter(self._made))]
        moved = []
        for part, source_stride, target_stride in made:
            strides = np.array([source_stride, target_stride, 0], np.int64)
            shifts = np.array(numbers, np.int64)[:, None] * strides
            moved.append(part._replace(spans=(shifts[:, None] + part.spans).reshape(-1, 3)))
        return moved

    def _plan(self, kind: int, begin: int, end: int) -> Iterator[tuple[Part, int, int]]:
        """Parts of the kind's first layer, and how far its next layer is, on both sides."""
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
            yield Part(region, region, spans), source.layer_stride, target.layer_stride

    def _shared(
        self, sender: KindDims, receiver: KindDims, source: Tensor, target: Tensor
    ) -> tuple[int, int, int] | None:
        """(first head at the source, at the target, how many), of what this pair exchanges; None: nothing."""
        rank, to = self._ranks
        ranks, ranks_to = self._sender.dims.ranks, self._receiver.dims.ranks
        if not source.heads:
            return (0, 0, 1) if rank == to * ranks // ranks_to else None
        own = heads_of(sender, source, rank, ranks)
        wanted = heads_of(receiver, target, to, ranks_to)
        begin, end = max(own.begin, wanted.begin), min(own.end, wanted.end)
        if begin >= end or rank != _owner(sender, source, own, rank, ranks, to):
            return None
        return begin - own.begin, begin - wanted.begin, end - begin


def arriving(receiver: Side, rank: int, sender: GroupDims, start: int, end: int) -> dict[int, np.ndarray]:
    """What a rank of the receiver gets in all: region -> int64 [n, 2], offsets and lengths, in order."""
    expected = dict[int, np.ndarray]()
    region = 0
    for number, (kind, theirs) in enumerate(zip(receiver.dims.kinds, sender.kinds, strict=True)):
        place, is_state = receiver.places[number], kind.kind == "state"
        begin = 0 if is_state else first_position(theirs, kind, start, end)
        begin, until = rows_of(kind, rank, receiver.dims.ranks, begin, end, end)
        runs = _runs(kind, place, kind, place, begin, 1 if is_state else until)
        for dims in tensors_of(receiver.dims)[number]:
            spans = _spans(runs, dims, dims, 0, 0, max(dims.heads, 1))
            layers = np.arange(dims.layers, dtype=np.int64)[:, None] * dims.layer_stride
            offsets = (layers + spans[:, 1]).ravel()
            lengths = np.broadcast_to(spans[:, 2], (dims.layers, len(spans))).ravel()
            order = np.argsort(offsets, kind="stable")
            whole = np.stack([offsets[order], offsets[order], lengths[order]], axis=1)
            expected[region] = merged(whole)[:, 1:]
            region += 1
    return expected


class _Runs(NamedTuple):
    """Entries that lie side by side on both sides; int64 [n] each."""

    source_blocks: np.ndarray
    source_entries: np.ndarray
    target_blocks: np.ndarray
    target_entries: np.ndarray
    entries: np.ndarray


def _runs(sender: KindDims, source: Place, receiver: KindDims, target: Place, begin: int, end: int) -> _Runs:
    if sender.kind == "state":
        zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
        return _Runs(source.ids, zero, target.ids, zero, one)
    ratio = sender.ratio  # of a group that is not complete there is nothing to send
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
    """``first``, and the multiples of ``per`` between it and ``last``."""
    if first >= last:
        return np.empty(0, np.int64)
    return np.concatenate([[first], np.arange((first // per + 1) * per, last, per)]).astype(np.int64)


def _blocks(place: Place, numbers: np.ndarray, kind: KindDims) -> np.ndarray:
    """The blocks of entries ``numbers`` of the block table. Raises RoomMessageError where one is missing."""
    at = numbers - place.first
    if len(at) and (at.min() < 0 or at.max() >= len(place.ids)):
        raise RoomMessageError(f"the block table of kind {kind.kind} lacks positions that are sent")
    ids: np.ndarray = place.ids[at]
    if len(ids) and ids.min() < 1:
        raise RoomMessageError(f"positions that are sent of kind {kind.kind} lie in the null block")
    return ids


def _spans(
    runs: _Runs, source: Tensor, target: Tensor, source_head: int, target_head: int, heads: int
) -> np.ndarray:
    """int64 [n, 3] of a tensor's first layer."""
    kv, head = np.arange(source.kv)[:, None], np.arange(heads)[None, :]
    inside = kv * source.kv_stride + (source_head + head) * source.head_stride
    inside_target = kv * target.kv_stride + (target_head + head) * target.head_stride
    froms = runs.source_blocks * source.block_stride + runs.source_entries * source.entry_bytes
    tos = runs.target_blocks * target.block_stride + runs.target_entries * target.entry_bytes
    spans = np.empty((len(froms), inside.size, 3), np.int64)
    spans[..., 0] = froms[:, None] + inside.ravel()
    spans[..., 1] = tos[:, None] + inside_target.ravel()
    spans[..., 2] = (runs.entries * source.entry_bytes)[:, None]
    return merged(spans.reshape(-1, 3))


def merged(spans: np.ndarray) -> np.ndarray:
    """Spans in the same order, with each that adjoins the one before it on both sides made part of that."""
    if len(spans) < 2:
        return spans
    ends = spans[:-1, :2] + spans[:-1, 2:]
    begins = np.concatenate([[True], (spans[1:, :2] != ends).any(axis=1)])
    at = np.flatnonzero(begins)
    kept = spans[at]
    kept[:, 2] = np.add.reduceat(spans[:, 2], at)
    return kept


def split(spans: np.ndarray, most: int) -> np.ndarray:
    """``spans`` cut into spans of at most ``most`` bytes each."""
    pieces = -(-spans[:, 2] // most)
    if not len(spans) or pieces.max() <= 1:
        return spans
    rows = np.repeat(np.arange(len(spans)), pieces)
    done = (np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
    cut: np.ndarray = spans[rows]
    cut[:, 0] += done
    cut[:, 1] += done
    cut[:, 2] = np.minimum(cut[:, 2] - done, most)
    return cut


def _owner(kind: KindDims, tensor: Tensor, heads: Heads, rank: int, ranks: int, to: int) -> int:
    """Which of the sender's ranks that have these heads gives them to rank ``to`` of the receiver."""
    if kind.kind == "state" or kind.kv_heads >= ranks:
        return rank
    same = [r for r in range(ranks) if heads_of(kind, tensor, r, ranks) == heads]
    return same[to % len(same)]
