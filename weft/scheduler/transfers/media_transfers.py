"""Embedding transfers in the scheduler of a group that receives embeddings.

``MediaTransfers`` is the ``TransferScheduler`` of the engine's second ``EngineTransfers``. A sequence is
blocked until all images are received. If an image cannot be received, the sequence is returned to the router.
The router sends the sequence again with other transfers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from weft.common.errors import ErrorInfo, InvalidRequest, Unavailable
from weft.scheduler.images.image_transfers import ImageTransfer, differs
from weft.scheduler.sequence import Sequence
from weft.scheduler.state import SchedulerState
from weft.scheduler.transfer_book import is_return
from weft.types.messages import Submit, TokenEvent
from weft.types.transfer import (
    MOST_SECONDS,
    Blocks,
    CancelTransfer,
    TransferBound,
    TransferEvent,
    TransferFailed,
    TransferFreed,
    TransferKey,
    TransferReceived,
    TransferRequest,
    TransferWanted,
)


class MediaTransfers:
    """Handles transfer events and decides the answers. ``state.images`` has the records."""

    def __init__(self, state: SchedulerState, changed: Callable[[], None]) -> None:
        """``changed`` is called when blocks may have become free."""
        self._state, self._changed = state, changed
        self._transfers = state.images

    def check(self, submit: Submit) -> None:
        """Raise InvalidRequest if this group cannot take part with the transfer parameters of an image."""
        seen = set[TransferKey]()
        for item in submit.media:
            parameters = item.transfer
            if parameters is None:
                continue
            if parameters.sends:
                raise InvalidRequest(
                    "a group that computes prompts encodes no images for others", param="media"
                )
            if not (math.isfinite(parameters.seconds) and 0 < parameters.seconds <= MOST_SECONDS):
                raise InvalidRequest(
                    f"the seconds of an image transfer must be above 0 and at most {MOST_SECONDS:g}",
                    param="media",
                )
            if parameters.key in seen or self._transfers.get(parameters.key) is not None:
                raise InvalidRequest("this image transfer exists already", param="media")
            seen.add(parameters.key)

    # ---- called by the engine

    def transfer(self, event: TransferEvent, now: float) -> list[TokenEvent]:
        """Handle a transfer event. Return new client events of the scheduler. Events of unknown transfers are
        ignored; an unknown offer is cancelled.

        Sequences with all images are unblocked. Sequences with a failed transfer are returned to the router.
        """
        self._state.transfers.now = now
        transfer = self._transfers.get(event.key)
        match event:
            case TransferWanted(key, offer):
                if transfer is None or transfer.over:
                    gone = Unavailable("the sequence that needs the images has ended").info()
                    self._transfers.requests.append(CancelTransfer(key=key, error=gone))
                elif (error := differs(transfer, offer)) is not None:
                    self._transfers.refuse(transfer, error)
                else:
                    self._transfers.wanted(transfer, offer)
            case TransferReceived() if transfer is not None:
                self._transfers.done(transfer)
            case TransferFailed(_, error) if transfer is not None:
                self._failed(transfer, error)
            case TransferFreed() if transfer is not None:
                self._failed(transfer, Unavailable("the transfer has ended").info())
                self._transfers.freed(transfer)
            case TransferBound():
                pass  # only for senders
        self._follow()
        self._changed()
        return self._state.transfers.take_events()

    def transfer_requests(self) -> list[TransferRequest]:
        """Answer open offers, which may reserve memory and return sequences to the router. Return and clear
        all requests to transfers, in order.

        Call after every change to the scheduler, but not between ``build`` and ``freeze``.
        """
        transfers = self._transfers
        transfers.answer()
        self._follow()
        if not transfers.requests:
            return []
        asked, transfers.requests = transfers.requests, []
        return asked

    def transfer_blocks(self, key: TransferKey) -> tuple[Blocks, ...]:
        """Return (): only senders have blocks to read."""
        return ()

    # ---- called by the scheduler

    def expire(self, now: float) -> None:
        """Return sequences with late images to the router. The events go into ``state.transfers.events``."""
        self._state.transfers.now = now
        for sequence in self._transfers.late(now):
            self._return_to_router(sequence, "the images of a sequence did not arrive in time")

    # ----

    def _failed(self, transfer: ImageTransfer, error: ErrorInfo) -> None:
        """Return the sequence of a failed transfer to the router, unless the transfer was over before."""
        sequence = self._transfers.failed(transfer)
        if sequence is not None:
            self._return_to_router(sequence, "the transfer of an image failed", error)

    def _follow(self) -> None:
        """Unblock sequences with complete images, and return sequences with lost images to the router."""
        transfers = self._transfers
        while transfers.received or transfers.lost:
            if transfers.received:
                self._state.images_received(transfers.received.pop(0))
            else:
                self._return_to_router(transfers.lost.pop(0), "a cached image was evicted")

    def _return_to_router(self, sequence: Sequence, why: str, error: ErrorInfo | None = None) -> None:
        """Return a sequence to the router and count the return. Does nothing for an ended sequence."""
        if self._state.live.get(sequence.id) is sequence:
            self._transfers.returns += is_return(error)
            self._state.return_to_router(sequence, why, error)
