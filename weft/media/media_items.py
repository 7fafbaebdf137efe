"""Media items from the pixels of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from weft.common.shared_bytes import SharedBytes
from weft.media.decode import key_of
from weft.media.media_messages import MediaDone
from weft.media.pictures import Picture
from weft.types.media_item import MediaItem


def item_of(picture: Picture, pixels: bytes) -> MediaItem:
    """Return the item of a picture with its pixels, uint8 [frames, height, width, 3] as bytes."""
    key = key_of(pixels, picture.target)
    return MediaItem(
        key=key,
        start=picture.start,
        count=picture.count,
        grid=picture.grid,
        pixels=pixels,
        lag=picture.lag,
    )


def items_of(
    pictures: Sequence[Picture], shared: Sequence[SharedBytes | None], done: MediaDone, rest: memoryview
) -> list[MediaItem]:
    """Return the items of ``pictures`` from the reply of a media worker, in order.

    ``shared``: memory given to the worker for the pixels of each item. ``rest``: bytes behind the reply.
    Raises ValueError for a reply that does not fit, and OSError if memory cannot be sealed.
    """
    if not len(done.keys) == len(done.written) == len(pictures):
        raise ValueError("the reply has another number of items")
    items, at = [], 0
    for picture, memory, key, is_written in zip(pictures, shared, done.keys, done.written, strict=True):
        if is_written and memory is not None:
            pixels = memory.seal()
        else:
            pixels, memory = rest[at : at + picture.nbytes], None
            at += picture.nbytes
        if len(pixels) != picture.nbytes:
            raise ValueError("the pixels of an item do not fit")
        items.append(
            MediaItem(
                key=key,
                start=picture.start,
                count=picture.count,
                grid=picture.grid,
                pixels=cast(bytes, pixels),  # no copy: copying megabytes would block the event loop
                shared=None if memory is None else memory.name,
                lag=picture.lag,
            )
        )
    return items
