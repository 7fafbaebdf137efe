"""Images on a rank: embeddings named by plans, prompt rows that read embeddings, and rope positions of
images.

The engine process decides which images are encoded and which blocks of the pool hold an embedding. This
module executes the decisions in plan order, on the stream of the compute. The tower encodes one image at a
time, so an embedding does not depend on other images.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import torch

from weft.attention.base import MediaRows
from weft.common.errors import EngineDead
from weft.config.resolved import MediaLimits
from weft.ops.upload import upload
from weft.runner.images.visible_ends import ImagesOfRow, ends_of
from weft.runner.kv_tensors import zeros
from weft.types.media_item import SPAN
from weft.types.plan import BindMedia, Encode, GatherMedia, MoveMedia, Segment, SendMedia, SlotUpdate

Tensor = torch.Tensor

NO_IMAGE = (0, 0, 0, 1, 1, -1)
"""First entry of every slot's spans: text from position 0 on, rotated by plain positions."""
NOWHERE = (1 << 30, 0, 0, 1, 1, 0)
"""Padding behind a slot's spans: begins beyond every position."""


class EmbeddedImage(Protocol):
    """Output of a tower for one image: the contract of ``weft.models.vision``."""

    @property
    def main(self) -> Tensor:
        """Embedding rows: [rows, hidden]."""

    @property
    def levels(self) -> Tensor | None:
        """Deepstack rows: [n, rows, hidden]; None for models without deepstack."""


class ImageTower(Protocol):
    """Vision tower as used by the runner."""

    def embed(self, image: Tensor) -> EmbeddedImage:
        """Encode one image: uint8 [frames, height, width, 3], on the device of the model."""


def pool_shape(limits: MediaLimits) -> tuple[int, int, int, int]:
    """Return [1 + levels, 1 + blocks, rows per block, width] of the embeddings of a rank. Block 0 is the null
    block."""
    return 1 + limits.levels, 1 + limits.blocks, limits.block_rows, limits.width


class MediaStore:
    """Embeddings of one rank. Owned by the runner and used from its thread only. Transfers write into the
    same memory; plans announce the completion of such writes."""

    def __init__(
        self,
        tower: ImageTower | None,
        limits: MediaLimits | None,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        memory: Tensor | None = None,
        send: Callable[[SendMedia], None] | None = None,
        gather: Callable[[Tensor, Tensor, int], None] | None = None,
    ) -> None:
        """Allocate the pools, or use ``memory`` for the pool on the device.

        Without ``tower`` no plan may encode an image. Without ``limits`` no plan may have an image.

        ``memory``: tensor of ``pool_shape`` in ``dtype``, required if transfers take part. ``send`` announces
        an embedding that may leave. ``gather(pool, index, count)`` exchanges shares of ``count`` rows between
        ranks: pool is [1 + levels, rows, width], index int64 [count] on the device of the pool. Raises
        EngineDead if ``memory`` has another shape or dtype.
        """
        self._tower = tower
        self._patch = 0 if limits is None else limits.patch
        self._visible_ahead = () if limits is None else limits.ahead
        self._device = device
        self._send, self._gather = send, gather
        self._rows = 1 if limits is None else limits.block_rows
        shape = (1, 1, 1, 0) if limits is None else pool_shape(limits)
        pool = zeros(shape, dtype, device) if memory is None else memory
        if tuple(pool.shape) != shape or pool.dtype != dtype:
            raise EngineDead("the memory for embeddings has another shape or dtype than the pool")
        self._pool = pool
        self._host = self._host_pool(limits, dtype)
        self._by_row = pool.view(shape[0], shape[1] * shape[2], shape[3])
        self._bound: dict[int, list[tuple[BindMedia, np.ndarray]]] = {}
        """Bound images of the last plan, by slot, in order of position: op and block numbers."""

    @property
    def pool(self) -> Tensor:
        """Pool of ``pool_shape``, which transfers read and write."""
        return self._pool

    def apply(self, ops: Iterable[SlotUpdate]) -> float:
        """Apply the image updates of a plan: encode, move, bind, exchange and send embeddings. Images bound
        by the last plan are forgotten. Return the seconds for encoding (on a GPU: the seconds to launch).

        Raises EngineDead for an invalid update.
        """
        # Every plan binds its images anew.
        self._bound.clear()
        seconds = 0.0
        for op in ops:
            if isinstance(op, Encode):
                began = time.monotonic()
                self._encode(op)
                seconds += time.monotonic() - began
            elif isinstance(op, MoveMedia):
                self._move(op)
            elif isinstance(op, BindMedia):
                self._bound.setdefault(op.slot, []).append((op, self._blocks(op.blocks, op.count)))
            elif isinstance(op, GatherMedia):
                if self._gather is None:
                    raise EngineDead("ranks exchange an embedding, but this rank has no transfers")
                self._gather(self._by_row, self._index(op.blocks, op.count), op.count)
            elif isinstance(op, SendMedia):
                if self._send is None:
                    raise EngineDead(
                        "an embedding must be sent, but this rank has no transfers of embeddings"
                    )
                self._send(op)
        return seconds

    def write(self, blocks: bytes, count: int, embedded: EmbeddedImage) -> None:
        """Write an embedding of ``count`` rows into ``blocks`` (little-endian int32 block numbers). Raises
        EngineDead if the number of rows or levels differs."""
        levels = 0 if embedded.levels is None else len(embedded.levels)
        if len(embedded.main) != count or 1 + levels != len(self._pool):
            raise EngineDead(
                f"the embedding of an image has {len(embedded.main)} rows in {1 + levels} levels: "
                f"{count} in {len(self._pool)} were expected"
            )
        index = self._index(blocks, count)
        self._by_row[0].index_copy_(0, index, embedded.main)
        if embedded.levels is not None:
            self._by_row[1:].index_copy_(1, index, embedded.levels)

    def image(self, op: Encode) -> Tensor:
        """Return the pixels of ``op`` as input of a tower: uint8 [frames, height, width, 3] on the device."""
        _, rows, columns = op.grid
        pixels = np.frombuffer(op.pixels, np.uint8).copy()  # copied because torch requires writable memory
        return upload(pixels.reshape(-1, rows * self._patch, columns * self._patch, 3), self._device)

    def rows(self, prefill: Segment, shift: int = 0) -> MediaRows | None:
        """Return the image rows among the prefill rows; None without image rows.

        ``prefill`` is the first segment of a step or micro-batch of the last plan. Starts of prefill rows are
        exact. A row at position p reads the image at ``p + shift``, if the plan has bound an image there.
        """
        places: list[np.ndarray] = []
        index: list[np.ndarray] = []
        begins = np.cumsum(prefill.count) - prefill.count if self._bound else ()
        for row, first in enumerate(begins):
            start = int(prefill.start[row]) + shift
            end = start + int(prefill.count[row])
            for op, blocks in self._bound.get(int(prefill.slot[row]), ()):
                # Overlap of the row's positions [start, end) with the image; a chunk may cut an image.
                low, high = max(start, op.start), min(end, op.start + op.count)
                if low >= high:
                    continue
                positions = np.arange(low, high)
                if op.columns:  # the token of text behind each row of the image keeps its own embedding
                    positions = positions[(positions - op.start) % (op.columns + 1) != op.columns]
                places.append(positions + (int(first) - start))
                index.append(self._places_of(blocks, positions - op.start))
        if not sum(map(len, places)):
            return None
        # [2, rows]: merged token row, and row of the pool
        both = upload(np.stack([np.concatenate(places), np.concatenate(index)]), self._device)
        values = self._by_row.index_select(1, both[1])
        return MediaRows(rows=both[0], main=values[0], levels=values[1:] if len(values) > 1 else None)

    def ends(self, prefill: Segment, groups: int) -> tuple[Tensor | None, ...]:
        """Return ``SegmentInput.ends`` of the prefill rows, for ``groups`` KV cache groups; see ``rows``."""
        if not self._visible_ahead or not self._bound:
            return ()
        rows = zip(prefill.slot.tolist(), prefill.start.tolist(), prefill.count.tolist(), strict=True)
        images = [
            ImagesOfRow(start, start + count, [(op.start, op.count) for op, _ in self._bound.get(slot, ())])
            for slot, start, count in rows
        ]
        return ends_of(images, self._visible_ahead, groups, self._device)

    def clear(self) -> None:
        """Unbind all images at the end of an epoch. The engine process decides about the contents of the
        pool."""
        self._bound.clear()

    # ----

    def _host_pool(self, limits: MediaLimits | None, dtype: torch.dtype) -> Tensor:
        """Return the pool of embeddings on the host, pinned if the device is a GPU. Without host blocks only
        the null block exists."""
        levels, _, rows, width = (1, 1, 1, 0) if limits is None else pool_shape(limits)
        blocks = 0 if limits is None else limits.host_blocks
        shape = (levels, 1 + blocks, rows, width)
        if self._device.type == "cuda" and blocks:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        return zeros(shape, dtype, torch.device("cpu"))

    def _encode(self, op: Encode) -> None:
        if self._tower is None:
            raise EngineDead("an image must be encoded, but this rank has no vision tower")
        self.write(op.blocks, op.count, self._tower.embed(self.image(op)))

    def _move(self, op: MoveMedia) -> None:
        """Copy an embedding between device and host, block by block: to the device if ``op.up``. On a GPU the
        copies may still run on return. Raises EngineDead for invalid blocks."""
        blocks = self._checked(op.blocks, self._pool.shape[1])
        host_blocks = self._checked(op.host, self._host.shape[1])
        if len(blocks) != len(host_blocks):
            raise EngineDead("an embedding is moved to another number of blocks")
        for level in range(len(self._pool)):
            for block, host_block in zip(blocks.tolist(), host_blocks.tolist(), strict=True):
                on_device, on_host = self._pool[level, block], self._host[level, host_block]
                if op.up:
                    on_device.copy_(on_host, non_blocking=True)
                else:
                    on_host.copy_(on_device, non_blocking=True)

    def _index(self, blocks: bytes, count: int) -> Tensor:
        """Return int64 [count] on the device: rows of the pool."""
        return upload(self._rows_of(self._blocks(blocks, count), 0, count), self._device)

    def _rows_of(self, blocks: np.ndarray, begin: int, end: int) -> np.ndarray:
        return self._places_of(blocks, np.arange(begin, end))

    def _places_of(self, blocks: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Return the pool rows of the embedding rows ``row``."""
        return blocks[row // self._rows] * self._rows + row % self._rows

    def _blocks(self, blocks: bytes, count: int) -> np.ndarray:
        """Return the block numbers of an embedding of ``count`` rows, int64. Raises EngineDead for invalid
        blocks or too few blocks."""
        numbers = self._checked(blocks, self._pool.shape[1])
        if not 0 < count <= len(numbers) * self._rows:
            raise EngineDead(f"an embedding of {count} rows is assigned {len(numbers)} blocks")
        return numbers

    def _checked(self, blocks: bytes, number: int) -> np.ndarray:
        """Return the block numbers in ``blocks`` (little-endian int32) as int64. Raises EngineDead unless all
        are between 1 and ``number`` - 1."""
        numbers = np.frombuffer(blocks, "<i4").astype(np.int64)
        if len(numbers) and not 0 < numbers.min() <= numbers.max() < number:
            raise EngineDead(f"a step names block {numbers.max()} of embeddings; there are {number - 1}")
        return numbers


class EmbeddingSpans:
    """Rope spans of the images of each slot: int32 [slots + 1, 1 + most items, 6], allocated once.

    The first entry covers the text before all images. The other entries are those of
    ``weft.types.media_item.spans_of``.
    """

    def __init__(self, slots: int, most: int, device: torch.device) -> None:
        """``slots``: number of slots with the spare slot, which always has text only."""
        empty = np.array([NO_IMAGE, *[NOWHERE] * most], np.int32)
        self._empty = empty
        self.table = torch.from_numpy(empty).repeat(slots, 1, 1).to(device)
        self._starts = self.table.select(2, 0)
        self._entries = self.table.view(-1, SPAN)

    def alloc(self, slot: int, spans: np.ndarray) -> None:
        """Set the spans of a new sequence in ``slot``. spans: int32 [items * 6]. Raises EngineDead if the
        spans do not fit."""
        items = len(spans) // SPAN
        if len(spans) % SPAN or items >= len(self._empty):
            raise EngineDead(f"slot {slot} is allocated with images that do not fit into the table")
        table = self._empty.copy()
        table[1 : 1 + items] = spans.reshape(-1, SPAN)
        self.table[slot] = upload(table, self.table.device)

    def rope_positions(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return int64 [3, T]: frame, row and column for the rotation of tokens at ``positions`` of
        ``slots``.

        slots, positions: int64 [T]. The calls do not depend on the values and never wait for the device, so
        captured steps may contain the calls.
        """
        # [T]: number of spans that begin at or before the token; the last such span applies
        begun = (positions.unsqueeze(1) >= self._starts[slots]).sum(1)
        span = self._entries[torch.add(begun - 1, slots, alpha=len(self._empty))].long()
        count, lag, rows, columns, rope = span[:, 1], span[:, 2], span[:, 3], span[:, 4], span[:, 5]
        token = positions - span[:, 0]
        inside = token < count
        # Text behind an image continues after the longest side of the image, or after the last group's lag.
        behind = rope + token - count + torch.maximum(torch.maximum(rows, columns), lag + 1)
        frame = torch.where(inside, rope + lag + token // (rows * columns), behind)
        row = torch.where(inside, rope + token // columns % rows, behind)
        column = torch.where(inside, rope + token % columns, behind)
        return torch.stack([frame, row, column])
