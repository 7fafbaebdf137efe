"""Images that one step must compute completely, because their tokens attend to later tokens of the image.

A chunk ends in front of an image, or behind the image. So a chunk may have more tokens than the limit of
chunks: up to the tokens of one image. ``check_whole_images`` makes sure that a step has room for an image.
"""

from __future__ import annotations

from weft.config.resolved import MediaLimits
from weft.scheduler.sequence import Sequence
from weft.types.media_item import MediaItem, items_within
from weft.types.plan import BindMedia


def whole_end(sequence: Sequence, start: int, end: int, room: int, limits: MediaLimits | None) -> int:
    """Return where a chunk over ``start`` .. ``end - 1`` may end without a cut through an image.

    The result is ``start`` if the rest of an image at ``start`` has more than ``room`` tokens. A prefix hit
    may begin within an image: the tokens before ``start`` are complete.
    """
    if limits is None or not limits.whole or end <= start:
        return end
    # At most one item has tokens on both sides of ``end``.
    for item in items_within(sequence.media, end, end):
        if item.start > start:
            return item.start
        behind = item.start + item.count
        return behind if behind - start <= room else start
    return end


def binding(item: MediaItem, slot: int, blocks: bytes, limits: MediaLimits | None) -> BindMedia:
    """Return the slot update that binds ``item`` to the embedding in ``blocks``."""
    columns, whole = (0, False) if limits is None else limits.binding(item.grid)
    return BindMedia(
        slot=slot, start=item.start, count=item.count, blocks=blocks, columns=columns, whole=whole
    )
