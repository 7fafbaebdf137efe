"""What a scheduler knows of images that other groups encode, and where their embeddings come to.

Each such image has a room. All images of a sequence that come by rooms get their blocks at once, or none of
them does: so no two sequences wait for each other's. The first sequence by key gets them first, and none
behind it is let in before.

    a sequence     awaits: no blocks ──offered, first by key, blocks are there──> all its blocks ──> landed
    an embedding   coming: pinned ──a room's, landed──> held, like one that was encoded here
                                  ──that failed──> fenced ──Freed──> coming by another room, or gone

An image that is held, or by then has come for somebody else, is not sent again: its room is answered with all
of its rows there. One that is coming for somebody else is waited for; if that fails, its blocks are the next
one's, so nothing has to be found for it a second time.

Blocks that a room may write are pinned from its answer to its end, whatever becomes of the sequence. What has
landed is held for the sequence until it is computed, but one that runs and lacks room may take it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import attrgetter

from weft.common.errors import ErrorInfo, Unavailable
from weft.kv.embeddings import Embedded
from weft.scheduler.media import MediaBook
from weft.scheduler.room_book import FENCE_S, why_cancelled
from weft.scheduler.sequence import Sequence
from weft.types.media import MediaItem
from weft.types.messages import TransferStats
from weft.types.rooms import (
    Admitted,
    Blocks,
    CancelRoom,
    RefuseRoom,
    ReserveRoom,
    RoomKey,
    RoomRequest,
)

_key = attrgetter("sequence.key")


@dataclass(slots=True, eq=False)
class ImageRoom:
    """The room of one image."""

    key: RoomKey
    images: SequenceImages
    item: MediaItem
    offer: Admitted | None = None
    """What was asked, until it is answered."""
    held: Embedded | None = None
    """What it may write, with the pin that goes with that."""
    over: bool = False
    """Nothing is to be asked of it: it failed, or was cancelled."""


@dataclass(slots=True, eq=False)
class SequenceImages:
    """The images of one sequence that come by rooms, until all have landed."""

    sequence: Sequence
    due: float
    """When they are late."""
    rooms: dict[RoomKey, ImageRoom] = field(default_factory=dict)
    """Those that have not landed."""
    counts: dict[bytes, int] = field(default_factory=dict)
    """Rows of each image, by its key."""
    reserved: bool = False
    """Whether there are blocks for all of them."""


@dataclass(slots=True, eq=False)
class _Coming:
    """An embedding that is not there yet."""

    held: Embedded
    room: ImageRoom | None = None
    """By which it comes, with its pin; before one is offered, and once one has ended, the pin is here."""


class ImageRooms:
    """The rooms of embeddings of one scheduler. What follows for sequences is said in ``landed``,
    ``lost``.
    """

    def __init__(self, book: MediaBook) -> None:
        self._book = book
        self._cache = book.cache
        self._images: dict[int, SequenceImages] = {}
        """By sequence, of those that await some."""
        self._rooms: dict[RoomKey, ImageRoom] = {}
        self._offers: dict[RoomKey, ImageRoom] = {}
        """Rooms that have an offer."""
        self._wanting: dict[int, SequenceImages] = {}
        """Of which some were offered, and there are no blocks yet."""
        self._coming: dict[bytes, _Coming] = {}
        self.requests: list[RoomRequest] = []
        """What is asked of rooms, in order, and was not taken yet."""
        self.landed: list[Sequence] = []
        """Sequences whose images are all there."""
        self.lost: list[Sequence] = []
        """Sequences that cannot go on, as what was there for them is gone."""
        self.evictions = 0

    def __len__(self) -> int:
        """Rooms that have not ended."""
        return len(self._rooms)

    def get(self, key: RoomKey) -> ImageRoom | None:
        return self._rooms.get(key)

    # ---- what becomes of sequences

    def open(self, sequence: Sequence, now: float) -> None:
        """A sequence has come; nothing is done unless images of it come by rooms."""
        items = [item for item in sequence.media if item.room is not None]
        if not items:
            return
        sequence.awaits_images = True
        seconds = max(item.room.seconds for item in items if item.room is not None)
        images = self._images[sequence.id] = SequenceImages(sequence, now + seconds)
        for item in items:
            assert item.room is not None
            room = ImageRoom(item.room.key, images, item)
            images.rooms[room.key] = self._rooms[room.key] = room
            images.counts[item.key] = item.count

    def ended(self, sequence: Sequence, finish: str, error: ErrorInfo | None = None) -> None:
        """A sequence has ended, in any way, and does not run."""
        self._book.leave(sequence)
        images = self._images.pop(sequence.id, None)
        if images is None:
            return
        self._wanting.pop(sequence.id, None)
        for room in images.rooms.values():
            self._offers.pop(room.key, None)
            if not room.over:
                room.over = True
                self.requests.append(CancelRoom(key=room.key, error=why_cancelled(finish, error)))
            if room.held is None:
                del self._rooms[room.key]
        for key in images.counts:
            self._leave(key)

    def clear(self) -> None:
        """Ranks have forgotten everything. What rooms may still write stays out of use until they end."""
        coming, self._coming = self._coming, {}
        for one in coming.values():
            if one.room is None:
                self._cache.unpin(one.held)
        self.lost += [images.sequence for images in self._images.values() if images.reserved]

    # ---- what becomes of rooms

    def wanted(self, room: ImageRoom, offer: Admitted) -> None:
        """A room was offered. The offer is kept until there is an answer."""
        room.offer = offer
        self._offers[room.key] = room
        if not room.images.reserved:
            self._wanting[room.images.sequence.id] = room.images

    def done(self, room: ImageRoom) -> None:
        """Takes in that a room has landed."""
        held, room.held = room.held, None
        del self._rooms[room.key]
        self._offers.pop(room.key, None)
        if held is not None:
            self._arrive(room, held)
        images = room.images
        del images.rooms[room.key]
        if not images.rooms and self._images.get(images.sequence.id) is images:
            del self._images[images.sequence.id]
            self.landed.append(images.sequence)

    def failed(self, room: ImageRoom) -> Sequence | None:
        """Takes in that a room failed. Returns its sequence, if that has to end."""
        if room.over:
            return None
        room.over = True
        return room.images.sequence

    def freed(self, room: ImageRoom) -> None:
        """Nobody outside can touch what it may have written."""
        held, room.held = room.held, None
        self._rooms.pop(room.key, None)
        self._offers.pop(room.key, None)
        if held is None:
            return
        coming = self._coming.get(held.key)
        if coming is None or coming.held is not held:  # ranks were lost meanwhile
            self._cache.unpin(held)
            return
        coming.room = None
        self._leave(held.key)

    def waits_before(self, sequence: Sequence) -> bool:
        """Whether one that comes before ``sequence`` waits for blocks for all of its images."""
        return any(images.sequence.key < sequence.key for images in self._wanting.values())

    def late(self, now: float) -> list[Sequence]:
        """Sequences whose images did not come in time."""
        return [images.sequence for images in self._images.values() if images.due <= now]

    def excuse(self, now: float) -> bool:
        """Whether something is still to come, or may still be written, that explains a lack of room."""
        due = [room.images.due for room in self._rooms.values() if room.held is not None]
        due += [images.due for images in self._images.values() if images.reserved]
        return now < max(due, default=-math.inf) + FENCE_S

    @property
    def awaited(self) -> bool:
        """Whether there are sequences whose images have not landed."""
        return bool(self._images)

    def stats(self) -> TransferStats:
        """What the scheduler knows of transfers of embeddings."""
        reserved = sum(images.reserved for images in self._images.values())
        return TransferStats(
            awaiting=len(self._images) - reserved,
            fetching=reserved,
            blocks_on_hold=sum(len(room.held.blocks) for room in self._rooms.values() if room.held),
            evictions=self.evictions,
        )

    # ---- answers

    def answer(self) -> None:
        """Answers offers as far as there is room for what they bring."""
        if not self._offers:
            return
        for images in sorted(self._wanting.values(), key=_key):
            if not self._reserve(images):
                break
            images.reserved = True
            del self._wanting[images.sequence.id]
        for room in list(self._offers.values()):
            if room.images.reserved:
                self._reply(room)

    def refuse(self, room: ImageRoom, error: ErrorInfo) -> None:
        """Refuses an offer that can never be what its sequence needs."""
        self.requests.append(RefuseRoom(key=room.key, error=error))

    def _reserve(self, images: SequenceImages) -> bool:
        """Blocks for all that is not held, or coming: all or nothing. What is there stays for the
        sequence.
        """
        cache, book = self._cache, self._book
        lacking = [key for key in images.counts if cache.find(key) is None]
        found = [held for key in images.counts if (held := cache.find(key)) is not None]
        far = [held for held in found if held.on_host]
        blocks = sum(cache.blocks_of(images.counts[key]) for key in lacking)
        blocks += sum(cache.blocks_of(held.count) for held in far)
        for held in found:  # nor may what goes to the host's blocks take their place there
            cache.pin(held)
        there = not blocks or cache.make_room(blocks, book.unused(images.counts))
        for held in found:
            cache.unpin(held)
        if not there:
            return False
        for key in lacking:
            held = cache.add(key, images.counts[key], (), settled=True)
            assert held is not None, "there was room"
            held.ready = False
            cache.pin(held)
            self._coming[key] = _Coming(held)
        for held in far:
            cache.lift(held, ())
        for key in images.counts:
            book.want(images.sequence, key)
        return True

    def _reply(self, room: ImageRoom) -> None:
        """Answers the offer of a room for whose image there were blocks; later, where it comes by another."""
        key = room.item.key
        coming = self._coming.get(key)
        if coming is not None and coming.room is not None:
            return
        room.offer = None
        del self._offers[room.key]
        if coming is not None:
            coming.room, room.held = room, coming.held
            blocks = Blocks(first=0, ids=coming.held.ids)
            self.requests.append(ReserveRoom(key=room.key, start=0, blocks=(blocks,)))
        elif self._cache.find(key) is not None:
            self._cache.hits += 1
            nothing = Blocks(first=0, ids=b"")
            self.requests.append(ReserveRoom(key=room.key, start=room.item.count, blocks=(nothing,)))
        else:  # one that runs has taken it
            self.lost.append(room.images.sequence)

    def _arrive(self, room: ImageRoom, held: Embedded) -> None:
        coming = self._coming.get(held.key)
        if coming is not None and coming.held is held:
            del self._coming[held.key]
            held.ready, held.whole = True, not self._book.shards
            self._cache.touch(held)
        self._cache.unpin(held)

    def _leave(self, key: bytes) -> None:
        """Gives the blocks of an embedding back that no room will bring, if no room may still write them."""
        coming = self._coming.get(key)
        if coming is None or coming.room is not None:
            return
        if any(images.reserved and key in images.counts for images in self._images.values()):
            return
        del self._coming[key]
        self._cache.drop(coming.held)
        self._cache.unpin(coming.held)


def differs(room: ImageRoom, offer: Admitted) -> ErrorInfo | None:
    """Why ``offer`` cannot bring the image of ``room``."""
    kinds = [kind.kind for kind in offer.dims.kinds]
    if offer.num_prompt == room.item.count and kinds == ["embedding"]:
        return None
    return Unavailable("what was encoded is not the image that the sequence has").info()
