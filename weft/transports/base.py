"""What moves bytes between ranks of groups, as one contract; loopback, shared memory and TCP keep it.

A transport does no more than move: which bytes of which room, and whether they may be written, is decided by
``weft.transfer`` (``Pushes``, ``Arrivals``), which ``RankTransfer`` runs beside it on one thread.

    sender's rank                                    receiver's rank
    write(peer, write) ── spans and their digests ──► poll() -> Incoming
                                                     take(incoming): copies, checks the digests, before it
                                                     returns
    poll() -> Written ◄──── taken in, or why not ──── answer(incoming, error)

Where a receiver copies itself (``fence`` is "copy"), no peer can write its memory. A one-sided engine writes
there: its ``write`` starts the engine's own transfer and sends the digests when that has ended; ``take``
checks them in place; and its ``fence`` says what makes sure that no write of a peer is under way any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from weft.common.errors import ErrorInfo, WeftError
from weft.transfer.arrivals import Incoming
from weft.transfer.pushes import Write, Written
from weft.transfer.room_table import FenceBy
from weft.transfer.spans import Part
from weft.types.rooms import Endpoint, RoomKey

if TYPE_CHECKING:
    import torch


class TransferCorrupt(WeftError):
    """Bytes arrived that are not those that were sent."""

    code, blame, retryable, http_status = "transfer_corrupt", "engine", True, 503


class Transport(Protocol):
    """Moves bytes between ranks of groups. Used from one thread, but for ``wake`` and ``mark``. Only
    ``poll`` waits, and never beyond its time.
    """

    name: str
    fence: FenceBy
    write_bytes: int
    """Of one write, at most: what other rooms wait for."""
    window_bytes: int
    """Under way to one peer, at most."""
    endpoint: Endpoint
    """Where peers reach this rank."""

    def register(self, regions: Sequence[torch.Tensor]) -> None:
        """This rank's memory, uint8 [bytes] each, numbered as ``group_layout`` does; once, for life."""

    def connect(self, peer: Endpoint, rank: int, deadline: float) -> str:
        """The name by which ``write`` knows the receiver's ``rank``. Connects when it is first written to.

        ``deadline``: seconds that connecting may take.
        """

    def mark(self) -> Any:
        """What was launched before this call by the thread that calls, any: a write that was made of it has
        it as ``ready``, and reads nothing before it is done. None where it is done already."""

    def digest(self, key: RoomKey, peer: str, parts: Sequence[Part]) -> np.ndarray:
        """uint64, one a span: of this rank's memory as it is now, bound to the room and both ranks. Empty
        where that is not on the host: then they are made when it is, before it is sent."""

    def write(self, write: Write) -> None:
        """Sends the spans of ``write``. Its end comes out of ``poll`` as ``Written``, once."""

    def poll(self, seconds: float) -> list[Incoming | Written]:
        """What has come, and which writes have ended; waits up to ``seconds`` for the first."""

    def take(self, incoming: Incoming) -> ErrorInfo | None:
        """Writes the bytes to this rank's regions, and says whether they are what was sent."""

    def answer(self, incoming: Incoming, error: ErrorInfo | None) -> None:
        """Tells the writer how its write ended. ``incoming`` is not needed any more."""

    def cancel(self, key: RoomKey) -> None:
        """Reads this rank's memory for no write of a room any more, once it is ``quiet``."""

    def quiet(self, key: RoomKey) -> bool:
        """Whether nothing reads this rank's memory for a room that was cancelled. ``poll`` returns in time
        for it to be asked again."""

    def wake(self) -> None:
        """From any thread: ``poll`` returns."""

    def close(self) -> None:
        """Gives back everything. Writes that are under way end without a word."""
