"""Images of a prompt as data: placeholder tokens and pixels."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from weft.common.shared_bytes import SharedName
from weft.types.transfer import TransferParameters

BLOCK_ROWS = 64
"""Rows per block of embeddings: the unit of allocation, and of transfers to other groups."""


class MediaItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One image of a prompt (or one frame group of a video), resized to the model's size."""

    key: bytes
    """16-byte key, computed by the media worker from the pixels, the shape, the processing and the request's
    salt. Prefix caches and embedding caches identify the image by the key."""
    start: int
    """Position of the first placeholder token in the prompt."""
    count: int
    """Number of placeholder tokens, and of rows of the embedding."""
    grid: tuple[int, int, int]
    """Frame groups, rows and columns of patches, before neighbours are merged. Where the tower averages the
    frames of an item: frames, rows and columns."""
    pixels: bytes = b""
    """uint8 [frames, height, width, 3]. On the wire an attachment of the message."""
    shared: SharedName | None = None
    """Name of shared memory on the local host with the pixels, valid while the sender of the message keeps
    the pixels. On the wire the name replaces the pixels. In memory both may be present."""
    transfer: TransferParameters | None = None
    """Transfer parameters of the embedding, if another group encodes the image."""
    lag: int | None = None
    """For a frame group that continues the video of the item in front, without text between: rope positions
    from the first group of the video to this group. Rows and columns of the groups share rope positions. None
    for an image, for the first group of a video, and for a group behind text.
    """


def without_pixels(items: tuple[MediaItem, ...]) -> tuple[MediaItem, ...]:
    """Return ``items`` without pixels, for a group that needs only the positions of the images."""
    return tuple(msgspec.structs.replace(item, pixels=b"", shared=None) for item in items)


def items_within(media: Sequence[MediaItem], start: int, end: int) -> Iterator[MediaItem]:
    """Yield the items with positions among ``start`` .. end - 1, in order.

    ``media`` is in order and without overlap. Cost: a binary search, plus the items found.
    """
    at = bisect_right(media, start, key=lambda item: item.start + item.count)
    while at < len(media) and (item := media[at]).start < end:
        yield item
        at += 1


SPAN = 6
"""Numbers per span; see ``spans_of``."""


def spans_of(items: Iterable[MediaItem], merge: int) -> np.ndarray:
    """Return the spans of a prompt's images, with rope positions: int32 [items, 6].

    A row is (start, count, lag, rows, columns, rope): position and number of tokens, the lag behind the first
    group of the video (0 for an image), the grid of tokens (``merge`` x ``merge`` patches each), and the rope
    position of the first row and column. Text behind an image continues behind the longer side of the image.
    Text behind a video of several joined groups continues behind the largest rope position of the video.

    ``items`` must be in order of position, without overlap. An item with a lag must follow the item in front
    without text between. Raises ValueError otherwise.
    """
    spans: list[tuple[int, ...]] = []
    end, rope, first = 0, 0, 0
    for item in items:
        rows, columns = item.grid[1] // merge, item.grid[2] // merge
        if item.start < end:
            raise ValueError("images of a prompt overlap, or are not in order")
        if item.lag is None:
            first = rope + item.start - end
        elif not spans or item.start > end:
            raise ValueError("a group of frames does not follow the group in front")
        lag = item.lag or 0
        spans.append((item.start, item.count, lag, rows, columns, first))
        end = item.start + item.count
        rope = first + max(rows, columns, lag + 1)
    return np.array(spans, dtype=np.int32).reshape(-1, SPAN)


def rope_positions(spans: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the frame, row and column rope position of each token: int64 [3, T].

    spans: int32 [items, 6] from ``spans_of``. positions: int64 [T], any positions of one sequence. A text
    token has three equal numbers. This function is the reference for tests. Steps compute the same on the
    device (``EmbeddingSpans.rope_positions`` in ``weft/runner/images/image_store.py``). Source: Qwen2-VL,
    arXiv 2409.12191, section 2.1. The groups of a video are separate items (Qwen3-VL), or share their rope
    positions (``MediaItem.lag``).
    """
    # [T] -> [3, T]: text tokens first, then each span overwrites the span's tokens and shifts the later text.
    result = np.repeat(positions[np.newaxis].astype(np.int64), 3, axis=0)
    for start, count, lag, rows, columns, rope in spans.astype(np.int64):
        inside = (positions >= start) & (positions < start + count)
        token = positions[inside] - start
        result[0, inside] = rope + lag + token // (rows * columns)
        result[1, inside] = rope + token // columns % rows
        result[2, inside] = rope + token % columns
        behind = positions >= start + count
        result[:, behind] = positions[behind] - (start + count) + rope + max(rows, columns, lag + 1)
    return result
