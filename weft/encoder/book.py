"""Images that other groups wait for: whose they are, in which order they are encoded, how their rooms stand.

    add ──► offered ──RoomBound──► bound ──plan with SendMedia──► sent ──commit──► finished ──Landed──► gone
                │                    │                              │
                ╰────────────────────┴── ends otherwise ────────────┴──► over ──Freed──► gone

A room keeps its embedding where it is (a pin) from the plan that says ``SendMedia`` until nobody reads it any
more, whatever became of its sequence.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass, field

import msgspec

from weft.common.errors import InvalidRequest
from weft.config.resolved import MediaLimits
from weft.kv.embeddings import Embedded
from weft.scheduler.media import check_media
from weft.types.media import MediaItem, without_pixels
from weft.types.messages import Submit
from weft.types.rooms import MOST_SECONDS, RoomKey


@dataclass(slots=True, eq=False)
class ItemRoom:
    """One image on its way to another group."""

    key: RoomKey
    sequence: ItemSequence
    item: MediaItem
    """With its pixels while its sequence lives: it may have to be encoded again."""
    order: tuple[int, int, int]
    """Priority, arrival, number in its sequence: in this order images are encoded and leave."""
    bound: bool = False
    """Whether the receiver has memory for it."""
    owner: bool = False
    """Whether its image was encoded for it."""
    held: Embedded | None = None
    """What it has a pin on."""
    sent: bool = False
    """Whether a plan says that it may leave, or nothing of it has to."""
    over: bool = False
    """Whether it failed, or was cancelled."""


@dataclass(slots=True, eq=False)
class ItemSequence:
    """The images of one sequence that this group encodes."""

    id: int
    rooms: list[ItemRoom] = field(default_factory=list)
    left: int = 0
    """Rooms that have not landed."""
    admitted: bool = False
    """Whether a plan has something of it."""


class ItemBook:
    """The sequences and rooms of one group."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self.live: dict[int, ItemSequence] = {}
        self._rooms: dict[RoomKey, ItemRoom] = {}
        """Those that have not ended, of sequences that may have."""
        self._queue: list[tuple[tuple[int, int, int], ItemRoom]] = []
        """Those that have not been sent, in order; with some that have, or are over, if so ``_stale``."""
        self._stale = False
        self._arrivals = 0
        self.pixels = 0
        """Bytes of all live sequences."""

    def get(self, key: RoomKey) -> ItemRoom | None:
        return self._rooms.get(key)

    def check(self, submit: Submit) -> int:
        """Bytes of its pixels. Raises InvalidRequest for what this group can have no part in."""
        if submit.room is not None or submit.grammar is not None or submit.pooling:
            raise InvalidRequest(
                "a group that encodes images makes no tokens, and moves no caches", param="room"
            )
        if not submit.media:
            raise InvalidRequest("a group that encodes images needs some", param="media")
        here = tuple(msgspec.structs.replace(item, room=None) for item in submit.media)
        check_media(here, max(item.start + item.count for item in here), self._limits, True)
        keys = set()
        for item in submit.media:
            ticket = item.room
            if ticket is None or not ticket.sends:
                raise InvalidRequest("an image to be encoded needs a room in which it is sent", param="media")
            if not (math.isfinite(ticket.seconds) and 0 < ticket.seconds <= MOST_SECONDS):
                raise InvalidRequest(f"seconds must be above 0 and at most {MOST_SECONDS:g}", param="media")
            if ticket.key in self._rooms or ticket.key in keys:
                raise InvalidRequest("this room is known: a retry has an attempt of its own", param="media")
            keys.add(ticket.key)
        if submit.sequence in self.live:
            raise InvalidRequest("a sequence of this id is live", param="sequence")
        return sum(len(item.pixels) for item in submit.media)

    def add(self, submit: Submit) -> ItemSequence:
        """Takes in what ``check`` let pass."""
        sequence = self.live[submit.sequence] = ItemSequence(submit.sequence)
        for number, item in enumerate(submit.media):
            assert item.room is not None
            order = (submit.priority, self._arrivals, number)
            room = self._rooms[item.room.key] = ItemRoom(item.room.key, sequence, item, order)
            sequence.rooms.append(room)
            insort(self._queue, (order, room), key=lambda entry: entry[0])
            self.pixels += len(item.pixels)
        sequence.left = len(sequence.rooms)
        self._arrivals += 1
        return sequence

    def send(self, room: ItemRoom) -> None:
        """Notes that a plan says the embedding may leave, or that nothing of it has to."""
        room.sent = self._stale = True

    def fail(self, room: ItemRoom) -> None:
        """Notes that the room failed, or was cancelled."""
        room.over = self._stale = True

    @property
    def waits(self) -> bool:
        """Whether a room has not been sent."""
        self._clean()
        return bool(self._queue)

    def waiting(self) -> list[ItemRoom]:
        """Rooms that have not been sent, in order."""
        self._clean()
        return [room for _, room in self._queue]

    def _clean(self) -> None:
        if self._stale:
            self._stale = False
            self._queue = [(order, room) for order, room in self._queue if not (room.sent or room.over)]

    def end(self, sequence: ItemSequence) -> list[ItemRoom]:
        """A sequence is none any more. Its rooms that have not ended, which are over."""
        del self.live[sequence.id]
        self.pixels -= sum(len(room.item.pixels) for room in sequence.rooms)
        for room in sequence.rooms:  # some are read for a while yet, and none is encoded
            (room.item,) = without_pixels((room.item,))
        ended = [room for room in sequence.rooms if room.key in self._rooms and not room.over]
        for room in ended:
            self.fail(room)
            if room.held is None:
                del self._rooms[room.key]
        return ended

    def close(self, room: ItemRoom) -> None:
        """Nobody outside touches the embedding for it any more."""
        self._rooms.pop(room.key, None)

    @property
    def unsent(self) -> int:
        """Sequences with an image that has not been sent."""
        return len({room.sequence.id for room in self.waiting()})
