"""Transfers of the engine process of a decode group: reserve blocks for an offer, receive the bytes. Pure."""

from __future__ import annotations

from weft.common.errors import ErrorInfo, WeftError
from weft.disagg.protocol import events as ev
from weft.disagg.protocol.room_table import FenceBy, Patience, Room, Rooms
from weft.disagg.protocol.sender import TransferRefused, check_bound, intact
from weft.disagg.protocol.tombstones import Parking
from weft.types import rooms as r
from weft.types.rooms import GroupDims, Outcome, Peer, RoomKey, State

PARKED_BYTES = 64 << 20
"""Maximum bytes of offers without a Submit yet."""
LATER_S = 1.0
"""Seconds of requested wait for a sender, while the parking space is full, or while the scheduler has not
answered the offer."""


class ReceivingRooms(Rooms):
    """Receiving side of all transfers of an engine process. Call only ``on`` and ``next_due``, from one
    thread."""

    def __init__(
        self,
        dims: GroupDims,
        fence: FenceBy = "copy",
        patience: Patience = Patience(),
        parked_bytes: int = PARKED_BYTES,
    ) -> None:
        """``dims``: layout of the local group's caches. ``fence``: proof that the writes of a transfer have
        ended. ``patience``: intervals and time-outs. ``parked_bytes``: maximum bytes of offers without a
        Submit. Further offers get a ``Later`` answer."""
        super().__init__(dims.ranks, fence, patience)
        self._dims = dims
        self._early: Parking[tuple[Peer, r.Admitted]] = Parking(parked_bytes, patience.bind)
        self._asked: set[RoomKey] = set()
        """Transfers with a pending ``RoomWanted``: the scheduler has not answered yet."""

    def on(self, event: ev.ReceiverEvent, now: float) -> list[ev.Action]:
        """Return the actions for ``event``, in order of execution."""
        match event:
            case ev.Reserve(message):
                return self._reserve(message, now)
            case ev.Postpone(key, seconds):
                return self._postpone(key, seconds)
            case ev.Refuse(key, error):
                return self._refuse(key, error, now)
            case ev.Tick():
                self._early.expire(now)
                return self._tick(now)
            case _:
                return self._common(event, now)

    def next_due(self) -> float | None:
        both = (super().next_due(), self._early.next_due())
        return min([at for at in both if at is not None], default=None)

    @property
    def parked(self) -> int:
        """Number of transfers with an offer but no Submit yet."""
        return len(self._early)

    def _needs_peer(self, room: Room) -> bool:
        return room.was_bound and self._fence != "copy"  # without "copy", senders write to local memory

    def _opened(self, room: Room, now: float) -> list[ev.Action]:
        """Handle the parked offer of a transfer, now that its Submit is there. Offers of other peers are
        dropped."""
        actions: list[ev.Action] = []
        for peer, message in self._early.flush(room.key):
            if peer == room.peer and room.state is State.new:
                actions += self._admitted(room, message, now)
        return actions

    def _heard_early(self, peer: Peer, message: r.RoomMessage, now: float) -> list[ev.Action]:
        """Park an offer without a Submit, or answer ``Later`` if there is no space. Other messages: see
        ``Rooms``."""
        if not isinstance(message, r.Admitted):
            return super()._heard_early(peer, message, now)
        self._early.flush(message.key)  # a repeated offer replaces the parked offer
        if self._early.park(message.key, (peer, message), len(r.encode(message)), now):
            return []
        return [ev.Send(peer, r.Later(key=message.key, seconds=LATER_S))]

    def _heard_of(self, room: Room, message: r.RoomMessage, now: float) -> list[ev.Action]:
        """Handle a message of a live transfer: offer, repeated offer or first tokens. Tokens with a wrong
        digest fail the transfer. Other messages count as strays."""
        match message:
            case r.Admitted() if room.state is State.new:
                return self._admitted(room, message, now)
            case r.Admitted() if room.bound is not None and room.state < State.failing:
                return [ev.Send(room.peer, room.bound)]
            case r.Metadata() if State.new < room.state < State.failing and room.metadata is None:
                if not intact(message):
                    what = "the first tokens of a sequence arrived with a wrong digest"
                    error = TransferRefused(what, code="transfer_corrupt")
                    return self._fail(room, error.info(), now)
                room.metadata = message
                return self._progressed(room, now)
            case r.Admitted() | r.Metadata():
                return []
        self.strays += 1
        return []

    def _admitted(self, room: Room, message: r.Admitted, now: float) -> list[ev.Action]:
        """Start the deadline and request memory from the scheduler (``RoomWanted``). Answer ``Later`` while a
        request is pending."""
        if room.key in self._asked:
            return [ev.Send(room.peer, r.Later(key=room.key, seconds=LATER_S))]
        room.begin(now)
        room.offer = message
        self._asked.add(room.key)
        return [ev.Tell(r.RoomWanted(room.key, message))]

    def _reserve(self, message: r.Bound, now: float) -> list[ev.Action]:
        """Bind the memory that the scheduler reserved, and accept the offer. Memory for an ended transfer is
        freed at once. Memory that does not fit the offer refuses the transfer."""
        key = message.key
        room = self._rooms.get(key)
        if room is None or room.offer is None or room.state is not State.new:
            # The transfer has ended meanwhile, and no peer knows the memory.
            return [ev.Tell(r.RoomFreed(key))]
        self._asked.discard(key)
        try:
            check_bound(room.offer, message)
        except WeftError as error:
            return self._refuse_room(room, error.info(), now)
        room.bound = message
        room.move(State.bound)
        gone = self._all_there(room, now)
        return gone or [ev.Expect(key, room.offer, message), ev.Send(room.peer, message)]

    def _postpone(self, key: RoomKey, seconds: float) -> list[ev.Action]:
        """Answer a pending offer with ``Later``; no effect without a pending ``RoomWanted``."""
        room = self._rooms.get(key)
        if room is None or key not in self._asked:
            return []
        self._asked.discard(key)
        return [ev.Send(room.peer, r.Later(key=key, seconds=seconds))]

    def _refuse(self, key: RoomKey, error: ErrorInfo, now: float) -> list[ev.Action]:
        room = self._rooms.get(key)
        if room is None or room.offer is None or room.state is not State.new:
            return []
        return self._refuse_room(room, error, now)

    def _refuse_room(self, room: Room, error: ErrorInfo, now: float) -> list[ev.Action]:
        refused = r.Refused(key=room.key, error=error)
        room.peer_is_quiet()  # the peer was given no memory to touch
        actions = self._fail(room, error, now, answer=refused)
        return [ev.Send(room.peer, refused), *actions]

    def _progressed(self, room: Room, now: float) -> list[ev.Action]:
        """End the transfer once all ranks and the first tokens are there; else return no actions."""
        if room.outcomes.all is not Outcome.done or room.metadata is None:
            return []
        landed = r.Landed(key=room.key)
        room.move(State.done)
        self._end(room, landed, now)
        told = r.RoomLanded(room.key, room.metadata.first)
        return [ev.Stop(room.key), ev.Tell(told), ev.Send(room.peer, landed)]

    def _end(self, room: Room, answer: r.RoomMessage, now: float) -> None:
        self._asked.discard(room.key)
        super()._end(room, answer, now)
