"""Copies of single blocks between a rank's caches and a record.

Spans of a block differ between blocks by a constant offset only. So the spans of one block are planned once
for each KV cache group, and shifted for each copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from weft.disagg.protocol.store_layout import block_parts, part_bytes, regions, store_dims
from weft.disagg.transport.copying import copy_spans
from weft.store.records import RecordBuffer, RecordId
from weft.types.transfer import GroupDims

Tensor = torch.Tensor


class _Spans(NamedTuple):
    """Spans between one tensor of a KV cache group and its region of a record."""

    tensor: int
    region: tuple[int, int]
    """Offset and length of the region in the record's payload."""
    spans: np.ndarray
    """int64 [n, 3]: offset in the tensor (of block 0), offset in the region, length."""
    stride: int
    """Bytes between two blocks of the tensor."""
    seeds: np.ndarray


class BlockCopies:
    """The copies of one rank. Not thread-safe."""

    def __init__(
        self,
        memory: Sequence[Sequence[Tensor]],
        dims: GroupDims,
        rank: int,
        dims_of: Callable[[int], GroupDims],
    ) -> None:
        """``memory``: flat bytes of each tensor of each KV cache group. ``dims``: layout of the group.
        ``rank``: number of the rank in the group. ``dims_of``: returns the layout of a group of other size;
        raises ConfigError where the model cannot be divided so."""
        self.rank, self.ranks = rank, dims.ranks
        self._memory, self._dims, self._dims_of = memory, dims, dims_of
        self._out = [self._planned(kind, dims, rank) for kind in range(len(dims.kinds))]
        self._into: dict[tuple[int, int, int], list[_Spans]] = {
            (kind, rank, dims.ranks): spans for kind, spans in enumerate(self._out)
        }
        self._sizes = [part_bytes(store_dims(dims), kind) for kind in range(len(dims.kinds))]

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest record: of a group of one rank."""
        alone = store_dims(self._dims_of(1))
        return max(part_bytes(alone, kind) for kind in range(len(alone.kinds)))

    def out(self, kind: int, block: int, buffer: RecordBuffer) -> int:
        """Copy a block to the payload of ``buffer``. Return the bytes of the payload."""
        payload = torch.from_numpy(buffer.payload)
        for one in self._out[kind]:
            begin, length = one.region
            spans = one.spans.copy()
            spans[:, 0] += block * one.stride
            copy_spans(self._memory[kind][one.tensor], payload[begin : begin + length], spans, one.seeds)
        return self._sizes[kind]

    def into(self, record: RecordId, block: int, buffer: RecordBuffer, nbytes: int) -> None:
        """Copy this rank's part of a record from the payload of ``buffer`` to a block."""
        payload = torch.from_numpy(buffer.payload)[:nbytes]
        for one in self._plan(record.kind, record.part, record.parts):
            begin, length = one.region
            spans = one.spans[:, [1, 0, 2]]
            spans[:, 1] += block * one.stride
            copy_spans(
                payload[begin : begin + length], self._memory[record.kind][one.tensor], spans, one.seeds
            )

    def parts_of(self, kind: int, parts: int) -> list[int]:
        """Return the parts, of ``parts``, that have bytes of this rank."""
        return [part for part in range(parts) if self._plan(kind, part, parts)]

    def _plan(self, kind: int, part: int, parts: int) -> list[_Spans]:
        key = (kind, part, parts)
        if key not in self._into:
            self._into[key] = self._planned(kind, self._dims_of(parts), part)
        return self._into[key]

    def _planned(self, kind: int, dims: GroupDims, part: int) -> list[_Spans]:
        """Return the spans between this rank's block 0 and the record of rank ``part`` of a group with
        ``dims``."""
        record = store_dims(dims)
        places = regions(record, kind)
        # Block 0 is never sent, so the offsets of block 0 follow from blocks 1 and 2.
        one, two = (block_parts(kind, record, part, self._dims, self.rank, 0, block) for block in (1, 2))
        made = []
        for first, second in zip(one, two, strict=True):
            stride = int(second.spans[0, 1] - first.spans[0, 1])
            spans = first.spans[:, [1, 0, 2]]
            spans[:, 0] -= stride
            seeds = np.zeros(len(spans), np.uint64)
            made.append(_Spans(first.target, places[first.source], spans, stride, seeds))
        return made
