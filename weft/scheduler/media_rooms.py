"""Rooms of embeddings as a scheduler that takes some hears of them: the ``RoomScheduler`` of its head's
second ``HeadRooms``. A sequence awaits until all its images have landed; one that cannot get them is given
back to its front, which sends it again, with other rooms.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from weft.common.errors import ErrorInfo, InvalidRequest, Unavailable
from weft.scheduler.image_rooms import ImageRoom, differs
from weft.scheduler.room_book import is_eviction
from weft.scheduler.sequence import Sequence
from weft.scheduler.state import SchedulerState
from weft.types.messages import Submit, TokenEvent
from weft.types.rooms import (
    MOST_SECONDS,
    Blocks,
    CancelRoom,
    RoomBound,
    RoomEvent,
    RoomFailed,
    RoomFreed,
    RoomKey,
    RoomLanded,
    RoomRequest,
    RoomWanted,
)


class MediaRooms:
    """Hears of rooms, and decides. ``state.images`` has the records."""

    def __init__(self, state: SchedulerState, changed: Callable[[], None]) -> None:
        """``changed`` is told that blocks may be there that were not."""
        self._state, self._changed = state, changed
        self._rooms = state.images

    def check(self, submit: Submit) -> None:
        """Raises InvalidRequest for tickets that this group can have no part in."""
        seen = set[RoomKey]()
        for item in submit.media:
            ticket = item.room
            if ticket is None:
                continue
            if ticket.sends:
                raise InvalidRequest(
                    "a group that computes prompts encodes no images for others", param="media"
                )
            if not (math.isfinite(ticket.seconds) and 0 < ticket.seconds <= MOST_SECONDS):
                raise InvalidRequest(
                    f"the seconds of an image's room must be above 0 and at most {MOST_SECONDS:g}",
                    param="media",
                )
            if ticket.key in seen or self._rooms.get(ticket.key) is not None:
                raise InvalidRequest("the room of an image is known: each has one of its own", param="media")
            seen.add(ticket.key)

    # ---- what its head calls

    def room(self, event: RoomEvent, now: float) -> list[TokenEvent]:
        """Hears what happened to a room. Those of unknown rooms are fine. Returns ends."""
        self._state.rooms.now = now
        room = self._rooms.get(event.key)
        match event:
            case RoomWanted(key, offer):
                if room is None or room.over:
                    gone = Unavailable("the sequence has ended where its images were wanted").info()
                    self._rooms.requests.append(CancelRoom(key=key, error=gone))
                elif (error := differs(room, offer)) is not None:
                    self._rooms.refuse(room, error)
                else:
                    self._rooms.wanted(room, offer)
            case RoomLanded() if room is not None:
                self._rooms.done(room)
            case RoomFailed(_, error) if room is not None:
                self._failed(room, error)
            case RoomFreed() if room is not None:
                self._failed(room, Unavailable("the room has ended").info())
                self._rooms.freed(room)
            case RoomBound():
                pass  # a sender's
        self._follow()
        self._changed()
        return self._state.rooms.given_back()

    def room_requests(self) -> list[RoomRequest]:
        """What is asked of rooms since the last call, in order. To be called after whatever changes anything
        here, and not between ``build`` and ``seal``."""
        rooms = self._rooms
        rooms.answer()
        self._follow()
        if not rooms.requests:
            return []
        asked, rooms.requests = rooms.requests, []
        return asked

    def room_blocks(self, key: RoomKey) -> tuple[Blocks, ...]:
        """() always: only senders have such blocks."""
        return ()

    # ---- what the scheduler calls

    def expire(self, now: float) -> None:
        """Gives back sequences whose images are late."""
        self._state.rooms.now = now
        for sequence in self._rooms.late(now):
            self._evict(sequence, "the images of a sequence did not come in time")

    # ----

    def _failed(self, room: ImageRoom, error: ErrorInfo) -> None:
        sequence = self._rooms.failed(room)
        if sequence is not None:
            self._evict(sequence, "the room of an image failed", error)

    def _follow(self) -> None:
        """What became of sequences by that."""
        rooms = self._rooms
        while rooms.landed or rooms.lost:
            if rooms.landed:
                self._state.images_landed(rooms.landed.pop(0))
            else:
                self._evict(rooms.lost.pop(0), "an image that was there is there no more")

    def _evict(self, sequence: Sequence, why: str, error: ErrorInfo | None = None) -> None:
        if self._state.live.get(sequence.id) is sequence:
            self._rooms.evictions += is_eviction(error)
            self._state.evict(sequence, why, error)
