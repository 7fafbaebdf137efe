"""Transfers between simulated groups: the scheduler's view of a transfer, and a wire that only takes time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from weft.common.errors import ErrorInfo, PeerEnded
from weft.disagg.protocol.sender import not_needed
from weft.sim.timeline import Timeline
from weft.types import transfer as r
from weft.types.frames import Cache
from weft.types.messages import TokenEvent


class Wire(NamedTuple):
    """The connection between two groups."""

    position_bytes: float
    """Bytes of the cache of one position, all layers."""
    bandwidth: float
    """Bytes per second, of each sending group."""
    latency: float = 1e-3
    """Seconds of a message between two engines."""


class SchedulerPart(Protocol):
    """The transfer interface of a scheduler."""

    def transfer(self, event: r.TransferEvent, now: float) -> list[TokenEvent]: ...

    def transfer_requests(self) -> list[r.TransferRequest]: ...


class TransferGroup(Protocol):
    """The interface of a group for transfers."""

    link_free_at: float
    """Time at which the link has sent everything queued so far."""

    def part(self, cache: Cache) -> SchedulerPart | None:
        """Return the scheduler's interface for transfers of ``cache``; None without transfers."""

    def deliver(self, events: list[TokenEvent]) -> None:
        """Deliver ``events``, which the scheduler returned for a transfer."""


@dataclass(slots=True)
class _SimulatedTransfer:
    """State of a transfer: sender, receiver and wire."""

    sender: TransferGroup
    receiver: TransferGroup | None = None
    offered: bool = False
    length: int = 0
    start: int = 0
    """Positions before ``start`` are already at the receiver."""
    bound: bool = False
    waiting: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of computed positions that wait until the receiver has blocks."""
    arrives: float = 0.0
    """Arrival time of the latest data sent."""
    finished: bool = False
    """True if everything has been sent or is not needed."""
    first: r.FirstToken | None = None
    computed: float = 0.0
    """Time at which ``finished`` was set."""


class SimulatedTransfers:
    """All transfers of one cache in a deployment."""

    def __init__(
        self,
        timeline: Timeline,
        wire: Wire,
        groups: Mapping[str, TransferGroup],
        dims: r.GroupDims,
        cache: Cache = "kv",
    ) -> None:
        """Create the transfers. ``groups`` maps a peer name to a group, and may grow.

        ``dims`` apply to all groups. ``cache`` is the cache that the transfers move.
        """
        self.exposed: list[float] = []
        """Seconds from the first token until arrival of the whole cache, for each finished transfer."""
        self._timeline = timeline
        self._wire = wire
        self._groups = groups
        self._dims = dims
        self._cache: Cache = cache
        self._open: dict[r.TransferKey, _SimulatedTransfer] = {}

    def open(self, parameters: r.TransferParameters, group: TransferGroup) -> None:
        """Record ``group`` as the sender or the receiver in ``parameters``.

        A receiver gets the offer if the sender has offered already.
        """
        if parameters.sends:
            self._transfer(parameters.key, group)
        else:
            transfer = self._transfer(parameters.key, self._groups[parameters.peer.name])
            transfer.receiver = group
            # The sender's offer may come before the receiver's Submit.
            if transfer.offered:
                self._offer(transfer, parameters.key)

    def _transfer(self, key: r.TransferKey, sender: TransferGroup) -> _SimulatedTransfer:
        return self._open.setdefault(key, _SimulatedTransfer(sender))

    def serve(self, group: TransferGroup) -> None:
        """Carry out the transfer actions requested by the scheduler of ``group``."""
        part = group.part(self._cache)
        for request in () if part is None else part.transfer_requests():
            transfer = self._open.get(request.key)
            if transfer is not None:
                self._serve(group, transfer, request)

    def _serve(self, group: TransferGroup, transfer: _SimulatedTransfer, request: r.TransferRequest) -> None:
        """Carry out one request of the scheduler of ``group`` for a transfer, and record its state in
        ``transfer``."""
        match request:
            case r.OfferTransfer(key, num_prompt):
                transfer.length, transfer.offered = num_prompt, True
                self._offer(transfer, key)
            case r.ReserveTransfer(key, start):
                transfer.bound, transfer.start = True, start
                self._report(transfer.sender, r.TransferBound(key, start))
                # Send the chunks that were computed before the receiver had blocks, in order.
                for first, end in transfer.waiting:
                    self._queue_data(transfer, first, end)
                transfer.waiting.clear()
                self._finished(transfer, key)
            case r.PostponeTransfer(key, seconds):
                self._timeline.at(self._timeline.now + seconds, None, self._offer, transfer, key)
            case r.FinishTransfer(key, first):
                transfer.first, transfer.finished, transfer.computed = first, True, self._timeline.now
                self._finished(transfer, key)
            case r.RefuseTransfer(key, error) | r.CancelTransfer(key, error):
                self._fail(transfer, key, error)

    def _offer(self, transfer: _SimulatedTransfer, key: r.TransferKey) -> None:
        if transfer.receiver is not None and key in self._open:
            offer = r.Admitted(key=key, num_prompt=transfer.length, dims=self._dims)
            self._report(transfer.receiver, r.TransferWanted(key, offer))

    def send(self, key: r.TransferKey, start: int, end: int) -> None:
        """Send positions ``start`` .. end - 1, which are computed now.

        Until the receiver has blocks, the positions wait. Ended transfers are ignored.
        """
        transfer = self._open.get(key)
        if transfer is None:
            return
        if transfer.bound:
            self._queue_data(transfer, start, end)
        else:
            transfer.waiting.append((start, end))

    def _queue_data(self, transfer: _SimulatedTransfer, start: int, end: int) -> None:
        """Queue positions on the sender's link and set the time of arrival.

        Positions before ``transfer.start`` are already at the receiver.
        """
        positions = max(end - max(start, transfer.start), 0)
        begins = max(self._timeline.now, transfer.sender.link_free_at)
        transfer.sender.link_free_at = begins + positions * self._wire.position_bytes / self._wire.bandwidth
        transfer.arrives = transfer.sender.link_free_at + self._wire.latency

    def _finished(self, transfer: _SimulatedTransfer, key: r.TransferKey) -> None:
        if transfer.bound and transfer.finished:
            self._timeline.at(
                max(transfer.arrives, self._timeline.now + self._wire.latency),
                None,
                self._complete,
                transfer,
                key,
            )

    def _complete(self, transfer: _SimulatedTransfer, key: r.TransferKey) -> None:
        """Mark a transfer as received at both ends, and record the exposed seconds. Ended transfers are
        ignored."""
        if self._open.pop(key, None) is None or transfer.receiver is None:
            return
        self.exposed.append(self._timeline.now - transfer.computed)
        self._deliver(
            transfer.receiver, r.TransferReceived(key, () if transfer.first is None else (transfer.first,))
        )
        self._report(transfer.sender, r.TransferReceived(key))

    def _fail(self, transfer: _SimulatedTransfer, key: r.TransferKey, error: ErrorInfo | None) -> None:
        """End a failed transfer. Without ``error`` the sequence ended at its first token."""
        del self._open[key]
        why = error or not_needed()
        for group in (transfer.sender, transfer.receiver):
            if group is not None:
                self._report(group, r.TransferFailed(key, why))
                self._report(group, r.TransferFreed(key))

    def lose(self, group: TransferGroup) -> None:
        """End the transfers of ``group``, a process that has ended."""
        for key, transfer in list(self._open.items()):
            if group in (transfer.sender, transfer.receiver):
                self._fail(transfer, key, PeerEnded("the other end of the transfer was lost").info())

    def _report(self, group: TransferGroup, event: r.TransferEvent) -> None:
        """Deliver ``event`` of the other engine to ``group``, after the latency."""
        self._timeline.at(self._timeline.now + self._wire.latency, None, self._deliver, group, event)

    def _deliver(self, group: TransferGroup, event: r.TransferEvent) -> None:
        part = group.part(self._cache)
        assert part is not None
        group.deliver(part.transfer(event, self._timeline.now))
