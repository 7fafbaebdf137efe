"""Copies of single blocks between a rank's caches and a record.

Spans of a block differ between blocks by a constant offset only. So the spans of one block are planned once
for each KV cache group and part, and shifted for each copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weft.disagg.protocol.group_layout import tensors_of
from weft.disagg.protocol.store_layout import BlockSpans, part_bytes, parts_of, spans_to_read, spans_to_write
from weft.disagg.transport.copying import copy_spans
from weft.store.records import RecordBuffer, RecordId
from weft.types.transfer import GroupDims, TransferMessageError


class BlockCopies:
    """The copies of one rank. Not thread-safe."""

    def __init__(self, regions: Sequence[torch.Tensor], dims: GroupDims, rank: int) -> None:
        """``regions``: the tensors of all KV cache groups as flat bytes, in order (``group_layout``).
        ``dims``: layout of the group. ``rank``: number of the rank in the group."""
        self._regions, self._dims, self._rank = regions, dims, rank
        self._parts = [parts_of(dims, kind) for kind in range(len(dims.kinds))]
        self._out: dict[int, BlockSpans] = {}
        self._into: dict[tuple[int, int, int], BlockSpans] = {}

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest record: of a group of one rank."""
        kinds = range(len(self._dims.kinds))
        return max(part_bytes(self._dims, kind, 1) for kind in kinds if tensors_of(self._dims)[kind])

    def record(self, kind: int, key: bytes) -> RecordId:
        """Return the record with the bytes of this rank, as a group of the same size writes the record."""
        parts = self._parts[kind]
        return RecordId(kind, key, min(self._rank, parts - 1), parts)

    def writes(self, kind: int) -> bool:
        """Return False if another rank writes the same bytes."""
        return self._rank < self._parts[kind]

    def out(self, kind: int, block: int, buffer: RecordBuffer) -> int:
        """Copy a block to the payload of ``buffer``. Return the bytes of the payload."""
        if kind not in self._out:
            self._out[kind] = spans_to_write(self._dims, kind, self._rank)
        spans, payload = self._out[kind], torch.from_numpy(buffer.payload)
        for part in spans.out(block):
            _copy(self._regions[part.source], payload, part.spans)
        return spans.nbytes

    def into(self, record: RecordId, block: int, payload: np.ndarray) -> None:
        """Copy this rank's bytes of a record to a block. payload: uint8 [bytes]."""
        memory = torch.from_numpy(payload)
        for part in self._plan(record.kind, record.part, record.parts).into(block):
            _copy(memory, self._regions[part.target], part.spans)

    def parts_of(self, kind: int, parts: int) -> list[int]:
        """Return the parts, of ``parts``, that have bytes of this rank; [] if so many ranks cannot have
        written the block."""
        try:
            return [part for part in range(parts) if self._plan(kind, part, parts).nbytes]
        except TransferMessageError:
            return []

    def _plan(self, kind: int, part: int, parts: int) -> BlockSpans:
        key = (kind, part, parts)
        if key not in self._into:
            self._into[key] = spans_to_read(self._dims, kind, self._rank, part, parts)
        return self._into[key]


def flat(memory: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the tensors of all KV cache groups as flat bytes, uint8 [bytes] each."""
    return [tensor.view(-1).view(torch.uint8) for kind in memory for tensor in kind]


def _copy(source: torch.Tensor, target: torch.Tensor, spans: np.ndarray) -> None:
    copy_spans(source, target, spans, np.zeros(len(spans), np.uint64))
