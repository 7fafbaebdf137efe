"""Embedding transfers in the scheduler of a group that receives embeddings.

``MediaRooms`` is the ``RoomScheduler`` of the engine's second ``HeadRooms``. A sequence is blocked until all
images are received. If an image cannot be received, the sequence is returned to the router. The router sends
the sequence again with other transfers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from weft.common.errors import ErrorInfo, InvalidRequest, Unavailable
from weft.scheduler.images.image_rooms import ImageRoom, differs
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
    """Handles transfer events and decides the answers. ``state.images`` has the records."""

    def __init__(self, state: SchedulerState, changed: Callable[[], None]) -> None:
        """``changed`` is called when blocks may have become free."""
        self._state, self._changed = state, changed
        self._rooms = state.images

    def check(self, submit: Submit) -> None:
        """Raise InvalidRequest if this group cannot take part with the transfer parameters of an image."""
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
                    f"the seconds of an image transfer must be above 0 and at most {MOST_SECONDS:g}",
                    param="media",
                )
            if ticket.key in seen or self._rooms.get(ticket.key) is not None:
                raise InvalidRequest("this image transfer exists already", param="media")
            seen.add(ticket.key)

    # ---- called by the engine

    def room(self, event: RoomEvent, now: float) -> list[TokenEvent]:
        """Handle a transfer event. Return new client events of the scheduler. Events of unknown transfers are
        ignored; an unknown offer is cancelled.

        Sequences with all images are unblocked. Sequences with a failed transfer are returned to the router.
        """
        self._state.rooms.now = now
        room = self._rooms.get(event.key)
        match event:
            case RoomWanted(key, offer):
                if room is None or room.over:
                    gone = Unavailable("the sequence that needs the images has ended").info()
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
                self._failed(room, Unavailable("the transfer has ended").info())
                self._rooms.freed(room)
            case RoomBound():
                pass  # only for senders
        self._follow()
        self._changed()
        return self._state.rooms.given_back()

    def room_requests(self) -> list[RoomRequest]:
        """Answer open offers, which may reserve memory and return sequences to the router. Return and clear
        all requests to transfers, in order.

        Call after every change to the scheduler, but not between ``build`` and ``seal``.
        """
        rooms = self._rooms
        rooms.answer()
        self._follow()
        if not rooms.requests:
            return []
        asked, rooms.requests = rooms.requests, []
        return asked

    def room_blocks(self, key: RoomKey) -> tuple[Blocks, ...]:
        """Return (): only senders have blocks to read."""
        return ()

    # ---- called by the scheduler

    def expire(self, now: float) -> None:
        """Return sequences with late images to the router. The events go into ``state.rooms.events``."""
        self._state.rooms.now = now
        for sequence in self._rooms.late(now):
            self._evict(sequence, "the images of a sequence did not arrive in time")

    # ----

    def _failed(self, room: ImageRoom, error: ErrorInfo) -> None:
        """Return the sequence of a failed transfer to the router, unless the transfer was over before."""
        sequence = self._rooms.failed(room)
        if sequence is not None:
            self._evict(sequence, "the transfer of an image failed", error)

    def _follow(self) -> None:
        """Unblock sequences with complete images, and return sequences with lost images to the router."""
        rooms = self._rooms
        while rooms.landed or rooms.lost:
            if rooms.landed:
                self._state.images_landed(rooms.landed.pop(0))
            else:
                self._evict(rooms.lost.pop(0), "a cached image was evicted")

    def _evict(self, sequence: Sequence, why: str, error: ErrorInfo | None = None) -> None:
        """Return a sequence to the router and count an eviction. Does nothing for an ended sequence."""
        if self._state.live.get(sequence.id) is sequence:
            self._rooms.evictions += is_eviction(error)
            self._state.evict(sequence, why, error)
