"""Images on a rank: the embeddings that plans name, rows that read them, positions that count by them.

The head decides what is encoded and forgotten; here it is carried out, on the stream of the compute, in the
order of plans. One image at a time goes through the tower, so its embedding does not depend on the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch

from weft.attention.base import MediaRows
from weft.common.errors import EngineDead
from weft.config.resolved import MediaLimits
from weft.ops.upload import upload
from weft.types.media import SPAN
from weft.types.plan import BindMedia, DropMedia, Encode, Op, Segment

Tensor = torch.Tensor

NO_IMAGE = (0, 0, 1, 1, 1, -1)
"""The first entry of every slot's spans: text from position 0 on, which is rotated by its position."""
NOWHERE = (1 << 30, 0, 1, 1, 1, 0)
"""What fills up a slot's spans."""


class Embedded(Protocol):
    """What a tower makes of an image: the contract of ``weft.models.vision``."""

    @property
    def main(self) -> Tensor:
        """[rows, hidden]."""

    @property
    def levels(self) -> Tensor | None:
        """[n, rows, hidden] of models with deepstack."""


class Tower(Protocol):
    """What encodes images."""

    def embed(self, image: Tensor) -> Embedded:
        """``image``: uint8 [frames, height, width, 3], on the model's device."""


class MediaStore:
    """The embeddings of one rank. Owned by the runner and used from its thread only."""

    def __init__(self, tower: Tower | None, limits: MediaLimits | None, device: torch.device) -> None:
        """Without ``tower`` and ``limits`` no plan may have an image."""
        self._tower = tower
        self._patch = 0 if limits is None else limits.patch
        self._device = device
        self._embedded: dict[int, Embedded] = {}
        self._bound: dict[int, list[BindMedia]] = {}
        """Of the last plan, by slot, in order of position."""

    def __len__(self) -> int:
        return len(self._embedded)

    def apply(self, ops: Iterable[Op]) -> float:
        """Carries out what a plan says of images; seconds that encoding took (on a GPU: to launch it).

        Raises EngineDead for what cannot be right.
        """
        self._bound.clear()
        seconds = 0.0
        for op in ops:
            if isinstance(op, Encode):
                began = time.monotonic()
                self._encode(op)
                seconds += time.monotonic() - began
            elif isinstance(op, DropMedia):
                self._held(op.media)
                del self._embedded[op.media]
            elif isinstance(op, BindMedia):
                if op.count != len(self._held(op.media).main):
                    raise EngineDead(f"slot {op.slot} has {op.count} positions of an image with other rows")
                self._bound.setdefault(op.slot, []).append(op)
        return seconds

    def _encode(self, op: Encode) -> None:
        if self._tower is None or op.media in self._embedded:
            raise EngineDead(f"image {op.media} cannot be encoded here")
        _, rows, columns = op.grid
        pixels = np.frombuffer(op.pixels, np.uint8).copy()
        image = torch.from_numpy(pixels.reshape(-1, rows * self._patch, columns * self._patch, 3))
        self._embedded[op.media] = self._tower.embed(image.to(self._device))

    def _held(self, media: int) -> Embedded:
        found = self._embedded.get(media)
        if found is None:
            raise EngineDead(f"a step names image {media}, of which there is no embedding")
        return found

    def rows(self, prefill: Segment, shift: int = 0) -> MediaRows | None:
        """The rows of ``prefill``, the first of a step or micro-batch, that stand for images; None: none.

        The segment is of the last plan, or a part of it; its starts are exact, as of all prefill rows. A row
        at position p reads what is at ``p + shift``, if the plan has bound it.
        """
        places: list[np.ndarray] = []
        main: list[Tensor] = []
        levels: list[Tensor] = []
        begins = np.cumsum(prefill.count) - prefill.count if self._bound else ()
        for row, first in enumerate(begins):
            start = int(prefill.start[row]) + shift
            end = start + int(prefill.count[row])
            for op in self._bound.get(int(prefill.slot[row]), ()):
                low, high = max(start, op.start), min(end, op.start + op.count)
                if low >= high:
                    continue
                embedded = self._embedded[op.media]
                part = slice(low - op.start, high - op.start)
                places.append(np.arange(low, high) + (int(first) - start))
                main.append(embedded.main[part])
                if embedded.levels is not None:
                    levels.append(embedded.levels[:, part])
        if not places:
            return None
        return MediaRows(
            rows=upload(np.concatenate(places).astype(np.int64), self._device),
            main=torch.cat(main),
            levels=torch.cat(levels, dim=1) if levels else None,
        )

    def clear(self) -> None:
        """An epoch has ended: nothing is held."""
        self._embedded.clear()
        self._bound.clear()


class Spans:
    """How the positions of each slot count: int32 [slots + 1, 1 + most items, 6], preallocated.

    Entries are those of ``weft.types.media.spans_of``, behind one that stands for the text before them.
    """

    def __init__(self, slots: int, most: int, device: torch.device) -> None:
        """``slots``: with the spare one, which has text alone for ever."""
        empty = np.array([NO_IMAGE, *[NOWHERE] * most], np.int32)
        self._empty = empty
        self.table = torch.from_numpy(empty).repeat(slots, 1, 1).to(device)
        self._starts = self.table.select(2, 0)
        self._entries = self.table.view(-1, SPAN)

    def alloc(self, slot: int, spans: np.ndarray) -> None:
        """``slot`` has a new sequence. spans: int32 [items * 6]. Raises EngineDead when they do not fit."""
        items = len(spans) // SPAN
        if len(spans) % SPAN or items >= len(self._empty):
            raise EngineDead(f"slot {slot} is allocated with images that do not fit into the table")
        table = self._empty.copy()
        table[1 : 1 + items] = spans.reshape(-1, SPAN)
        self.table[slot] = upload(table, self.table.device)

    def rope_positions(self, slots: Tensor, positions: Tensor) -> Tensor:
        """int64 [3, T]: frame, row and column by which tokens at ``positions`` of ``slots`` are rotated.

        slots, positions: int64 [T]. The same calls whatever they hold, none of which asks the host: steps
        that are replayed have them among theirs.
        """
        begun = (positions.unsqueeze(1) >= self._starts[slots]).sum(1)
        span = self._entries[torch.add(begun - 1, slots, alpha=len(self._empty))].long()
        count, rows, columns, rope = span[:, 1], span[:, 3], span[:, 4], span[:, 5]
        token = positions - span[:, 0]
        inside = token < count
        behind = rope + token - count + torch.maximum(rows, columns)
        frame = torch.where(inside, rope + token // (rows * columns), behind)
        row = torch.where(inside, rope + token // columns % rows, behind)
        column = torch.where(inside, rope + token % columns, behind)
        return torch.stack([frame, row, column])
