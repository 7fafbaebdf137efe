"""What the next step of a group that encodes does: which embeddings may leave, which images are encoded.

    1  rooms that are bound, and whose embedding is there, in order      SendMedia (from the host's tier: up)
    2  images of rooms that are bound, in order, while they fit          Encode, then SendMedia for each room
    3  images of rooms that are not bound yet, likewise                  Encode

What 1 sends leaves in a step of its own, but never twice running while images wait for the tower: a room
ends when its step has.

A batch has at most ``encode_patches`` and ``encode_items``; an image with more patches goes alone. The order
is that of sequences and of images within them, and nobody is passed by: the first that does not fit ends the
batch, and a full pool ends it until something has left.

Only what has been promised to a receiver that has memory for it is pinned. So the first in order of those
can always have what it needs, once embeddings that are on their way have landed: all others may be evicted,
and no two groups wait for one another's memory. What is encoded ahead of its receiver takes no memory from
anything that somebody waits for.
"""

from __future__ import annotations

from weft.config.resolved import MediaLimits
from weft.encoder.book import ItemBook, ItemRoom
from weft.kv.embeddings import Embedded, EmbeddingCache
from weft.scheduler.media import MOST_PIXELS, encoding, patches_of
from weft.types.plan import SendMedia


class Batch:
    """One step of a group that encodes, in the making. Its ops are in ``cache``."""

    def __init__(self, book: ItemBook, cache: EmbeddingCache, limits: MediaLimits, step: int) -> None:
        self._book, self._cache, self._limits, self._step = book, cache, limits, step
        self.sent: list[ItemRoom] = []
        """Whose embeddings may leave with it."""
        self.encoded: list[ItemRoom] = []
        """One for each image that it encodes."""
        self.hurried = False
        """Whether it only sends, though images wait for the tower."""
        self._patches = self._pixels = 0
        self._ended = False
        self._waiting = book.waiting()
        self._wanted = {room.item.key for room in self._waiting}

    def fill(self, starved: ItemRoom | None, hurry: bool = False) -> ItemRoom | None:
        """Decides. The cache is as after the step then. ``starved``: what the step before returned, the first
        bound room for which the pool was full: nothing behind it gets a pin before it does. ``hurry``:
        whether embeddings that are there leave in a step of their own, instead of waiting for the tower.
        """
        bound = [room for room in self._waiting if room.bound]
        if starved is not None and (starved.sent or starved.over):
            starved = None
        self._send_what_is_there([r for r in bound if starved is None or r.order <= starved.order])
        self.hurried = hurry and 0 < len(self.sent) < len(self._waiting)
        if self.hurried:
            return None if starved is None or starved.sent else starved
        full = self._encode([room for room in bound if not room.sent], bound=True)
        if full is None and not self._ended:
            self._encode([room for room in self._waiting if not room.bound], bound=False)
        return full or (None if starved is None or starved.sent else starved)

    # ----

    def _send_what_is_there(self, bound: list[ItemRoom]) -> None:
        for room in bound:
            held = self._cache.find(room.item.key)
            if held is None:
                continue
            if held.on_host and not self._cache.lift(held, self._victims(True)):
                return
            self._send(room, held)

    def _encode(self, rooms: list[ItemRoom], *, bound: bool) -> ItemRoom | None:
        """Returns the first for which the pool is full: then, and where the batch is, it ends there."""
        for room in rooms:
            item = room.item
            held = self._cache.find(item.key)
            if held is None:
                if not self._has_place(patches_of(item), len(item.pixels)):
                    self._ended = True
                    return None
                held = self._cache.add(item.key, item.count, self._victims(bound))
                if held is None:
                    return room
                self._cache.op(encoding(item, held))
                self._cache.touch(held, self._step)
                self._patches += patches_of(item)
                self._pixels += len(item.pixels)
                room.owner = True
                self.encoded.append(room)
            elif bound and held.on_host and not self._cache.lift(held, self._victims(True)):
                return room
            if bound:
                self._send(room, held)
        return None

    def _has_place(self, patches: int, pixels: int) -> bool:
        if not self.encoded:
            return True
        limits = self._limits
        return (
            len(self.encoded) < limits.encode_items
            and self._patches + patches <= limits.encode_patches
            and self._pixels + pixels <= MOST_PIXELS
        )

    def _victims(self, unbound: bool) -> list[Embedded]:
        """What may be evicted, first ones first: what nobody waits for; with ``unbound``, then what is there
        for rooms that are not bound, the last in order first."""
        may_go = self._cache.victims()
        free = [held for held in may_go if held.key not in self._wanted]
        if not unbound:
            return free
        place = {room.item.key: number for number, room in reversed(list(enumerate(self._waiting)))}
        needed = [held for held in may_go if held.key in self._wanted]
        return free + sorted(needed, key=lambda held: -place[held.key])

    def _send(self, room: ItemRoom, held: Embedded) -> None:
        self._cache.pin(held)
        self._cache.touch(held, self._step)
        self._cache.op(SendMedia(key=room.key, blocks=held.ids, count=held.count))
        room.held = held
        self._book.send(room)
        self.sent.append(room)
