"""Embedding transfers of a scheduler: images from encode groups, and the destination blocks.

Each such image has a transfer. All received images of a sequence get blocks together, or no image gets
blocks. So two sequences never wait for blocks of each other. The first sequence by key gets blocks first; no
later sequence gets blocks before.

    a sequence     awaits: no blocks ──offered, first by key, blocks are free──> all its blocks ──> landed
    an embedding   coming: pinned ──transfer landed──> held, like an embedding encoded here
                                  ──transfer failed──> fenced ──Freed──> coming by another transfer, or gone

A stored image is not sent again: the answer to the offer reports all rows as present. An image may already be
coming for another sequence: then no second transfer starts. If the first transfer fails, the next transfer of
the image takes over the blocks, so blocks are never reserved twice.

Destination blocks are pinned from the answer to the end of the transfer, whatever happens to the sequence. A
received embedding is protected until the sequence has computed the image, but a running sequence without
enough memory may evict the embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import attrgetter

from weft.common.errors import ErrorInfo, Unavailable
from weft.kv.embeddings import Embedded
from weft.scheduler.images.media import MediaBook
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
    """The transfer of one image."""

    key: RoomKey
    images: SequenceImages
    item: MediaItem
    offer: Admitted | None = None
    """The open offer; None once answered."""
    held: Embedded | None = None
    """The pinned destination of the transfer; None before the answer and after the end."""
    over: bool = False
    """True if the transfer needs no further request: failed or cancelled."""


@dataclass(slots=True, eq=False)
class SequenceImages:
    """The transferred images of one sequence, until all are received."""

    sequence: Sequence
    due: float
    """Deadline for the images."""
    rooms: dict[RoomKey, ImageRoom] = field(default_factory=dict)
    """Transfers without a received embedding."""
    counts: dict[bytes, int] = field(default_factory=dict)
    """Image key -> number of rows."""
    reserved: bool = False
    """True if all images have blocks."""


@dataclass(slots=True, eq=False)
class _Coming:
    """An embedding without all rows yet."""

    held: Embedded
    room: ImageRoom | None = None
    """The present transfer of the embedding, as owner of the pin. None before an offer and after a failed
    transfer: the object itself then owns the pin."""


class ImageRooms:
    """The embedding transfers of one scheduler. Effects on sequences are reported in ``landed`` and
    ``lost``."""

    def __init__(self, book: MediaBook) -> None:
        self._book = book
        self._cache = book.cache
        self._images: dict[int, SequenceImages] = {}
        """Sequence id -> images, for sequences with missing images."""
        self._rooms: dict[RoomKey, ImageRoom] = {}
        self._offers: dict[RoomKey, ImageRoom] = {}
        """Transfers with an open offer."""
        self._wanting: dict[int, SequenceImages] = {}
        """Sequences with an offered image and without blocks."""
        self._coming: dict[bytes, _Coming] = {}
        self.requests: list[RoomRequest] = []
        """Requests to transfers, in order, since the last read."""
        self.landed: list[Sequence] = []
        """Sequences with all images received."""
        self.lost: list[Sequence] = []
        """Sequences that cannot continue, because an embedding was evicted."""
        self.evictions = 0

    def __len__(self) -> int:
        """Return the number of open transfers."""
        return len(self._rooms)

    def get(self, key: RoomKey) -> ImageRoom | None:
        return self._rooms.get(key)

    # ---- events of sequences

    def open(self, sequence: Sequence, now: float) -> None:
        """Register a new sequence with images from transfers: set ``awaits_images`` and start the deadline.
        Does nothing for other sequences."""
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
        """End the transfers of an ended sequence, which must not run: cancel offers and release blocks."""
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
            if room.held is None:  # else the transfer may still write: keep until freed
                del self._rooms[room.key]
        for key in images.counts:
            self._leave(key)

    def clear(self) -> None:
        """Forget everything after the ranks lost all embeddings, and report sequences with reserved blocks as
        lost. Blocks of open transfers stay pinned until freed."""
        coming, self._coming = self._coming, {}
        for one in coming.values():
            if one.room is None:
                self._cache.unpin(one.held)
        self.lost += [images.sequence for images in self._images.values() if images.reserved]

    # ---- events of transfers

    def wanted(self, room: ImageRoom, offer: Admitted) -> None:
        """Store the offer until the answer."""
        room.offer = offer
        self._offers[room.key] = room
        if not room.images.reserved:
            self._wanting[room.images.sequence.id] = room.images

    def done(self, room: ImageRoom) -> None:
        """Handle a received image: unpin the blocks and remove the transfer. After the last image, append the
        sequence to ``landed``."""
        held, room.held = room.held, None
        del self._rooms[room.key]
        self._offers.pop(room.key, None)
        if held is not None:
            self._arrive(room, held)
        images = room.images
        del images.rooms[room.key]
        # The sequence may have ended, and another one with the same id may have come.
        if not images.rooms and self._images.get(images.sequence.id) is images:
            del self._images[images.sequence.id]
            self.landed.append(images.sequence)

    def failed(self, room: ImageRoom) -> Sequence | None:
        """Mark a failed transfer as over. Return the sequence, to be ended by the caller; None if the
        transfer was over before.

        The blocks stay pinned until ``freed``.
        """
        if room.over:
            return None
        room.over = True
        return room.images.sequence

    def freed(self, room: ImageRoom) -> None:
        """Remove an ended transfer and unpin the blocks: no other process can touch the blocks any more.

        The blocks stay reserved while a sequence waits for the same embedding. Idempotent.
        """
        held, room.held = room.held, None
        self._rooms.pop(room.key, None)
        self._offers.pop(room.key, None)
        if held is None:
            return
        coming = self._coming.get(held.key)
        if coming is None or coming.held is not held:  # the ranks were lost in between
            self._cache.unpin(held)
            return
        coming.room = None
        self._leave(held.key)

    def waits_before(self, sequence: Sequence) -> bool:
        """Return True if a sequence before ``sequence`` lacks blocks for images."""
        return any(images.sequence.key < sequence.key for images in self._wanting.values())

    def late(self, now: float) -> list[Sequence]:
        """Return the sequences with images past the deadline."""
        return [images.sequence for images in self._images.values() if images.due <= now]

    def excuse(self, now: float) -> bool:
        """Return True if images still to come, or still being written, explain missing memory."""
        due = [room.images.due for room in self._rooms.values() if room.held is not None]
        due += [images.due for images in self._images.values() if images.reserved]
        return now < max(due, default=-math.inf) + FENCE_S

    @property
    def awaited(self) -> bool:
        """True if a sequence waits for images."""
        return bool(self._images)

    def stats(self) -> TransferStats:
        """Return the statistics of embedding transfers."""
        reserved = sum(images.reserved for images in self._images.values())
        return TransferStats(
            awaiting=len(self._images) - reserved,
            fetching=reserved,
            blocks_on_hold=sum(len(room.held.blocks) for room in self._rooms.values() if room.held),
            evictions=self.evictions,
        )

    # ---- answers

    def answer(self) -> None:
        """Answer open offers as far as memory is free, in scheduling order. Answers go into ``requests``. May
        evict embeddings without a user. Sequences with an evicted image go into ``lost``."""
        if not self._offers:
            return
        # Stop at the first sequence without enough memory: no later sequence passes an earlier one.
        for images in sorted(self._wanting.values(), key=_key):
            if not self._reserve(images):
                break
            images.reserved = True
            del self._wanting[images.sequence.id]
        for room in list(self._offers.values()):
            if room.images.reserved:
                self._reply(room)

    def refuse(self, room: ImageRoom, error: ErrorInfo) -> None:
        """Refuse an offer of the wrong image."""
        self.requests.append(RefuseRoom(key=room.key, error=error))

    def _reserve(self, images: SequenceImages) -> bool:
        """Reserve blocks for all missing images, and lift host images to the device. Return False, without a
        reservation, if blocks are missing; unused embeddings may have been evicted then.

        Images already held are protected for the sequence.
        """
        cache, book = self._cache, self._book
        lacking = [key for key in images.counts if cache.find(key) is None]
        found = [held for key in images.counts if (held := cache.find(key)) is not None]
        far = [held for held in found if held.on_host]
        blocks = sum(cache.blocks_of(images.counts[key]) for key in lacking)
        blocks += sum(cache.blocks_of(held.count) for held in far)
        # Stored images must not be evicted for the missing images, neither from the device nor from the host.
        for held in found:
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
        """Answer the offer of a sequence with blocks. Leave the offer open while another transfer brings the
        same image."""
        key = room.item.key
        coming = self._coming.get(key)
        if coming is not None and coming.room is not None:
            return
        room.offer = None
        del self._offers[room.key]
        if coming is not None:
            coming.room, room.held = room, coming.held
            # The first transfer with an offer takes over the reserved blocks and the pin.
            blocks = Blocks(first=0, ids=coming.held.ids)
            self.requests.append(ReserveRoom(key=room.key, start=0, blocks=(blocks,)))
        elif self._cache.find(key) is not None:
            self._cache.hits += 1
            nothing = Blocks(first=0, ids=b"")
            self.requests.append(ReserveRoom(key=room.key, start=room.item.count, blocks=(nothing,)))
        else:  # a running sequence has evicted the embedding
            self.lost.append(room.images.sequence)

    def _arrive(self, room: ImageRoom, held: Embedded) -> None:
        """Unpin a received embedding. Unless the ranks were lost in between, the embedding is now
        readable."""
        coming = self._coming.get(held.key)
        if coming is not None and coming.held is held:
            del self._coming[held.key]
            held.ready, held.whole = True, not self._book.shards
            self._cache.touch(held)
        self._cache.unpin(held)

    def _leave(self, key: bytes) -> None:
        """Release the blocks of an embedding without a waiting sequence and without an open transfer."""
        coming = self._coming.get(key)
        if coming is None or coming.room is not None:
            return
        if any(images.reserved and key in images.counts for images in self._images.values()):
            return
        del self._coming[key]
        self._cache.drop(coming.held)
        self._cache.unpin(coming.held)


def differs(room: ImageRoom, offer: Admitted) -> ErrorInfo | None:
    """Return why ``offer`` cannot bring the image of ``room``; None if the offer matches."""
    kinds = [kind.kind for kind in offer.dims.kinds]
    if offer.num_prompt == room.item.count and kinds == ["embedding"]:
        return None
    return Unavailable("the encoded image is not the image of the sequence").info()
