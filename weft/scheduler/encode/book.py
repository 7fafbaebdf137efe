"""Images for other groups: sequences, encoding order, and the state of each transfer.

    add ──► offered ──is bound───► bound ──plan with SendMedia──► sent ──commit──► finished ──received──► gone
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
from weft.scheduler.images.media_book import check_media
from weft.types.media_item import MediaItem, without_pixels
from weft.types.messages import Submit
from weft.types.transfer import MOST_SECONDS, TransferKey


@dataclass(slots=True, eq=False)
class ItemTransfer:
    """The transfer of one image to another group."""

    key: TransferKey
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
    transfers: list[ItemTransfer] = field(default_factory=list)
    left: int = 0
    """Number of transfers not received yet."""
    admitted: bool = False
    """True if a plan has work of the sequence."""


class ItemBook:
    """The sequences and transfers of one group."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self.live: dict[int, ItemSequence] = {}
        self._transfers: dict[TransferKey, ItemTransfer] = {}
        """Open transfers, also of ended sequences."""
        self._queue: list[tuple[tuple[int, int, int], ItemTransfer]] = []
        """Unsent transfers in order. If ``_stale``, the list may contain sent and ended transfers too."""
        self._stale = False
        self._arrivals = 0
        self.pixels = 0
        """Bytes of pixels of all live sequences."""

    def get(self, key: TransferKey) -> ItemTransfer | None:
        return self._transfers.get(key)

    def check(self, submit: Submit) -> int:
        """Check a Submit. Return the bytes of all pixels. Raises InvalidRequest if this group cannot do the
        work."""
        if submit.transfer is not None or submit.grammar is not None or submit.pooling:
            raise InvalidRequest(
                "a group that encodes images generates no tokens and transfers no caches", param="transfer"
            )
        if not submit.media:
            raise InvalidRequest("a request to a group that encodes images needs images", param="media")
        # Check the images like images of a prompt in this group. Other groups may encode the rest of a video.
        here = tuple(msgspec.structs.replace(item, transfer=None, lag=None) for item in submit.media)
        check_media(here, max(item.start + item.count for item in here), self._limits, True)
        keys = set()
        for item in submit.media:
            parameters = item.transfer
            if parameters is None or not parameters.sends:
                raise InvalidRequest("an image to be encoded needs a transfer", param="media")
            if not (math.isfinite(parameters.seconds) and 0 < parameters.seconds <= MOST_SECONDS):
                raise InvalidRequest(f"seconds must be above 0 and at most {MOST_SECONDS:g}", param="media")
            if parameters.key in self._transfers or parameters.key in keys:
                raise InvalidRequest(
                    "a transfer with this key exists: a retry needs a new attempt number", param="media"
                )
            keys.add(parameters.key)
        if submit.sequence in self.live:
            raise InvalidRequest("a sequence with this id is running", param="sequence")
        return sum(len(item.pixels) for item in submit.media)

    def add(self, submit: Submit) -> ItemSequence:
        """Register the sequence of a Submit and queue its transfers. The caller has called ``check``."""
        sequence = self.live[submit.sequence] = ItemSequence(submit.sequence)
        for number, item in enumerate(submit.media):
            assert item.transfer is not None
            order = (submit.priority, self._arrivals, number)
            transfer = self._transfers[item.transfer.key] = ItemTransfer(
                item.transfer.key, sequence, item, order
            )
            sequence.transfers.append(transfer)
            # A later sequence of a higher priority goes before earlier ones, so insert by order.
            insort(self._queue, (order, transfer), key=lambda entry: entry[0])
            self.pixels += len(item.pixels)
        sequence.left = len(sequence.transfers)
        self._arrivals += 1
        return sequence

    def send(self, transfer: ItemTransfer) -> None:
        """Mark the transfer as sent, by a plan or because nothing has to be sent."""
        transfer.sent = self._stale = True

    def fail(self, transfer: ItemTransfer) -> None:
        """Mark the transfer as over, after a failure or a cancellation."""
        transfer.over = self._stale = True

    @property
    def waits(self) -> bool:
        """True if a transfer has not been sent."""
        self._clean()
        return bool(self._queue)

    def waiting(self) -> list[ItemTransfer]:
        """Return the unsent transfers in order."""
        self._clean()
        return [transfer for _, transfer in self._queue]

    def _clean(self) -> None:
        if self._stale:
            self._stale = False
            self._queue = [
                (order, transfer) for order, transfer in self._queue if not (transfer.sent or transfer.over)
            ]

    def end(self, sequence: ItemSequence) -> list[ItemTransfer]:
        """End a sequence and drop the pixels. Return the open transfers, now marked as over; the caller
        cancels the transfers.

        Transfers with a pin stay registered until ``close``.
        """
        del self.live[sequence.id]
        self.pixels -= sum(len(transfer.item.pixels) for transfer in sequence.transfers)
        # Embeddings may still be read, but no image of the sequence is encoded any more.
        for transfer in sequence.transfers:
            (transfer.item,) = without_pixels((transfer.item,))
        ended = [
            transfer
            for transfer in sequence.transfers
            if transfer.key in self._transfers and not transfer.over
        ]
        for transfer in ended:
            self.fail(transfer)
            if transfer.held is None:
                del self._transfers[transfer.key]
        return ended

    def close(self, transfer: ItemTransfer) -> None:
        """Remove the transfer: nobody outside touches the embedding for the transfer any more."""
        self._transfers.pop(transfer.key, None)

    @property
    def unsent(self) -> int:
        """Number of sequences with an unsent image."""
        return len({transfer.sequence.id for transfer in self.waiting()})
