"""Images for other groups: sequences, encoding order, and the state of each transfer.

    add ──► offered ──RoomBound──► bound ──plan with SendMedia──► sent ──commit──► finished ──Landed──► gone
                │                    │                              │
                ╰────────────────────┴── ends otherwise ────────────┴──► over ──Freed──► gone

A transfer pins the embedding from the plan with ``SendMedia`` until nobody reads the embedding any more, even
if the sequence has ended.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass, field

import msgspec

from weft.common.errors import InvalidRequest
from weft.config.resolved import MediaLimits
from weft.kv.embeddings import Embedded
from weft.scheduler.images.media import check_media
from weft.types.media import MediaItem, without_pixels
from weft.types.messages import Submit
from weft.types.rooms import MOST_SECONDS, RoomKey


@dataclass(slots=True, eq=False)
class ItemRoom:
    """The transfer of one image to another group."""

    key: RoomKey
    sequence: ItemSequence
    item: MediaItem
    """The image. Has pixels while the sequence lives, because the image may have to be encoded again."""
    order: tuple[int, int, int]
    """(priority, arrival, index in the sequence): the order of encoding and sending."""
    bound: bool = False
    """True if the receiver has memory for the embedding."""
    owner: bool = False
    """True if the transfer caused the encoding of the image."""
    held: Embedded | None = None
    """The pinned embedding; None without a pin."""
    sent: bool = False
    """True if a plan sends the embedding, or if nothing has to be sent."""
    over: bool = False
    """True if the transfer failed or was cancelled."""


@dataclass(slots=True, eq=False)
class ItemSequence:
    """The images of one sequence, to be encoded in this group."""

    id: int
    rooms: list[ItemRoom] = field(default_factory=list)
    left: int = 0
    """Number of transfers not received yet."""
    admitted: bool = False
    """True if a plan has work of the sequence."""


class ItemBook:
    """The sequences and transfers of one group."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self.live: dict[int, ItemSequence] = {}
        self._rooms: dict[RoomKey, ItemRoom] = {}
        """Transfers without an end, also of ended sequences."""
        self._queue: list[tuple[tuple[int, int, int], ItemRoom]] = []
        """Unsent transfers in order. If ``_stale``, the list may contain sent and ended transfers too."""
        self._stale = False
        self._arrivals = 0
        self.pixels = 0
        """Bytes of pixels of all live sequences."""

    def get(self, key: RoomKey) -> ItemRoom | None:
        return self._rooms.get(key)

    def check(self, submit: Submit) -> int:
        """Check a Submit. Return the bytes of all pixels. Raises InvalidRequest if this group cannot do the
        work."""
        if submit.room is not None or submit.grammar is not None or submit.pooling:
            raise InvalidRequest(
                "a group that encodes images makes no tokens, and moves no caches", param="room"
            )
        if not submit.media:
            raise InvalidRequest("a group that encodes images needs some", param="media")
        # Check the images like images of a prompt in this group.
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
        """Register the sequence of a Submit and queue its transfers. The caller has called ``check``."""
        sequence = self.live[submit.sequence] = ItemSequence(submit.sequence)
        for number, item in enumerate(submit.media):
            assert item.room is not None
            order = (submit.priority, self._arrivals, number)
            room = self._rooms[item.room.key] = ItemRoom(item.room.key, sequence, item, order)
            sequence.rooms.append(room)
            # A later sequence of a higher priority goes before earlier ones, so insert by order.
            insort(self._queue, (order, room), key=lambda entry: entry[0])
            self.pixels += len(item.pixels)
        sequence.left = len(sequence.rooms)
        self._arrivals += 1
        return sequence

    def send(self, room: ItemRoom) -> None:
        """Mark the transfer as sent, by a plan or because nothing has to be sent."""
        room.sent = self._stale = True

    def fail(self, room: ItemRoom) -> None:
        """Mark the transfer as over, after a failure or a cancellation."""
        room.over = self._stale = True

    @property
    def waits(self) -> bool:
        """True if a transfer has not been sent."""
        self._clean()
        return bool(self._queue)

    def waiting(self) -> list[ItemRoom]:
        """Return the unsent transfers in order."""
        self._clean()
        return [room for _, room in self._queue]

    def _clean(self) -> None:
        if self._stale:
            self._stale = False
            self._queue = [(order, room) for order, room in self._queue if not (room.sent or room.over)]

    def end(self, sequence: ItemSequence) -> list[ItemRoom]:
        """End a sequence and drop the pixels. Return the open transfers, now marked as over; the caller
        cancels the transfers.

        Transfers with a pin stay registered until ``close``.
        """
        del self.live[sequence.id]
        self.pixels -= sum(len(room.item.pixels) for room in sequence.rooms)
        # a transfer may still be read for a while, but no image is encoded any more
        for room in sequence.rooms:
            (room.item,) = without_pixels((room.item,))
        ended = [room for room in sequence.rooms if room.key in self._rooms and not room.over]
        for room in ended:
            self.fail(room)
            if room.held is None:
                del self._rooms[room.key]
        return ended

    def close(self, room: ItemRoom) -> None:
        """Remove the transfer: nobody outside touches the embedding for the transfer any more."""
        self._rooms.pop(room.key, None)

    @property
    def unsent(self) -> int:
        """Number of sequences with an unsent image."""
        return len({room.sequence.id for room in self.waiting()})
