"""Contract of transports, which move bytes between ranks of groups: loopback, shared memory, TCP, NIXL.

A transport only moves bytes. ``weft.disagg.protocol`` (``Pushes``, ``Arrivals``) decides which bytes of which
transfer move, and accepts or refuses writes. ``RankTransfer`` runs both on one thread.

    sender's rank                                    receiver's rank
    write(peer, write) ── spans and their digests ──► poll() -> Incoming
                                                     take(incoming): copies and checks the digests,
                                                     then returns; or returns PENDING, and
                                                     poll() -> Copied follows
    poll() -> Written ◄──── success or error ──────── answer(incoming, error)

If the receiver copies (``fence`` is "copy"), no peer can write to the receiver's memory. A one-sided engine
writes to remote memory: ``write`` starts the engine's own transfer and sends the digests after the end of
the transfer, ``take`` checks the digests in place, and ``fence`` names the proof of the end of all writes
of a peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import numpy as np

from weft.common.errors import ErrorInfo, WeftError
from weft.disagg.protocol.arrivals import Copied, Incoming
from weft.disagg.protocol.pushes import Write, Written
from weft.disagg.protocol.spans import SpanPart
from weft.disagg.protocol.transfer_table import FenceBy
from weft.types.transfer import Endpoint, TransferKey

if TYPE_CHECKING:
    import torch


class TransferCorrupt(WeftError):
    """Bytes arrived with a wrong digest."""

    code, blame, retryable, http_status = "transfer_corrupt", "engine", True, 503


class TakePending:
    """Type of ``PENDING``."""


PENDING: Final = TakePending()
"""Result of ``Transport.take`` while the bytes of the write are still under way."""


class Transport(Protocol):
    """Moves bytes between ranks of groups. All methods except ``wake`` and ``mark`` are called from one
    thread. Only ``poll`` blocks, at most for its time-out."""

    name: str
    fence: FenceBy
    write_bytes: int
    """Maximum bytes of one write. Other transfers wait for so long."""
    window_bytes: int
    """Maximum bytes under way to one peer."""
    endpoint: Endpoint
    """Address of this rank for peers."""

    def register(self, regions: Sequence[torch.Tensor]) -> None:
        """Register the memory of this rank, uint8 [bytes] per region, numbered as in ``group_layout``. Call
        once."""

    def connect(self, peer: Endpoint, rank: int, deadline: float) -> str:
        """Return a name for the receiver's ``rank``, for use in ``write``. The first write connects.

        ``deadline``: maximum seconds for connecting.
        """

    def mark(self) -> Any:
        """Return a mark for all device work launched so far by the calling thread; None if no work is
        pending. Callable from any thread. A write with the mark as ``ready`` reads no byte before the end
        of the marked work."""

    def digest(self, key: TransferKey, peer: str, parts: Sequence[SpanPart]) -> np.ndarray:
        """Return uint64, one per span: digests of the present bytes of this rank, bound to the transfer and
        both ranks. Empty for caches outside host memory: then the digests are computed later, before the
        send."""

    def write(self, write: Write) -> None:
        """Send the spans of ``write``. ``poll`` later returns exactly one ``Written``, except after
        ``cancel`` or ``close``."""

    def poll(self, seconds: float) -> list[Incoming | Written | Copied]:
        """Return received writes, ended writes and ended copies. Blocks up to ``seconds`` for the first
        event."""

    def take(self, incoming: Incoming) -> ErrorInfo | TakePending | None:
        """Copy the bytes of a received write to this rank's regions. Return None if all digests are
        correct, else the error.

        Return PENDING if the bytes are not here yet. Then ``poll`` later returns exactly one ``Copied`` for
        the write, except after ``close``. After ``cancel`` the regions are not written any more."""

    def answer(self, incoming: Incoming, error: ErrorInfo | None) -> None:
        """Send the result of a write to the writer. ``incoming`` must not be used afterwards."""

    def cancel(self, key: TransferKey) -> None:
        """Stop all reads of this rank's memory for a transfer, and all pending copies of the transfer. Reads
        under way may go on until ``quiet``."""

    def quiet(self, key: TransferKey) -> bool:
        """Return True if no read by this rank is under way for a cancelled transfer: neither a read of this
        rank's memory, nor a read of a peer's memory. While a read is under way, ``poll`` returns early enough
        for the next call of ``quiet``."""

    def wake(self) -> None:
        """Make ``poll`` return. Callable from any thread."""

    def close(self) -> None:
        """Free all resources. Writes under way end without a ``Written``. Raises EngineDead if a GPU does not
        finish a copy of staged caches in time."""


@runtime_checkable
class PeerSizes(Protocol):
    """A transport whose sizes depend on the peer, in place of ``write_bytes`` and ``window_bytes``."""

    def limits(self, peer: str) -> tuple[int, int]:
        """Return the maximum bytes of one write to ``peer``, and of all writes under way to ``peer``."""
