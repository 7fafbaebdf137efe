"""Images of a prompt as data: what stands for them in its tokens, and their pixels."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from weft.common.shared_bytes import SharedName
from weft.types.rooms import RoomTicket

BLOCK_ROWS = 64
"""Rows of a block of embeddings: the unit in which they are kept, and sent to other groups."""


class MediaItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One image of a prompt (or one frame group of a video), resized as the model wants it."""

    key: bytes
    """16 bytes, made by the media worker of the pixels, their shape and how they were processed, and of the
    request's salt. Prefix caches and embedding caches know the image by it."""
    start: int
    """Position of the first of its placeholder tokens in the prompt."""
    count: int
    """Placeholder tokens, and rows of its embedding."""
    grid: tuple[int, int, int]
    """Frame groups, rows and columns of patches, before neighbours are merged."""
    pixels: bytes = b""
    """uint8 [frames, height, width, 3]. On the wire an attachment of the message."""
    shared: SharedName | None = None
    """Where the pixels are found on this host, for as long as the sender of the message has them. On the wire
    in their place; here beside them."""
    room: RoomTicket | None = None
    """Where another group encodes it: the transfer of its embedding."""


def without_pixels(items: tuple[MediaItem, ...]) -> tuple[MediaItem, ...]:
    """``items`` for a group that needs to know where the images are, and not what is in them."""
    return tuple(msgspec.structs.replace(item, pixels=b"", shared=None) for item in items)


SPAN = 6
"""Numbers of a span; see ``spans_of``."""


def spans_of(items: Iterable[MediaItem], merge: int) -> np.ndarray:
    """Where the images of a prompt are, and how its positions count in them: int32 [items, 6].

    A row is (start, count, frames, rows, columns, rope): position and number of its tokens, the grid of its
    tokens (``merge`` x ``merge`` patches each), and the rope position of its first token. ``items`` are in
    order of position and do not overlap. An image takes as many rope positions as its longer side has
    tokens, the text behind it goes on from there.
    """
    spans = []
    end, rope = 0, 0
    for item in items:
        frames, rows, columns = item.grid[0], item.grid[1] // merge, item.grid[2] // merge
        if item.start < end:
            raise ValueError("images of a prompt overlap, or are not in order")
        rope += item.start - end
        spans.append((item.start, item.count, frames, rows, columns, rope))
        end = item.start + item.count
        rope += max(rows, columns)
    return np.array(spans, dtype=np.int32).reshape(-1, SPAN)


def rope_positions(spans: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Frame, row and column by which the token at each position is rotated: int64 [3, T].

    spans: int32 [items, 6] as ``spans_of`` makes them; positions: int64 [T], of one sequence, any of them.
    Text tokens have the same number three times. This is the definition, for tests; steps compute the same
    on the device (``Spans.rope_positions`` in ``weft/runner/media.py``). Source: Qwen2-VL, arXiv 2409.12191,
    section 2.1, with each frame of a video an item of its own (Qwen3-VL).
    """
    result = np.repeat(positions[np.newaxis].astype(np.int64), 3, axis=0)
    for start, count, _, rows, columns, rope in spans.astype(np.int64):
        inside = (positions >= start) & (positions < start + count)
        token = positions[inside] - start
        result[0, inside] = rope + token // (rows * columns)
        result[1, inside] = rope + token // columns % rows
        result[2, inside] = rope + token % columns
        behind = positions >= start + count
        result[:, behind] = positions[behind] - (start + count) + rope + max(rows, columns)
    return result
