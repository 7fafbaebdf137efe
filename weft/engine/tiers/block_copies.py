"""Copies of single blocks between a rank's caches and a record.

Spans of a block differ between blocks by a constant offset only. So the spans of one block are planned once
for each KV cache group and part, and shifted for each copy.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from weft.common.errors import EngineDead
from weft.disagg.protocol.group_layout import tensors_of
from weft.disagg.protocol.store_layout import BlockSpans, part_bytes, parts_of, spans_to_read, spans_to_write
from weft.disagg.transport.copies import copies_of
from weft.disagg.transport.copying import copy_spans
from weft.ops.mapped import advise
from weft.store.records import RecordBuffer, RecordId
from weft.types.transfer import GroupDims, TransferMessageError

_POLL_S, _OUT_S = 0.00002, 30.0
_POPULATE_WRITE = 23
"""Number of Linux's advice, since 5.14. An older kernel refuses the advice."""


class BlockCopies:
    """The copies of one rank, with caches on a CPU or a GPU. Not thread-safe, except ``mark``."""

    def __init__(
        self, regions: Sequence[torch.Tensor], dims: GroupDims, rank: int, device: torch.device | None = None
    ) -> None:
        """``regions``: the tensors of all KV cache groups as flat bytes, in order (``group_layout``).
        ``dims``: layout of the group. ``rank``: number of the rank in the group. ``device``: of the regions,
        by default the CPU."""
        self._regions, self._dims, self._rank = regions, dims, rank
        self._parts = [parts_of(dims, kind) for kind in range(len(dims.kinds))]
        self._out: dict[int, BlockSpans] = {}
        self._into: dict[tuple[int, int, int], BlockSpans] = {}
        self._copies = copies_of(device or torch.device("cpu"), self.most_bytes)
        self._scratch: torch.Tensor | None = None

    def pin(self, memory: np.ndarray) -> None:
        """Prepare ``memory``, uint8, for copies, until ``close``. Raises EngineDead if the memory cannot be
        pinned."""
        self._copies.pin(torch.from_numpy(memory))

    def mark(self) -> Any:
        """Return a mark for all device work launched so far by the calling thread."""
        return self._copies.mark()

    def settle(self) -> None:
        """Block until every ``into`` has ended. Raises EngineDead after a time-out."""
        self._copies.settle()

    def close(self) -> None:
        """Block until no copy is under way. Raises EngineDead after a time-out."""
        self._copies.close()

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest record: of a group of one rank."""
        kinds = range(len(self._dims.kinds))
        return max(part_bytes(self._dims, kind, 1) for kind in kinds if tensors_of(self._dims)[kind])

    @property
    def own_bytes(self) -> list[int]:
        """Bytes of the rank's own record of each KV cache group; 0 for a group without tensors."""
        each = zip(tensors_of(self._dims), self._parts, strict=True)
        return [
            part_bytes(self._dims, kind, parts) if tensors else 0
            for kind, (tensors, parts) in enumerate(each)
        ]

    def record(self, kind: int, key: bytes) -> RecordId:
        """Return the record with the bytes of this rank, as a group of the same size writes the record."""
        parts = self._parts[kind]
        return RecordId(kind, key, min(self._rank, parts - 1), parts)

    def writes(self, kind: int) -> bool:
        """Return False if another rank writes the same bytes."""
        return self._rank < self._parts[kind]

    def out(self, kind: int, block: int, buffer: RecordBuffer, ready: Any = None) -> int:
        """Copy a block to the payload of ``buffer``, after the mark ``ready``. Return the bytes of the
        payload. Raises EngineDead after a time-out."""
        if kind not in self._out:
            # Spans in order of the payload lie back to back, because they cover the payload.
            self._out[kind] = _in_order(spans_to_write(self._dims, kind, self._rank))
        spans = self._out[kind]
        copy = self._copies.out(self._regions, spans.out(block), torch.from_numpy(buffer.payload), ready)
        until = time.monotonic() + _OUT_S
        while not self._copies.ended(copy):
            if time.monotonic() > until:
                raise EngineDead("a GPU did not finish a copy to the KV tier in time")
            time.sleep(_POLL_S)
        return spans.nbytes

    def prepare(self, kind: int, first: int, last: int) -> None:
        """Let the operating system supply the memory of the blocks ``first`` to ``last``. The caches must lie
        on a CPU. The contents stay. Steps may run meanwhile."""
        if not self.own_bytes[kind]:
            return
        record = self.record(kind, b"")
        spans = self._plan(kind, record.part, record.parts)
        each = zip(spans.out(first), spans.out(last), strict=True)
        for at, behind in each:
            region = self._regions[at.source]
            ends = np.minimum(behind.spans[:, 0] + behind.spans[:, 2], region.nbytes)
            for begin, end in zip(at.spans[:, 0].tolist(), ends.tolist(), strict=True):
                page = (region.data_ptr() + begin) // mmap.PAGESIZE * mmap.PAGESIZE
                advise(page, region.data_ptr() + end, _POPULATE_WRITE)

    def into(self, record: RecordId, block: int, payload: np.ndarray) -> None:
        """Start to copy this rank's bytes of a record to a block. payload: uint8 [bytes], unchanged until
        ``settle``."""
        memory = torch.from_numpy(payload)
        for part in self._plan(record.kind, record.part, record.parts).into(block):
            first, size = int(part.spans[0, 0]), part.nbytes
            source = memory[first : first + size]
            begins = np.cumsum(part.spans[:, 2]) - part.spans[:, 2]
            if not np.array_equal(part.spans[:, 0] - first, begins):
                source = self._packed(memory, part.spans, begins)
            self._copies.into(source, self._regions[part.target], part.spans[:, 1:])

    def _packed(self, memory: torch.Tensor, spans: np.ndarray, begins: np.ndarray) -> torch.Tensor:
        """Return the bytes of spans of a record of another size of group, back to back."""
        self._copies.settle()  # the bytes of the last call
        if self._scratch is None:
            self._scratch = torch.from_numpy(RecordBuffer(self.most_bytes).payload)
            self._copies.pin(self._scratch)
        moves = np.stack([spans[:, 0], begins, spans[:, 2]], axis=1)
        copy_spans(memory, self._scratch, moves, np.zeros(len(moves), np.uint64))
        return self._scratch[: int(spans[:, 2].sum())]

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
            self._into[key] = _in_order(spans_to_read(self._dims, kind, self._rank, part, parts))
        return self._into[key]


def flat(memory: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the tensors of all KV cache groups as flat bytes, uint8 [bytes] each."""
    return [tensor.view(-1).view(torch.uint8) for kind in memory for tensor in kind]


def _in_order(spans: BlockSpans) -> BlockSpans:
    """Return the spans of each tensor in order of the payload."""
    return spans._replace(spans=tuple(one[np.argsort(one[:, 1], kind="stable")] for one in spans.spans))
