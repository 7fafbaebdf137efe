"""Embedding transfers of a scheduler: images from encode groups, and the destination blocks.

Each such image has a transfer. All received images of a sequence get blocks together, or no image gets
blocks. So two sequences never wait for blocks of each other. The first sequence by key gets blocks first; no
later sequence gets blocks before.

    a sequence     blocked: no blocks ──offered, first by key, blocks are free──> all its blocks ──> received
    an embedding   coming: pinned ──transfer received──> stored, like an embedding encoded here
                                  ──transfer failed────> fenced ──Freed──> coming by another transfer, or gone

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
from weft.scheduler.images.media_book import MediaBook
from weft.scheduler.sequence import Sequence
from weft.scheduler.transfer_book import FENCE_S, why_cancelled
from weft.types.media_item import MediaItem
from weft.types.messages import TransferStats
from weft.types.transfer import (
    Admitted,
    Blocks,
    CancelTransfer,
    RefuseTransfer,
    ReserveTransfer,
    TransferKey,
    TransferRequest,
)

_key = attrgetter("sequence.key")


@dataclass(slots=True, eq=False)
class ImageTransfer:
    """The transfer of one image."""

    key: TransferKey
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
    transfers: dict[TransferKey, ImageTransfer] = field(default_factory=dict)
    """Transfers without a received embedding."""
    counts: dict[bytes, int] = field(default_factory=dict)
    """Image key -> number of rows."""
    reserved: bool = False
    """True if all images have blocks."""


@dataclass(slots=True, eq=False)
class _Coming:
    """An embedding without all rows yet."""

    held: Embedded
    transfer: ImageTransfer | None = None
    """The present transfer of the embedding, as owner of the pin. None before an offer and after a failed
    transfer: the object itself then owns the pin."""


class ImageTransfers:
    """The embedding transfers of one scheduler. Effects on sequences are reported in ``received`` and
    ``lost``."""

    def __init__(self, book: MediaBook) -> None:
        self._book = book
        self._cache = book.cache
        self._images: dict[int, SequenceImages] = {}
        """Sequence id -> images, for sequences with missing images."""
        self._transfers: dict[TransferKey, ImageTransfer] = {}
        self._offers: dict[TransferKey, ImageTransfer] = {}
        """Transfers with an open offer."""
        self._wanting: dict[int, SequenceImages] = {}
        """Sequences with an offered image and without blocks."""
        self._coming: dict[bytes, _Coming] = {}
        self.requests: list[TransferRequest] = []
        """Requests to transfers, in order, since the last read."""
        self.received: list[Sequence] = []
        """Sequences with all images received."""
        self.lost: list[Sequence] = []
        """Sequences that cannot continue, because an embedding was evicted."""
        self.returns = 0

    def __len__(self) -> int:
        """Return the number of open transfers."""
        return len(self._transfers)

    def get(self, key: TransferKey) -> ImageTransfer | None:
        return self._transfers.get(key)

    # ---- events of sequences

    def open(self, sequence: Sequence, now: float) -> None:
        """Register a new sequence with images from transfers: set ``blocked_images`` and start the deadline.
        Does nothing for other sequences."""
        items = [item for item in sequence.media if item.transfer is not None]
        if not items:
            return
        sequence.blocked_images = True
        seconds = max(item.transfer.seconds for item in items if item.transfer is not None)
        images = self._images[sequence.id] = SequenceImages(sequence, now + seconds)
        for item in items:
            assert item.transfer is not None
            transfer = ImageTransfer(item.transfer.key, images, item)
            images.transfers[transfer.key] = self._transfers[transfer.key] = transfer
            images.counts[item.key] = item.count

    def ended(self, sequence: Sequence, finish: str, error: ErrorInfo | None = None) -> None:
        """End the transfers of an ended sequence, which must not run: cancel offers and release blocks."""
        self._book.leave(sequence)
        images = self._images.pop(sequence.id, None)
        if images is None:
            return
        self._wanting.pop(sequence.id, None)
        for transfer in images.transfers.values():
            self._offers.pop(transfer.key, None)
            if not transfer.over:
                transfer.over = True
                self.requests.append(CancelTransfer(key=transfer.key, error=why_cancelled(finish, error)))
            if transfer.held is None:  # else the transfer may still write: keep until freed
                del self._transfers[transfer.key]
        for key in images.counts:
            self._leave(key)

    def clear(self) -> None:
        """Forget everything after the ranks lost all embeddings, and report sequences with reserved blocks as
        lost. Blocks of open transfers stay pinned until freed."""
        coming, self._coming = self._coming, {}
        for one in coming.values():
            if one.transfer is None:
                self._cache.unpin(one.held)
        self.lost += [images.sequence for images in self._images.values() if images.reserved]

    # ---- events of transfers

    def wanted(self, transfer: ImageTransfer, offer: Admitted) -> None:
        """Store the offer until the answer."""
        transfer.offer = offer
        self._offers[transfer.key] = transfer
        if not transfer.images.reserved:
            self._wanting[transfer.images.sequence.id] = transfer.images

    def done(self, transfer: ImageTransfer) -> None:
        """Handle a received image: unpin the blocks and remove the transfer. After the last image, append the
        sequence to ``received``."""
        held, transfer.held = transfer.held, None
        del self._transfers[transfer.key]
        self._offers.pop(transfer.key, None)
        if held is not None:
            self._arrive(transfer, held)
        images = transfer.images
        del images.transfers[transfer.key]
        # The sequence may have ended, and another one with the same id may have come.
        if not images.transfers and self._images.get(images.sequence.id) is images:
            del self._images[images.sequence.id]
            self.received.append(images.sequence)

    def failed(self, transfer: ImageTransfer) -> Sequence | None:
        """Mark a failed transfer as over. Return the sequence, to be ended by the caller; None if the
        transfer was over before.

        The blocks stay pinned until ``freed``.
        """
        if transfer.over:
            return None
        transfer.over = True
        return transfer.images.sequence

    def freed(self, transfer: ImageTransfer) -> None:
        """Remove an ended transfer and unpin the blocks: no other process can touch the blocks any more.

        The blocks stay reserved while a sequence waits for the same embedding. Idempotent.
        """
        held, transfer.held = transfer.held, None
        self._transfers.pop(transfer.key, None)
        self._offers.pop(transfer.key, None)
        if held is None:
            return
        coming = self._coming.get(held.key)
        if coming is None or coming.held is not held:  # the ranks were lost in between
            self._cache.unpin(held)
            return
        coming.transfer = None
        self._leave(held.key)

    def waits_before(self, sequence: Sequence) -> bool:
        """Return True if a sequence before ``sequence`` lacks blocks for images."""
        return any(images.sequence.key < sequence.key for images in self._wanting.values())

    def late(self, now: float) -> list[Sequence]:
        """Return the sequences with images past the deadline."""
        return [images.sequence for images in self._images.values() if images.due <= now]

    def excuse(self, now: float) -> bool:
        """Return True if images still to come, or still being written, explain missing memory."""
        due = [transfer.images.due for transfer in self._transfers.values() if transfer.held is not None]
        due += [images.due for images in self._images.values() if images.reserved]
        return now < max(due, default=-math.inf) + FENCE_S

    @property
    def any_blocked(self) -> bool:
        """True if a sequence waits for images."""
        return bool(self._images)

    def stats(self) -> TransferStats:
        """Return the statistics of embedding transfers."""
        reserved = sum(images.reserved for images in self._images.values())
        return TransferStats(
            blocked=len(self._images) - reserved,
            fetching=reserved,
            pinned_blocks=sum(
                len(transfer.held.blocks) for transfer in self._transfers.values() if transfer.held
            ),
            returns=self.returns,
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
        for transfer in list(self._offers.values()):
            if transfer.images.reserved:
                self._reply(transfer)

    def refuse(self, transfer: ImageTransfer, error: ErrorInfo) -> None:
        """Refuse an offer of the wrong image."""
        self.requests.append(RefuseTransfer(key=transfer.key, error=error))

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

    def _reply(self, transfer: ImageTransfer) -> None:
        """Answer the offer of a sequence with blocks. Leave the offer open while another transfer brings the
        same image."""
        key = transfer.item.key
        coming = self._coming.get(key)
        if coming is not None and coming.transfer is not None:
            return
        transfer.offer = None
        del self._offers[transfer.key]
        if coming is not None:
            coming.transfer, transfer.held = transfer, coming.held
            # The first transfer with an offer takes over the reserved blocks and the pin.
            blocks = Blocks(first=0, ids=coming.held.ids)
            self.requests.append(ReserveTransfer(key=transfer.key, start=0, blocks=(blocks,)))
        elif self._cache.find(key) is not None:
            self._cache.hits += 1
            nothing = Blocks(first=0, ids=b"")
            self.requests.append(
                ReserveTransfer(key=transfer.key, start=transfer.item.count, blocks=(nothing,))
            )
        else:  # a running sequence has evicted the embedding
            self.lost.append(transfer.images.sequence)

    def _arrive(self, transfer: ImageTransfer, held: Embedded) -> None:
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
        if coming is None or coming.transfer is not None:
            return
        if any(images.reserved and key in images.counts for images in self._images.values()):
            return
        del self._coming[key]
        self._cache.drop(coming.held)
        self._cache.unpin(coming.held)


def differs(transfer: ImageTransfer, offer: Admitted) -> ErrorInfo | None:
    """Return why ``offer`` cannot bring the image of ``transfer``; None if the offer matches."""
    kinds = [kind.kind for kind in offer.dims.kinds]
    if offer.num_prompt == transfer.item.count and kinds == ["embedding"]:
        return None
    return Unavailable("the encoded image is not the image of the sequence").info()
