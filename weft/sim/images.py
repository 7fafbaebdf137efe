"""Images of simulated requests: what they are to schedulers, and what encoding and sending them costs."""

from __future__ import annotations

import random
from typing import NamedTuple

from weft.config.media_limits import DEFAULT_BYTES
from weft.config.media_section import MediaSection
from weft.config.resolved import MediaLimits
from weft.types import rooms as r
from weft.types.media import BLOCK_ROWS, MediaItem
from weft.types.plan import Encode, StepPlan

MERGE = 2
"""Patches of a token's side."""


class ImageCosts(NamedTuple):
    """Costs of the images of a load, which are all of one size."""

    tokens: int
    """That stand for each of them; ``MERGE``² patches each."""
    patch_seconds: float
    """That a device encodes a patch."""
    row_bytes: int
    """Of one row of an embedding, all levels."""
    repeats: float = 0.0
    """Share of the images that came before, 0 .. 1."""

    def limits(self, most: int, *, tower: bool, takes: bool) -> MediaLimits:
        """The limits of a group, for ``most`` images a prompt. ``tower``: it encodes; ``takes``: it gets
        embeddings.
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
        """Dims of embeddings in rooms."""
        kind = r.KindDims(
            kind="embedding", layers=(0,), block_size=BLOCK_ROWS, window=0, ratio=1, kv_heads=0, tensors=()
        )
        return r.GroupDims(ranks=1, kinds=(kind,))


class Images:
    """Makes images. Of one run; a seed determines them."""

    def __init__(self, costs: ImageCosts, seed: int) -> None:
        self._costs = costs
        self._rng = random.Random(seed)
        self._made = 0
        self._pixels = bytes(3 * costs.tokens * MERGE**2)

    def items(self, number: int, start: int) -> tuple[MediaItem, ...]:
        """``number`` images side by side, the first token of the first at position ``start``."""
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
        if self._made and self._rng.random() < self._costs.repeats:
            known = self._rng.randrange(self._made)
        else:
            known, self._made = self._made, self._made + 1
        return known.to_bytes(16, "little")


def patches_in(plan: StepPlan) -> int:
    """Patches that a step encodes."""
    return sum(op.grid[0] * op.grid[1] * op.grid[2] for op in plan.ops if isinstance(op, Encode))
