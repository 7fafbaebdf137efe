"""Images of simulated requests: media items for schedulers, and the costs of encoding and sending."""

from __future__ import annotations

import random
from typing import NamedTuple

from weft.config.resolved import MediaLimits
from weft.config.sections.media_section import MediaSection
from weft.config.sizing.media_limits import DEFAULT_BYTES
from weft.types import transfer as r
from weft.types.media_item import BLOCK_ROWS, MediaItem
from weft.types.plan import Encode, StepPlan

MERGE = 2
"""A token covers MERGE x MERGE patches."""


class ImageCosts(NamedTuple):
    """Costs of the images of a load. All images have one size."""

    tokens: int
    """Tokens per image, each of ``MERGE``² patches."""
    patch_seconds: float
    """Seconds that a device needs to encode a patch."""
    row_bytes: int
    """Bytes of one row of an embedding, all levels."""
    repeats: float = 0.0
    """Share of images equal to an earlier image, 0 .. 1."""

    def limits(self, most: int, *, tower: bool, takes: bool) -> MediaLimits:
        """Return the limits of a group, for ``most`` images per prompt.

        ``tower``: the group encodes. ``takes``: the group receives embeddings.
        """
        section = MediaSection()
        return MediaLimits(
            patch=1,
            merge=MERGE,
            row_bytes=self.row_bytes,
            cache_bytes=max(DEFAULT_BYTES, most * (self.tokens + BLOCK_ROWS) * self.row_bytes),
            encode_patches=section.max_encode_patches,
            encode_items=section.max_encode_items,
            most_items=most,
            tower=tower,
            takes=takes,
        )

    def dims(self) -> r.GroupDims:
        """Return the layout of embeddings in the form of transfers."""
        kind = r.CacheGroupDims(
            kind="embedding", layers=(0,), block_size=BLOCK_ROWS, window=0, ratio=1, kv_heads=0, tensors=()
        )
        return r.GroupDims(ranks=1, kinds=(kind,))


class Images:
    """Makes the images of one run. The seed determines the images."""

    def __init__(self, costs: ImageCosts, seed: int) -> None:
        self._costs = costs
        self._rng = random.Random(seed)
        self._made = 0
        self._pixels = bytes(3 * costs.tokens * MERGE**2)

    def items(self, number: int, start: int) -> tuple[MediaItem, ...]:
        """Return ``number`` adjacent images. The first token of the first image is at position ``start``."""
        tokens = self._costs.tokens
        return tuple(
            MediaItem(
                key=self._key(),
                start=start + place * tokens,
                count=tokens,
                grid=(1, MERGE, MERGE * tokens),
                pixels=self._pixels,
            )
            for place in range(number)
        )

    def _key(self) -> bytes:
        """Return the key of the next image, 16 bytes: with probability ``repeats`` the key of an earlier
        image."""
        if self._made and self._rng.random() < self._costs.repeats:
            known = self._rng.randrange(self._made)
        else:
            known, self._made = self._made, self._made + 1
        return known.to_bytes(16, "little")


def patches_in(plan: StepPlan) -> int:
    """Return the number of patches that a step encodes."""
    return sum(op.grid[0] * op.grid[1] * op.grid[2] for op in plan.ops if isinstance(op, Encode))
