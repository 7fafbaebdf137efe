"""Transfers of the engine process of a decode group: reserve blocks for an offer, receive the bytes. Pure."""

from __future__ import annotations

from weft.common.errors import ErrorInfo, WeftError
from weft.disagg.protocol import transfer_events as ev
from weft.disagg.protocol.sender import TransferRefused, check_bound, intact
from weft.disagg.protocol.tombstones import Parking
from weft.disagg.protocol.transfer_table import FenceBy, Transfer, TransferPatience, TransferTable
from weft.types import transfer as r
from weft.types.transfer import GroupDims, Outcome, Peer, State, TransferKey

PARKED_BYTES = 64 << 20
"""Maximum bytes of offers without a Submit yet."""
LATER_S = 1.0
"""Seconds of requested wait for a sender, while the parking space is full, or while the scheduler has not
answered the offer."""


class TransferReceiver(TransferTable):
    """Receiving side of all transfers of an engine process. Call only ``on`` and ``next_due``, from one
    thread."""

    def __init__(
        self,
        dims: GroupDims,
        fence: FenceBy = "copy",
        patience: TransferPatience = TransferPatience(),
        parked_bytes: int = PARKED_BYTES,
    ) -> None:
        """``dims``: layout of the local group's caches. ``fence``: proof that the writes of a transfer have
        ended. ``patience``: intervals and time-outs. ``parked_bytes``: maximum bytes of offers without a
        Submit. Further offers get a ``Later`` answer."""
        super().__init__(dims.ranks, fence, patience)
        self._dims = dims
        self._early: Parking[tuple[Peer, r.Admitted]] = Parking(parked_bytes, patience.bind)
        self._asked: set[TransferKey] = set()
        """Transfers with a pending ``TransferWanted``: the scheduler has not answered yet."""

    def on(self, event: ev.ReceiverEvent, now: float) -> list[ev.Action]:
        """Return the actions for ``event``, in order of execution."""
        match event:
            case ev.Reserve(message):
                return self._reserve(message, now)
            case ev.Postpone(key, seconds):
                return self._postpone(key, seconds)
            case ev.Refuse(key, error):
                return self._refuse(key, error, now)
            case ev.TransferTick():
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

    def _needs_peer(self, transfer: Transfer) -> bool:
        return transfer.was_bound and self._fence != "copy"  # without "copy", senders write to local memory

    def _opened(self, transfer: Transfer, now: float) -> list[ev.Action]:
        """Handle the parked offer of a transfer, now that its Submit is there. Offers of other peers are
        dropped."""
        actions: list[ev.Action] = []
        for peer, message in self._early.flush(transfer.key):
            if peer == transfer.peer and transfer.state is State.new:
                actions += self._admitted(transfer, message, now)
        return actions

    def _early_message(self, peer: Peer, message: r.TransferMessage, now: float) -> list[ev.Action]:
        """Park an offer without a Submit, or answer ``Later`` if there is no space. Other messages: see
        ``TransferTable``."""
        if not isinstance(message, r.Admitted):
            return super()._early_message(peer, message, now)
        self._early.flush(message.key)  # a repeated offer replaces the parked offer
        if self._early.park(message.key, (peer, message), len(r.encode(message)), now):
            return []
        return [ev.SendToPeer(peer, r.Later(key=message.key, seconds=LATER_S))]

    def _live_message(self, transfer: Transfer, message: r.TransferMessage, now: float) -> list[ev.Action]:
        """Handle a message of a live transfer: offer, repeated offer or first tokens. Tokens with a wrong
        digest fail the transfer. Other messages count as strays."""
        match message:
            case r.Admitted() if transfer.state is State.new:
                return self._admitted(transfer, message, now)
            case r.Admitted() if transfer.bound is not None and transfer.state < State.failing:
                return [ev.SendToPeer(transfer.peer, transfer.bound)]
            case r.Metadata() if State.new < transfer.state < State.failing and transfer.metadata is None:
                if not intact(message):
                    what = "the first tokens of a sequence arrived with a wrong digest"
                    error = TransferRefused(what, code="transfer_corrupt")
                    return self._fail(transfer, error.info(), now)
                transfer.metadata = message
                return self._progressed(transfer, now)
            case r.Admitted() | r.Metadata():
                return []
        self.strays += 1
        return []

    def _admitted(self, transfer: Transfer, message: r.Admitted, now: float) -> list[ev.Action]:
        """Start the deadline and request memory from the scheduler (``TransferWanted``). Answer ``Later``
        while a request is pending."""
        if transfer.key in self._asked:
            return [ev.SendToPeer(transfer.peer, r.Later(key=transfer.key, seconds=LATER_S))]
        transfer.begin(now)
        transfer.offer = message
        self._asked.add(transfer.key)
        return [ev.TellScheduler(r.TransferWanted(transfer.key, message))]

    def _reserve(self, message: r.Bound, now: float) -> list[ev.Action]:
        """Bind the memory that the scheduler reserved, and accept the offer. Memory for an ended transfer is
        freed at once. Memory that does not fit the offer refuses the transfer."""
        key = message.key
        transfer = self._transfers.get(key)
        if transfer is None or transfer.offer is None or transfer.state is not State.new:
            # The transfer has ended meanwhile, and no peer knows the memory.
            return [ev.TellScheduler(r.TransferFreed(key))]
        self._asked.discard(key)
        try:
            check_bound(transfer.offer, message)
        except WeftError as error:
            return self._refuse_transfer(transfer, error.info(), now)
        transfer.bound = message
        transfer.move(State.bound)
        gone = self._all_there(transfer, now)
        return gone or [ev.Expect(key, transfer.offer, message), ev.SendToPeer(transfer.peer, message)]

    def _postpone(self, key: TransferKey, seconds: float) -> list[ev.Action]:
        """Answer a pending offer with ``Later``; no effect without a pending ``TransferWanted``."""
        transfer = self._transfers.get(key)
        if transfer is None or key not in self._asked:
            return []
        self._asked.discard(key)
        return [ev.SendToPeer(transfer.peer, r.Later(key=key, seconds=seconds))]

    def _refuse(self, key: TransferKey, error: ErrorInfo, now: float) -> list[ev.Action]:
        transfer = self._transfers.get(key)
        if transfer is None or transfer.offer is None or transfer.state is not State.new:
            return []
        return self._refuse_transfer(transfer, error, now)

    def _refuse_transfer(self, transfer: Transfer, error: ErrorInfo, now: float) -> list[ev.Action]:
        refused = r.Refused(key=transfer.key, error=error)
        transfer.peer_is_quiet()  # the peer was given no memory to touch
        actions = self._fail(transfer, error, now, answer=refused)
        return [ev.SendToPeer(transfer.peer, refused), *actions]

    def _progressed(self, transfer: Transfer, now: float) -> list[ev.Action]:
        """End the transfer once all ranks and the first tokens are there; else return no actions."""
        if transfer.outcomes.all is not Outcome.done or transfer.metadata is None:
            return []
        received = r.AllReceived(key=transfer.key)
        transfer.move(State.done)
        self._end(transfer, received, now)
        told = r.TransferReceived(transfer.key, transfer.metadata.first)
        return [ev.StopRanks(transfer.key), ev.TellScheduler(told), ev.SendToPeer(transfer.peer, received)]

    def _end(self, transfer: Transfer, answer: r.TransferMessage, now: float) -> None:
        self._asked.discard(transfer.key)
        super()._end(transfer, answer, now)
