"""Images of a simulated cluster: the encode groups, the images of requests, and the scarce embedding
memory."""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec

from testing.cluster.check import VOCABULARY, token_key
from testing.cluster.clients import Client
from testing.cluster.transfers.embedding_side import LEVELS
from weft.config.resolved import KVConfig, MediaLimits
from weft.config.sections.all import SchedulerSection
from weft.types.media_item import MediaItem
from weft.types.messages import Role, ids_to_bytes

BESIDE_PAIRS = 0.45
"""Share of schedules with encode groups, among the schedules with pairs."""
ALONE = 0.06
"""Share of the other schedules in which encode groups stand beside unified groups."""
UNIFIED: tuple[tuple[Role, ...], ...] = (
    ("unified", "encode"),
    ("unified", "unified", "encode"),
    ("unified", "encode", "encode"),
)
SEEING = 0.65
"""Share of requests with images."""
ROWS = 2
"""Rows of a block. An image has one to three blocks."""
ROW_BYTES = 8 * LEVELS
_COUNTS = (1, 2, 3, 4, 5)
"""Image number -> rows of the image."""
_MOST_BLOCKS = 5
"""Maximum blocks of the images of a prompt. Compute groups have room for all these blocks."""
_PLACEHOLDER = VOCABULARY - 1


class ImageWorld:
    """Images and encode groups of one schedule.

    Uses a random generator of its own, so schedules without encode groups do not depend on it.
    """

    def __init__(self, seed: int) -> None:
        """Draw the sizes of the schedule ``seed``."""
        rng = self._rng = random.Random(f"images of {seed}")
        self._apart = rng.random()
        self.towers = rng.random() < 0.3
        """True if compute groups have a vision tower, too."""
        self._taken = rng.choice((_MOST_BLOCKS, _MOST_BLOCKS + 1, _MOST_BLOCKS + 4))
        self._made = rng.choice((3, 3, 4, 6))
        self._host = rng.choice((0, 0, 3))
        self._patches = rng.choice((1, 4, 8))
        self._items = rng.choice((1, 2, 4))
        self._queue = rng.choice((1, 8, 8, 8))
        self.there = False
        """True if there are encode groups."""
        self._shown: dict[int, tuple[MediaItem, ...]] = {}
        """Key of a sequence -> images of the sequence."""

    def roles(self, roles: list[Role], paired: bool) -> list[Role]:
        """Return the roles of a cluster: ``roles`` plus encode groups, or another set of roles with encode
        groups. Sets ``there``. Most schedules keep ``roles`` unchanged.
        """
        if self._apart >= (BESIDE_PAIRS if paired else ALONE):
            return roles
        self.there = True
        if not paired:
            return list(self._rng.choice(UNIFIED))
        encode: list[Role] = ["encode"] * self._rng.choice((1, 1, 2))
        return roles + encode

    def caches(self, kv: KVConfig, role: Role) -> KVConfig:
        """Return the cache settings of a group of ``role``. ``kv`` are the settings of a compute group."""
        if not self.there:
            return kv
        encodes, computes = role == "encode", role in ("prefill", "unified")
        blocks = self._made if encodes else self._taken
        limits = MediaLimits(
            patch=1,
            merge=1,
            row_bytes=ROW_BYTES,
            cache_bytes=blocks * ROWS * ROW_BYTES,
            encode_patches=self._patches,
            encode_items=self._items,
            most_items=4,
            tower=encodes or (computes and self.towers),
            takes=computes,
            host_bytes=self._host * ROWS * ROW_BYTES if encodes or computes else 0,
            levels=LEVELS - 1,
            width=1,
            block_rows=ROWS,
        )
        pools = () if encodes else kv.pools
        return msgspec.structs.replace(kv, pools=pools, media=limits)

    def show(self, client: Client) -> None:
        """Give a client's request images in some cases: changes prompt, media and pin of ``client``, and
        records the images for ``seen``.
        """
        rng = self._rng
        if not self.there or rng.random() >= SEEING:
            return
        prompt = [rng.randrange(_PLACEHOLDER) for _ in range(rng.randint(0, 2))]
        media: list[MediaItem] = []
        blocks = 0
        for _ in range(rng.choice((1, 1, 2, 3))):
            number = rng.randrange(len(_COUNTS))
            count = _COUNTS[number]
            blocks += -(-count // ROWS)
            if blocks > _MOST_BLOCKS:
                break
            media.append(_item(number, len(prompt), count))
            prompt += [_PLACEHOLDER] * count
            prompt += [7] * rng.randint(0, 1)
        client.prompt, client.media, client.pinned = [*prompt, 7], tuple(media), False
        data = ids_to_bytes(client.prompt)
        for choice in range(client.choices):
            self._shown[token_key(data, client.seed, choice)] = client.media

    def section(self, section: SchedulerSection, role: Role) -> SchedulerSection:
        """Return the settings of a group of ``role``. Encode groups mostly get a longer queue.

        Each request may be at several encode groups, so short queues would refuse too much.
        """
        if role != "encode":
            return section
        return msgspec.structs.replace(section, max_queued_requests=self._queue)

    def shown(self, key: int) -> tuple[MediaItem, ...]:
        """Return the images of the sequence with the key ``key``."""
        return self._shown.get(key, ())

    def seen(self, key: int) -> Mapping[int, int]:
        """Return placeholder position -> content shown there, for the sequence with the key ``key``."""
        return {
            item.start + row: 1000 * (1 + item.pixels[0]) + row
            for item in self._shown.get(key, ())
            for row in range(item.count)
        }


def _item(number: int, start: int, count: int) -> MediaItem:
    """Return the image ``number`` at ``start``. Every byte of the pixels is the number."""
    return MediaItem(
        key=number.to_bytes(16, "little"),
        start=start,
        count=count,
        grid=(1, 1, count),
        pixels=bytes([number]) * (3 * count),
    )
