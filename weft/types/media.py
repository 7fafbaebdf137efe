"""Images of a prompt as data: what stands for them in its tokens, and their pixels."""

from __future__ import annotations

import msgspec


class MediaItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One image of a prompt (or one frame group of a video), resized as the model wants it."""

    key: bytes
    """16 bytes, made by the media worker of the pixels, their shape and how they were processed. Prefix
    caches and embedding caches know the image by it."""
    start: int
    """Position of the first of its placeholder tokens in the prompt."""
    count: int
    """Placeholder tokens, and rows of its embedding."""
    grid: tuple[int, int, int]
    """Frame groups, rows and columns of patches, before neighbours are merged."""
    pixels: bytes = b""
    """uint8 [frames, height, width, 3]. On the wire an attachment of the message."""
