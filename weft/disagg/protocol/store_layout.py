"""Layout of blocks on disk, and the spans between a rank's caches and a record.

    caches of a rank    tensors of a KV cache group    [layer, block, kv, head, position, width]
    payload of a part   the same tensors, back to back [layer, kv, head, position, width] of one block

For the span plans of transfers, a record is the memory of a peer with one block, and the dims of the record
begin with the block. So the same span plans serve reads and writes of records. If the reading group has
another tensor parallel size, each rank reads its own heads from the parts.

A KV cache group without heads is equal on all ranks: such a block has one part, written by rank 0.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from weft.disagg.protocol.group_layout import Place, heads_of, tensor_of
from weft.disagg.protocol.spans import Side, SpanPart, SpanPlan
from weft.types.transfer import CacheGroupDims, GroupDims, TensorDims

_BLOCK = 1
"""The block of both sides in a plan; block 0 is the null block of every pool."""


def parts_of(dims: GroupDims, kind: int) -> int:
    """Return the number of parts of a block of KV cache group ``kind`` that the group writes. Ranks
    0 .. parts - 1 write."""
    tensors = dims.kinds[kind].tensors
    return dims.ranks if any(tensor_of(tensor).heads for tensor in tensors) else 1


def part_bytes(dims: GroupDims, kind: int, parts: int) -> int:
    """Return the bytes of one part of a block, as a group of ``parts`` writing ranks stores the block."""
    stored = _page_first(dims.kinds[kind], dims.ranks, parts)
    return sum(tensor_of(tensor).block_stride for tensor in stored.tensors)


class BlockSpans(NamedTuple):
    """Spans between one block of a rank's caches and the payload of one part."""

    first_region: int
    """Number of the KV cache group's first region, see ``group_layout``."""
    spans: tuple[np.ndarray, ...]
    """For each tensor int64 [n, 3]: offset in the region for block 0, offset in the payload, length."""
    strides: tuple[int, ...]
    """For each tensor: bytes from one block to the next."""

    @property
    def nbytes(self) -> int:
        """Bytes that the rank and the part have in common."""
        return sum(int(spans[:, 2].sum()) for spans in self.spans)

    def out(self, block: int) -> list[SpanPart]:
        """Return the spans from the caches to the payload (region 0)."""
        return [
            SpanPart(self.first_region + number, 0, spans + np.array([block * stride, 0, 0]))
            for number, (spans, stride) in enumerate(zip(self.spans, self.strides, strict=True))
            if len(spans)
        ]

    def into(self, block: int) -> list[SpanPart]:
        """Return the spans from the payload (region 0) to the caches."""
        return [
            SpanPart(0, part.source, np.ascontiguousarray(part.spans[:, [1, 0, 2]]))
            for part in self.out(block)
        ]


def spans_to_write(dims: GroupDims, kind: int, rank: int) -> BlockSpans:
    """Return the spans from the caches of a writing rank to the rank's own part. The spans cover the part."""
    parts = parts_of(dims, kind)
    caches, record = _sides(dims, kind, parts)
    # The part has the rank's own heads, so every span is on both sides at equal heads.
    return _spans(
        dims, kind, SpanPlan(caches, rank, record, rank, 0, _end(dims, kind)), caches, record, False
    )


def spans_to_read(dims: GroupDims, kind: int, rank: int, part: int, parts: int) -> BlockSpans:
    """Return the spans from part ``part`` of ``parts`` to the caches of ``rank``. Empty (``nbytes`` 0) if the
    rank needs nothing of the part. The spans of all parts cover the block at the rank exactly once.

    Raises TransferMessageError if ``parts`` ranks cannot have written the group's heads.
    """
    caches, record = _sides(dims, kind, parts)
    return _spans(dims, kind, SpanPlan(record, part, caches, rank, 0, _end(dims, kind)), caches, record, True)


def _end(dims: GroupDims, kind: int) -> int:
    """Return the end of the positions of block 1."""
    return (_BLOCK + 1) * dims.kinds[kind].block_size


def _sides(dims: GroupDims, kind: int, parts: int) -> tuple[Side, Side]:
    """Return the caches and the record as sides of a plan. Both hold the sequence's block 1."""
    group = msgspec.structs.replace(dims.kinds[kind], window=0)
    place = (Place(_BLOCK, np.array([_BLOCK], np.int64)),)
    stored = GroupDims(ranks=parts, kinds=(_page_first(group, dims.ranks, parts),))
    return Side(GroupDims(ranks=dims.ranks, kinds=(group,)), place), Side(stored, place)


def _spans(dims: GroupDims, kind: int, plan: SpanPlan, caches: Side, record: Side, read: bool) -> BlockSpans:
    """Return the spans of all layers of a plan for block 1, moved to block 0 of both sides."""
    group, stored = caches.dims.kinds[0], record.dims.kinds[0]
    numbers, is_state = range(len(group.layers)), group.kind == "state"
    begin, end = _BLOCK * group.block_size, _end(dims, kind)
    parts = {
        part.source: part
        for part in (plan.state(0, numbers) if is_state else plan.entries(0, numbers, begin, end))
    }
    spans, strides, done = list[np.ndarray](), list[int](), 0
    for number, (tensor, page) in enumerate(zip(group.tensors, stored.tensors, strict=True)):
        stride, nbytes = tensor_of(tensor).block_stride, tensor_of(page).block_stride
        of_tensor = parts[number].spans if number in parts else np.empty((0, 3), np.int64)
        if read:  # a plan for reading goes from the record to the caches
            of_tensor = of_tensor[:, [1, 0, 2]]
        spans.append(of_tensor + np.array([-_BLOCK * stride, done - _BLOCK * nbytes, 0]))
        strides.append(stride)
        done += nbytes
    return BlockSpans(sum(len(one.tensors) for one in dims.kinds[:kind]), tuple(spans), tuple(strides))


def _page_first(kind: CacheGroupDims, ranks: int, parts: int) -> CacheGroupDims:
    """Return a KV cache group as stored by ``parts`` ranks: dims (block, layer, ..), with the null block and
    block 1."""
    return msgspec.structs.replace(
        kind, window=0, tensors=tuple(_stored(kind, tensor, ranks, parts) for tensor in kind.tensors)
    )


def _stored(kind: CacheGroupDims, tensor: TensorDims, ranks: int, parts: int) -> TensorDims:
    sizes = dict(tensor.dims)
    if "head" in sizes:
        # Heads of a state are counted over all ranks; KV heads are those of the model.
        whole = tensor_of(tensor)._replace(heads=sizes["head"] * ranks // parts)
        sizes["head"] = heads_of(kind, whole, 0, parts).size
    inner = [(name, size) for name, size in sizes.items() if name not in ("block", "layer")]
    dims = (("block", 1 + _BLOCK), ("layer", sizes["layer"]), *inner)
    return TensorDims(tensor.name, dims, tensor.dtype)
