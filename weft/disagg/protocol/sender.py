"""Transfers of the engine process of a prefill group: offer, push, pin blocks until the receiver is done.
Pure."""

from __future__ import annotations

import msgspec

from weft.common.errors import EndedElsewhere, ErrorInfo, WeftError
from weft.disagg.protocol import transfer_events as ev
from weft.disagg.protocol.digests import digest_bytes, transfer_seed
from weft.disagg.protocol.group_layout import compatible, placed
from weft.disagg.protocol.transfer_table import FenceBy, Transfer, TransferPatience, TransferTable
from weft.types import transfer as r
from weft.types.transfer import State


class TransferRefused(WeftError):
    """The peer cannot take part in the transfer, by the peer's own statement or answer."""

    code, blame = "transfer_refused", "peer"


class TransferSender(TransferTable):
    """Sending side of all transfers of an engine process. Call only ``on`` and ``next_due``, from one
    thread."""

    def __init__(
        self,
        ranks: int,
        fence: FenceBy = "copy",
        patience: TransferPatience = TransferPatience(),
        incarnation: int | None = None,
    ) -> None:
        """``ranks``: number of local ranks. ``fence``: proof that the writes of a transfer have ended.
        ``patience``: intervals and time-outs. ``incarnation``: of the local process. Transfers made for
        another incarnation fail at once; None accepts all."""
        super().__init__(ranks, fence, patience)
        self._incarnation = incarnation

    def on(self, event: ev.SenderEvent, now: float) -> list[ev.Action]:
        """Return the actions for ``event``, in order of execution. A transfer addressed to another
        incarnation of this engine is refused."""
        match event:
            case ev.Open(key) if self._incarnation not in (None, key.incarnation):
                error = TransferRefused("the transfer was addressed to another process of this engine").info()
                return self._reject(event, error, now)
            case ev.Offer(message, num_cached):
                return self._offer(message, num_cached, now)
            case ev.Finished(message):
                return self._finished(message, now)
            case _:
                return self._common(event, now)

    def _needs_peer(self, transfer: Transfer) -> bool:
        return transfer.was_bound and self._fence == "copy"  # with "copy", receivers read local memory

    def _offer(self, message: r.Admitted, num_cached: int, now: float) -> list[ev.Action]:
        """Offer a new transfer to the receiver and start the deadline. No effect for an unknown transfer or a
        second offer."""
        transfer = self._transfers.get(message.key)
        if transfer is None or transfer.offer is not None or transfer.state is not State.new:
            return []
        transfer.begin(now)
        transfer.num_cached = num_cached
        transfer.offer, transfer.bind_by = message, now + self._patience.bind
        return self._say(transfer, message, now)

    def _finished(self, message: r.Metadata, now: float) -> list[ev.Action]:
        """Store the first tokens with their digest, and send them once the transfer is bound. No effect for
        an unknown, failing or finished transfer."""
        transfer = self._transfers.get(message.key)
        if transfer is None or transfer.metadata is not None or transfer.state >= State.failing:
            return []
        transfer.metadata = sealed(message)
        return [] if transfer.state is State.new else self._say(transfer, transfer.metadata, now)

    def _live_message(self, transfer: Transfer, message: r.TransferMessage, now: float) -> list[ev.Action]:
        """Handle a message of a live transfer: accepted, postponed, refused or received. Impossible messages
        count as strays; others that come too late are ignored."""
        match message:
            case r.Bound() if transfer.state is State.new and transfer.offer is not None:
                return self._bind(transfer, transfer.offer, message, now)
            case r.Later(seconds=seconds) if transfer.state is State.new and transfer.offer is not None:
                transfer.say_at = now + max(seconds, self._patience.retry)
                # The receiver is alive: only the deadline ends the wait.
                transfer.bind_by = transfer.say_at + self._patience.bind
                return []
            case r.Refused(error=error) if transfer.state is State.new:
                transfer.peer_is_quiet()  # the receiver bound nothing
                return self._fail(transfer, error, now)
            case r.AllReceived() if (
                transfer.metadata is not None and State.new < transfer.state < State.failing
            ):
                transfer.move(State.done)
                self._end(transfer, r.Fenced(key=transfer.key), now)
                return [ev.StopRanks(transfer.key), ev.TellScheduler(r.TransferReceived(transfer.key))]
            case r.Admitted() | r.Metadata() | r.AllReceived():
                self.strays += 1
        return []

    def _bind(self, transfer: Transfer, offer: r.Admitted, bound: r.Bound, now: float) -> list[ev.Action]:
        """Accept the receiver's memory and start the ranks. An answer that does not fit the offer, or a lost
        rank, fails the transfer."""
        try:
            check_bound(offer, bound)
        except WeftError as error:
            return self._fail(transfer, error.info(), now)
        transfer.move(State.bound)
        transfer.bind_by = transfer.say = None
        if gone := self._all_there(transfer, now):
            return gone
        actions: list[ev.Action] = [
            ev.Push(transfer.key, offer, bound, transfer.num_cached),
            ev.TellScheduler(r.TransferBound(transfer.key, bound.start)),
        ]
        return actions if transfer.metadata is None else actions + self._say(transfer, transfer.metadata, now)


def check_bound(offer: r.Admitted, bound: r.Bound) -> None:
    """Raise TransferRefused, or TransferMessageError, if the answer ``bound`` does not fit the offer."""
    why = compatible(offer.dims, bound.dims)
    if why is not None:
        raise TransferRefused(f"the caches of the two groups differ: {why}")
    if bound.start > offer.num_prompt:
        raise TransferRefused("the receiver claims more positions than the prompt has")
    if len(bound.endpoints) != bound.dims.ranks:
        raise TransferRefused(f"{len(bound.endpoints)} endpoints for {bound.dims.ranks} ranks")
    placed(bound.blocks, bound.dims, bound.start, offer.num_prompt)


def sealed(message: r.Metadata) -> r.Metadata:
    """Return ``message`` with the digest set."""
    return msgspec.structs.replace(message, digest=_digest(message))


def intact(message: r.Metadata) -> bool:
    """Return True if the digest of ``message`` is correct."""
    return message.digest == _digest(message)


def not_needed() -> ErrorInfo:
    """Return the error for cancelling a transfer of an ended sequence. Not a failure of the client
    request."""
    return EndedElsewhere("the sequence has ended at the other end of the transfer").info()


def _digest(message: r.Metadata) -> int:
    bare = r.encode(msgspec.structs.replace(message, digest=0))
    return digest_bytes(bare, transfer_seed(message.key))
