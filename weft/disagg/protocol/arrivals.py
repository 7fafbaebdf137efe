"""Receiving side of one rank: accept, park or drop writes, and find the end of a transfer. Pure.

write of an expected transfer      checked against the expected spans, copied, digested; several copies of a
                                   transfer may be under way
write of an unknown transfer       parked, up to a bound, until ``ExpectedArrival`` arrives or time is over
write of a stopped transfer        dropped: no byte is written any more
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from weft.common.errors import ErrorInfo, Unavailable, WeftError
from weft.disagg.protocol.coverage import BadSpans, Coverage
from weft.disagg.protocol.tombstones import Parking, Tombstones
from weft.types.transfer import Outcome, TransferKey


class _ArrivalWord(msgspec.Struct, frozen=True):
    pass


class Incoming(_ArrivalWord, frozen=True):
    """A write, as requested by a rank of a sender."""

    key: TransferKey
    source: str
    """Connection by which the write arrived."""
    number: int
    """Number of the write, counted from 0 for each sender's rank and transfer."""
    parts: tuple[tuple[int, np.ndarray], ...]
    """(region of the receiving rank, int64 [n, 2]: offsets and lengths)."""
    held_bytes: int
    """Memory of the write while parked, in bytes."""
    content: Any = None
    """Data of the transport; opaque here."""


# ---- events


class ExpectedArrival(_ArrivalWord, frozen=True):
    """The engine process announces a transfer and the expected spans of the rank."""

    key: TransferKey
    coverage: Coverage


class Copied(_ArrivalWord, frozen=True):
    """``Copy`` was carried out. ``error``: None after a correct copy."""

    write: Incoming
    error: ErrorInfo | None

    @property
    def key(self) -> TransferKey:
        return self.write.key


class ArrivalStopped(_ArrivalWord, frozen=True):
    """The engine process reports the end of a transfer."""

    key: TransferKey


class ArrivalTick(_ArrivalWord, frozen=True):
    """Time has passed."""


Event = Incoming | ExpectedArrival | Copied | ArrivalStopped | ArrivalTick


# ---- actions


class Copy(_ArrivalWord, frozen=True):
    """Copy the bytes and check the digests. Answered with one ``Copied``, at once or later. After
    ``ArrivalStopped`` no byte may be copied any more."""

    write: Incoming


class Answer(_ArrivalWord, frozen=True):
    """Report the end of a write to the sender's rank. ``error``: None for success."""

    write: Incoming
    error: ErrorInfo | None


class ArrivalReport(_ArrivalWord, frozen=True):
    """Report the rank's outcome of a transfer to the engine process."""

    key: TransferKey
    outcome: Outcome
    error: ErrorInfo | None = None


Action = Copy | Answer | ArrivalReport

PARKED_BYTES = 64 << 20
PARKED_S = 30.0
REMEMBER_S = 900.0


class _Arrival:
    def __init__(self, coverage: Coverage) -> None:
        self.coverage = coverage
        self.taken = set[tuple[str, int]]()
        self.copying = dict[tuple[str, int], list[Incoming]]()
        """Write without ``Copied`` so far -> repetitions of the write, which wait for the same answer."""
        self.over = False
        """True if the outcome, done or failed, was reported."""


class Arrivals:
    """All writes received by one rank. Used from one thread."""

    def __init__(
        self, parked_bytes: int = PARKED_BYTES, parked_s: float = PARKED_S, remember_s: float = REMEMBER_S
    ) -> None:
        """``parked_bytes``, ``parked_s``: limits in bytes and seconds for writes without an expected
        transfer. ``remember_s``: seconds for which ended transfers are remembered."""
        self._transfers: dict[TransferKey, _Arrival] = {}
        self._early: Parking[Incoming] = Parking(parked_bytes, parked_s)
        self._ended: Tombstones[None] = Tombstones(remember_s)
        self.dropped = 0
        """Number of dropped writes."""

    def __len__(self) -> int:
        return len(self._transfers)

    def transfers(self) -> list[TransferKey]:
        """Return the keys of expected transfers."""
        return list(self._transfers)

    @property
    def parked(self) -> int:
        """Bytes of parked writes."""
        return self._early.used

    def on(self, event: Event, now: float) -> list[Action]:
        """Return the actions for ``event``, in order of execution."""
        match event:
            case Incoming():
                return self._incoming(event, now)
            case ExpectedArrival(key, coverage):
                return self._expected(key, coverage, now)
            case Copied(write, error):
                return self._copied(write, error)
            case ArrivalStopped(key):
                return self._stopped(key, now)
            case ArrivalTick():
                self._ended.expire(now)
                late = self._early.expire(now)
                return [self._drop(write, "no receiver registered in time") for _, write in late]

    def next_due(self) -> float | None:
        both = (self._ended.next_due(), self._early.next_due())
        return min([at for at in both if at is not None], default=None)

    def _incoming(self, write: Incoming, now: float) -> list[Action]:
        """Copy a write, park the write until its transfer is expected, or drop the write."""
        transfer = self._transfers.get(write.key)
        if transfer is not None:
            return self._take(transfer, write)
        if write.key in self._ended:
            return [self._drop(write, "the transfer has ended")]
        if self._early.park(write.key, write, write.held_bytes, now):
            return []
        return [self._drop(write, "too many bytes arrived before their transfers")]

    def _expected(self, key: TransferKey, coverage: Coverage, now: float) -> list[Action]:
        """Register a transfer and handle its parked writes. No effect for a known or ended transfer. A
        transfer of 0 bytes is done at once."""
        if key in self._transfers or key in self._ended:
            return []
        transfer = self._transfers[key] = _Arrival(coverage)
        actions: list[Action] = []
        if not coverage.nbytes:
            transfer.over = True
            actions.append(ArrivalReport(key, Outcome.done))
        for write in self._early.flush(key):
            actions += self._take(transfer, write)
        return actions

    def _take(self, transfer: _Arrival, write: Incoming) -> list[Action]:
        """Return the copy of a write. Answer a repeated write without a copy, drop a late write, and fail the
        transfer for spans outside the transfer."""
        mark = write.source, write.number
        # A repeated write: the first copy counts, and the sender needs only the answer of the first copy.
        if mark in transfer.copying:
            transfer.copying[mark].append(write)
            return []
        if mark in transfer.taken:
            return [Answer(write, None)]
        if transfer.over:
            return [self._drop(write, "the transfer is complete or has failed")]
        try:
            for region, spans in write.parts:
                transfer.coverage.check(region, spans)
        except WeftError as error:
            return self._failed(transfer, write, error.info())
        first = not transfer.taken
        transfer.taken.add(mark)
        transfer.copying[mark] = []
        actions: list[Action] = [ArrivalReport(write.key, Outcome.pending)] if first else []
        return [*actions, Copy(write)]

    def _copied(self, write: Incoming, error: ErrorInfo | None) -> list[Action]:
        """Count the bytes of an ended copy and answer the write and its repetitions. Report the transfer done
        once all bytes are there. An error, or bytes received twice, fails the transfer."""
        transfer = self._transfers.get(write.key)
        again = [] if transfer is None else transfer.copying.pop((write.source, write.number), [])
        actions = self._counted(transfer, write, error)
        (told,) = [action.error for action in actions if isinstance(action, Answer)]
        return [*actions, *(Answer(one, told) for one in again)]

    def _counted(self, transfer: _Arrival | None, write: Incoming, error: ErrorInfo | None) -> list[Action]:
        """Return the answer of an ended copy, and the report of a transfer that ends with the copy."""
        # The transfer ended while the copy ran: answer, but report nothing more.
        if transfer is None or transfer.over:
            return [Answer(write, error)]
        if error is not None:
            return self._failed(transfer, write, error)
        for region, spans in write.parts:
            transfer.coverage.add(region, spans)
        try:
            complete = transfer.coverage.complete()
            # All bytes are there, so a copy under way would write some of them again, after the end.
            if complete and transfer.copying:
                raise BadSpans("bytes of a transfer are under way twice")
        except WeftError as twice:
            return self._failed(transfer, write, twice.info())
        if not complete:
            return [Answer(write, None)]
        transfer.over = True
        return [Answer(write, None), ArrivalReport(write.key, Outcome.done)]

    def _failed(self, transfer: _Arrival, write: Incoming, error: ErrorInfo) -> list[Action]:
        transfer.over = True
        return [Answer(write, error), ArrivalReport(write.key, Outcome.failed, error)]

    def _stopped(self, key: TransferKey, now: float) -> list[Action]:
        transfer = self._transfers.pop(key, None)
        self._ended.add(key, None, now)
        again = [] if transfer is None else [one for each in transfer.copying.values() for one in each]
        return [self._drop(write, "the transfer has ended") for write in (*again, *self._early.flush(key))]

    def _drop(self, write: Incoming, why: str) -> Answer:
        self.dropped += 1
        return Answer(write, Unavailable(f"a write was dropped: {why}").info())
