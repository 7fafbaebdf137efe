"""Prompts with images for ``weft verify --topology``, and the image counters of groups."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import msgspec

from weft.cli.verify.verify_run import Prompts
from weft.config.media import Fit, MediaFacts
from weft.types.media_item import MediaItem
from weft.types.messages import EngineStats, Submit, TransferStats, ids_to_bytes

SIDES = ((2, 3), (3, 2), (1, 4), (4, 4))
"""Rows and columns of images, in tokens. A model with a minimum image size enlarges the images."""


def with_pictures(asked: Sequence[Submit], prompts: Prompts, facts: MediaFacts, room: int) -> list[Submit]:
    """Return copies of ``asked`` with images in front of each prompt: 1, 2, 3, 1, .. images per prompt.

    Some images repeat an earlier image, so that embeddings are reused between prompts. Prompts without space
    in ``room`` tokens get fewer images. Image tokens in ``prompts`` are replaced by a plain token.
    """
    rng = random.Random(1)
    special = (facts.placeholder, facts.video, facts.start, facts.end, facts.row_end)
    reserved = {one for one in special if one is not None}
    plain = next(one for one in range(len(reserved) + 1) if one not in reserved)
    made = []
    pictures: list[tuple[Fit, bytes]] = []
    for number, (submit, prompt) in enumerate(zip(asked, prompts, strict=True)):
        text = [plain if one in reserved else one for one in prompt]
        ids: list[int] = []
        items: list[MediaItem] = []
        for place in range(number % 3 + 1):
            # The second image of a prompt is a random earlier image.
            if place % 2 and pictures:
                fit, pixels = rng.choice(pictures)
            else:
                fit, pixels = _picture(facts, rng)
                pictures.append((fit, pixels))
            if len(ids) + fit.tokens + 2 + len(text) > room:
                break
            ids += [] if facts.start is None else [facts.start]
            items.append(_item(fit, pixels, len(ids)))
            ids += facts.tokens_of(facts.placeholder, fit.tokens, fit.grid)
            ids += [] if facts.end is None or facts.row_end is not None else [facts.end]
        made.append(
            msgspec.structs.replace(submit, prompt_ids=ids_to_bytes([*ids, *text]), media=tuple(items))
        )
    return made


def _picture(facts: MediaFacts, rng: random.Random) -> tuple[Fit, bytes]:
    """Return a random image: the fit and the pixels."""
    rows, columns = rng.choice(SIDES)
    token = facts.patch * facts.merge
    fit = facts.grid_of(rows * token, columns * token)
    return fit, rng.randbytes(3 * fit.padded[0] * fit.padded[1])


def _item(fit: Fit, pixels: bytes, start: int) -> MediaItem:
    """Return the media item of an image at position ``start`` of a prompt."""
    key = hashlib.blake2b(pixels + repr(fit.grid).encode(), digest_size=16).digest()
    return MediaItem(key=key, start=start, count=fit.tokens, grid=fit.grid, pixels=pixels)


def image_counters(stats: EngineStats, encodes: bool) -> str:
    """Return the image counters of an instance as text. ``encodes``: True for an encode group."""
    moved = stats.embedding_transfers or TransferStats()
    transfers = f"{moved.done} embedding transfers done, {moved.failed} failed"
    if encodes:
        return f"{stats.images_encoded} images encoded, {transfers}, {moved.sent_bytes} bytes sent"
    return f"{transfers}, {moved.received_bytes} bytes received"
