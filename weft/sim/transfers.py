"""Transfers between simulated groups: the scheduler's view of a transfer, and a wire that only takes time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from weft.common.errors import ErrorInfo
from weft.disagg.protocol.sender import not_needed
from weft.sim.timeline import Timeline
from weft.types import rooms as r
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


class Part(Protocol):
    """The transfer interface of a scheduler."""

    def room(self, event: r.RoomEvent, now: float) -> list[TokenEvent]: ...

    def room_requests(self) -> list[r.RoomRequest]: ...


class Receives(Protocol):
    """A group, as seen by a transfer."""

    link_free_at: float
    """Time at which the link has sent everything queued so far."""

    def part(self, cache: Cache) -> Part | None:
        """Return the scheduler's interface for transfers of ``cache``; None without transfers."""

    def heard(self, events: list[TokenEvent]) -> None:
        """Deliver ``events``, which the scheduler returned for a transfer."""


@dataclass(slots=True)
class _Room:
    """A transfer, as known to both ends and the wire."""

    sender: Receives
    receiver: Receives | None = None
    offered: bool = False
    length: int = 0
    start: int = 0
    """Positions before ``start`` are already at the receiver."""
    bound: bool = False
    waiting: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of computed positions, held back until the receiver has blocks."""
    arrives: float = 0.0
    """Arrival time of the latest data sent."""
    finished: bool = False
    """True if everything has been sent or is not needed."""
    first: r.FirstToken | None = None
    computed: float = 0.0
    """Time at which ``finished`` was set."""


class TransferRooms:
    """All transfers of one cache in a deployment."""

    def __init__(
        self,
        timeline: Timeline,
        wire: Wire,
        groups: Mapping[str, Receives],
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
        self._open: dict[r.RoomKey, _Room] = {}

    def open(self, ticket: r.RoomTicket, group: Receives) -> None:
        """Record ``group`` as the sender or the receiver in ``ticket``.

        A receiver gets the offer if the sender has offered already.
        """
        if ticket.sends:
            self._room(ticket.key, group)
        else:
            room = self._room(ticket.key, self._groups[ticket.peer.name])
            room.receiver = group
            # The sender's offer may come before the receiver's Submit.
            if room.offered:
                self._offer(room, ticket.key)

    def _room(self, key: r.RoomKey, sender: Receives) -> _Room:
        return self._open.setdefault(key, _Room(sender))

    def serve(self, group: Receives) -> None:
        """Carry out the transfer actions requested by the scheduler of ``group``."""
        part = group.part(self._cache)
        for request in () if part is None else part.room_requests():
            room = self._open.get(request.key)
            if room is not None:
                self._serve(group, room, request)

    def _serve(self, group: Receives, room: _Room, request: r.RoomRequest) -> None:
        """Carry out one request of the scheduler of ``group`` for a transfer, and record its state in
        ``room``.
        """
        match request:
            case r.OfferRoom(key, num_prompt):
                room.length, room.offered = num_prompt, True
                self._offer(room, key)
            case r.ReserveRoom(key, start):
                room.bound, room.start = True, start
                self._said(room.sender, r.RoomBound(key, start))
                # Chunks computed before the receiver had blocks leave now, in order.
                for first, end in room.waiting:
                    self._leave(room, first, end)
                room.waiting.clear()
                self._finished(room, key)
            case r.PostponeRoom(key, seconds):
                self._timeline.at(self._timeline.now + seconds, None, self._offer, room, key)
            case r.FinishRoom(key, first):
                room.first, room.finished, room.computed = first, True, self._timeline.now
                self._finished(room, key)
            case r.RefuseRoom(key, error) | r.CancelRoom(key, error):
                self._fail(room, key, error)

    def _offer(self, room: _Room, key: r.RoomKey) -> None:
        if room.receiver is not None and key in self._open:
            offer = r.Admitted(key=key, num_prompt=room.length, dims=self._dims)
            self._said(room.receiver, r.RoomWanted(key, offer))

    def send(self, key: r.RoomKey, start: int, end: int) -> None:
        """Send positions ``start`` .. end - 1, which are computed now.

        Until the receiver has blocks, the positions wait. Ended transfers are ignored.
        """
        room = self._open.get(key)
        if room is None:
            return
        if room.bound:
            self._leave(room, start, end)
        else:
            room.waiting.append((start, end))

    def _leave(self, room: _Room, start: int, end: int) -> None:
        """Queue positions on the sender's link and set the time of arrival.

        Positions before ``room.start`` are already at the receiver.
        """
        # Positions before `room.start` are already in the receiver's prefix cache.
        positions = max(end - max(start, room.start), 0)
        begins = max(self._timeline.now, room.sender.link_free_at)
        # One link per sender: data queues behind earlier data.
        room.sender.link_free_at = begins + positions * self._wire.position_bytes / self._wire.bandwidth
        room.arrives = room.sender.link_free_at + self._wire.latency

    def _finished(self, room: _Room, key: r.RoomKey) -> None:
        if room.bound and room.finished:
            self._timeline.at(
                max(room.arrives, self._timeline.now + self._wire.latency), None, self._land, room, key
            )

    def _land(self, room: _Room, key: r.RoomKey) -> None:
        """End a transfer as received at both ends, and record its exposed seconds. Ignored after an end."""
        if self._open.pop(key, None) is None or room.receiver is None:
            return
        self.exposed.append(self._timeline.now - room.computed)
        self._happened(room.receiver, r.RoomLanded(key, () if room.first is None else (room.first,)))
        self._said(room.sender, r.RoomLanded(key))

    def _fail(self, room: _Room, key: r.RoomKey, error: ErrorInfo | None) -> None:
        """End a failed transfer. Without ``error`` the sequence ended at its first token."""
        del self._open[key]
        why = error or not_needed()
        for group in (room.sender, room.receiver):
            if group is not None:
                self._said(group, r.RoomFailed(key, why))
                self._said(group, r.RoomFreed(key))

    def _said(self, group: Receives, event: r.RoomEvent) -> None:
        """Deliver ``event`` of the other engine to ``group``, after the latency."""
        self._timeline.at(self._timeline.now + self._wire.latency, None, self._happened, group, event)

    def _happened(self, group: Receives, event: r.RoomEvent) -> None:
        part = group.part(self._cache)
        assert part is not None
        group.heard(part.room(event, self._timeline.now))
