"""Notes of an engine process about open transfers: times of the stages, for counters, the log and traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from weft.common.errors import ErrorInfo
from weft.common.log import get_logger
from weft.types.messages import BYTES, SECONDS, TransferStats
from weft.types.transfer import Peer, TransferKey
from weft.types.transport_counts import TransportCounts

log = get_logger(__name__)

OFFERED, BOUND, FIRST_BYTE, LAST_BYTE = "offered", "bound", "first byte", "last byte"
FIRST_TOKEN, POSTPONED, LANDED, FAILED = "first token", "postponed", "landed", "failed"


@dataclass(slots=True)
class TransferNotes:
    """Notes about one open transfer."""

    peer: Peer
    marks: dict[str, float] = field(default_factory=dict)
    """Stage name -> time."""
    nbytes: int = 0
    transports: frozenset[str] = frozenset()
    """At the sender: the transport chosen for the receiver."""
    failed: bool = False

    def mark(self, name: str, now: float) -> None:
        """Record the time of stage ``name``: the first occurrence, except the last occurrence for
        ``LAST_BYTE``.
        """
        if name == LAST_BYTE or name not in self.marks:
            self.marks[name] = now


Ended: TypeAlias = Callable[[TransferKey, TransferNotes, float, ErrorInfo | None], None]
"""Callback for the end of a transfer: key, notes, time, error (None on success). Called at least once."""


class TransferTally:
    """Counts and logs the ends of transfers, and reports the ends to request traces."""

    def __init__(self, sends: bool) -> None:
        self._sends = sends
        self.stats = TransferStats()
        self.ended: Ended | None = None
        """Callback for request traces; None without tracing."""

    def received(self, key: TransferKey, notes: TransferNotes | None, now: float) -> None:
        """Count a completed transfer, mark ``notes`` and report it to ``ended``. Ignored without notes."""
        if notes is None:
            return
        notes.mark(LANDED, now)
        marks, stats = notes.marks, self.stats
        began = marks.get(FIRST_BYTE)
        seconds = 0.0 if began is None else marks.get(LAST_BYTE, now) - began
        exposed = stats.exposed
        if FIRST_TOKEN in marks:
            exposed = exposed.add(SECONDS, now - marks[FIRST_TOKEN])
        sent = stats.sent
        for transport in notes.transports if self._sends else ():
            sent = (sent or TransportCounts()).add(transport)
        log.debug("transfer %d/%d: %d bytes in %.3f s", key.transfer, key.attempt, notes.nbytes, seconds)
        self.stats = msgspec.structs.replace(
            stats,
            done=stats.done + 1,
            sent_bytes=stats.sent_bytes + (notes.nbytes if self._sends else 0),
            received_bytes=stats.received_bytes + (0 if self._sends else notes.nbytes),
            seconds=stats.seconds + seconds,
            took=stats.took.add(SECONDS, seconds),
            sizes=stats.sizes.add(BYTES, notes.nbytes),
            exposed=exposed,
            sent=sent,
        )
        if self.ended is not None:
            self.ended(key, notes, now, None)

    def failed(
        self, key: TransferKey, notes: TransferNotes | None, error: ErrorInfo, now: float, address: str
    ) -> None:
        """Log a failed transfer, count it, report it to ``ended`` and mark ``notes`` as failed.

        ``address``: of the local engine process. Failures with blame "client" are reported to ``ended`` only:
        neither counted nor logged. A corrupt transfer is a warning.
        """
        if notes is not None:
            notes.failed = True
            notes.mark(FAILED, now)
            if self.ended is not None:
                self.ended(key, notes, now, error)
        if error.blame == "client":  # the client disconnected, or the sequence ended during prefill
            return
        corrupt = error.code == "transfer_corrupt"
        self.stats = msgspec.structs.replace(
            self.stats, failed=self.stats.failed + 1, corrupt=self.stats.corrupt + corrupt
        )
        other = "nobody" if notes is None else notes.peer.name
        sender, receiver = (address, other) if self._sends else (other, address)
        say = log.warning if corrupt else log.info
        say(
            "transfer %d/%d from %s to %s failed (%s): %s",
            key.transfer,
            key.attempt,
            sender,
            receiver,
            error.code,
            error.message,
        )
