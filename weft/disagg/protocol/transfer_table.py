"""Common part of both sides of a KV transfer: failure, fencing, and the record of ended transfers. Pure.

    new ──► bound ──► active ──► done            TransferReceived, once
      ╰──────┴─────────┴──► failing ──► fenced   TransferFailed at once, TransferFreed when it is fenced

A failing transfer stops the local ranks and notifies the peer at once. Memory of the transfer is given
back only after every process with access to the memory has confirmed a stop, or can no longer do so: the
local ranks (``RankStopped``, or process exit), and the peer, if the peer has access (``Fenced``,
death of the peer, or revoked access). No time-out gives memory back. Messages may be lost: each message is
repeated until an answer arrives. Messages may be repeated: a second answer changes nothing.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from weft.common.errors import DeadlineExceeded, ErrorInfo, PeerEnded, Unavailable
from weft.disagg.protocol import transfer_events as ev
from weft.disagg.protocol.outcomes import Outcomes
from weft.disagg.protocol.tombstones import Tombstones
from weft.types import transfer as r
from weft.types.transfer import Outcome, Peer, State, TransferKey

FenceBy = Literal["copy", "connection", "rekey"]
"""Proof that a transport's writes have ended. "copy": receivers copy the bytes, so stopped receivers prove
the end. "connection": closed connections. "rekey": revoked registrations."""


_TOMBSTONE_BYTES = 512
"""Estimated bytes of one tombstone, without the message."""


class TransferPatience(NamedTuple):
    """Intervals and time-outs of a transfer, in seconds."""

    retry: float = 1.0
    """Seconds between repetitions of a message."""
    bind: float = 60.0
    """Maximum seconds until the transfer is bound. The time starts at an offer, or at a ``Later`` answer
    from the receiver."""
    fence: float = 10.0
    """Seconds until the access of a peer without an answer to a fence is revoked."""
    stop: float = 5.0
    """Seconds until ``StopRanks`` is repeated for ranks without a ``RankStopped``: a frame may be lost."""
    longest: float = 60.0
    """Maximum seconds between repetitions of a stop, a fence or a revocation. Each interval is twice the
    previous interval."""
    remember: float = 900.0
    """Seconds for which an ended transfer is remembered. Must exceed ``weft.types.transfer.MOST_SECONDS``."""


class Transfer:
    """State of one transfer on one side."""

    def __init__(self, key: TransferKey, peer: Peer, seconds: float, ranks: int) -> None:
        self.key, self.peer, self.seconds = key, peer, seconds
        self.deadline: float | None = None
        """Deadline of the transfer; None before the first offer. Time in the sender's queue does not
        count."""
        self.state = State.new
        self.was_bound = False
        self.outcomes = Outcomes(ranks)
        self.running = set(range(ranks))
        """Local ranks without a ``RankStopped``."""
        self.stop_at = 0.0
        """Time of the next ``StopRanks`` to the ranks in ``running``; used while the transfer is failing."""
        self.stop_after = 0.0
        """Seconds between the last ``StopRanks`` and the next."""
        self.peer_stopped = False
        """True if the peer no longer touches any memory of the transfer. Set by ``peer_is_quiet`` only."""
        self.revoke_at: float | None = None
        self.revoke_after = 0.0
        """Seconds between the last revocation and the next."""
        self.say: r.TransferMessage | None = None
        """Message to repeat until an answer arrives; None if no answer is due."""
        self.say_at = 0.0
        self.answer: r.TransferMessage | None = None
        """Answer of a failing transfer to late messages."""
        self.peer_asked = False
        """True if the peer sent a fence and still needs ``Fenced``."""
        self.bind_by: float | None = None
        self.offer: r.Admitted | None = None
        self.num_cached = 0
        """Sender only: positions of the sender's own prefix hit."""
        self.bound: r.Bound | None = None
        self.metadata: r.Metadata | None = None

    def begin(self, now: float) -> None:
        """Start the time-out of the transfer, at the first offer. Idempotent."""
        if self.deadline is None:
            self.deadline = now + self.seconds

    def peer_is_quiet(self) -> None:
        """Record a proof, or the peer's statement: the peer touches no memory of the transfer.
        Cancels a pending revocation."""
        self.peer_stopped, self.revoke_at = True, None

    def move(self, state: State) -> None:
        """Change the state. Raises AssertionError for a backward move and for a move out of an end state."""
        assert state > self.state, f"{self.state.name} -> {state.name}"
        assert not self.state.ended, f"{self.state.name} -> {state.name}"
        self.state = state
        self.was_bound |= state in (State.bound, State.active)


class EndedTransfer(NamedTuple):
    """Record of an ended transfer."""

    state: State
    answer: r.TransferMessage
    """Answer to every late message except a fence."""


class _Notice(NamedTuple):
    peer: Peer
    message: r.Fence
    due: float
    after: float
    """Seconds between the last repetition and the next."""
    until: float
    """Time after which the notice is dropped. Ignored while local memory depends on the answer."""


class TransferTable:
    """All transfers of one engine process, on one side (sending or receiving)."""

    def __init__(
        self, ranks: int, fence: FenceBy = "copy", patience: TransferPatience = TransferPatience()
    ) -> None:
        """``ranks``: ranks of the local group. ``fence``: proof that writes have ended. ``patience``:
        intervals and time-outs in seconds."""
        self._ranks, self._fence, self._patience = ranks, fence, patience
        self._transfers: dict[TransferKey, Transfer] = {}
        self._ended: Tombstones[EndedTransfer] = Tombstones(patience.remember)
        self._notices: dict[TransferKey, _Notice] = {}
        self._gone: set[int] = set()
        """Local ranks with an ended process and no replacement yet."""
        self.strays = 0
        """Number of dropped messages: from a process other than the transfer's peer, or impossible in
        the present state."""

    def __len__(self) -> int:
        """Return the number of live transfers."""
        return len(self._transfers)

    def state(self, key: TransferKey) -> State | None:
        """Return the state of a live or remembered transfer; None for an unknown transfer."""
        transfer = self._transfers.get(key)
        if transfer is not None:
            return transfer.state
        ended = self._ended.get(key)
        return None if ended is None else ended.state

    @property
    def remembered(self) -> int:
        """Number of remembered ended transfers."""
        return len(self._ended)

    def next_due(self) -> float | None:
        """Return the time of the next useful ``TransferTick``; None if no tick is needed now."""
        due: list[float | None] = [notice.due for notice in self._notices.values()]
        for transfer in self._transfers.values():
            due.append(transfer.revoke_at)
            if transfer.state < State.failing:
                due += [
                    transfer.deadline,
                    transfer.bind_by,
                    None if transfer.say is None else transfer.say_at,
                ]
            elif transfer.running:
                due.append(transfer.stop_at)
        due.append(self._ended.next_due())
        return min([at for at in due if at is not None], default=None)

    # ---- extension points of the two sides

    def _needs_peer(self, transfer: Transfer) -> bool:
        """Return True if the peer may read or write local memory of the transfer."""
        raise NotImplementedError

    def _opened(self, transfer: Transfer, now: float) -> list[ev.Action]:
        """Handle a new transfer."""
        return []

    def _progressed(self, transfer: Transfer, now: float) -> list[ev.Action]:
        """Handle a rank report without a failure."""
        return []

    def _live_message(self, transfer: Transfer, message: r.TransferMessage, now: float) -> list[ev.Action]:
        """Handle a message of the peer about a live transfer, except fences."""
        raise NotImplementedError

    def _early_message(self, peer: Peer, message: r.TransferMessage, now: float) -> list[ev.Action]:
        """Handle a message of an unknown transfer. Default: answer ``Fenced``."""
        return [ev.SendToPeer(peer, r.Fenced(key=message.key))]

    # ---- events of both sides

    def _common(self, event: ev.Common, now: float) -> list[ev.Action]:
        """Handle the events that sender and receiver share. Return the actions in order."""
        match event:
            case ev.Open():
                return self._open(event, now)
            case ev.PeerMessage():
                return self._message(event, now)
            case ev.RankReport():
                return self._rank_report(event, now)
            case ev.RankStopped(key, rank):
                return self._rank_stopped(key, rank, now)
            case ev.RankGone(rank):
                return self._rank_ended(rank, now)
            case ev.RankBack(rank):
                self._gone.discard(rank)
                return []
            case ev.PeerLost(peer):
                return self._peer_lost(peer, now)
            case ev.Revoked(key):
                # A revocation proves the same as a `Fenced`: the peer is quiet.
                return self._peer_stopped(key, now)
            case ev.Cancel(key, error):
                transfer = self._transfers.get(key)
                return [] if transfer is None else self._fail(transfer, error, now)
            case ev.TransferTick():
                return self._tick(now)

    def _message(self, event: ev.PeerMessage, now: float) -> list[ev.Action]:
        """Handle a peer's message. A message of another process than the transfer's peer is dropped. For an
        ended transfer the stored answer is repeated."""
        key, message = event.message.key, event.message
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.peer != event.peer:
            self.strays += 1
            return []
        # Fences and their answers are valid in every state, even for unknown transfers.
        if isinstance(message, r.Fence):
            return self._fenced_by_peer(event.peer, message, now)
        if isinstance(message, r.Fenced):
            return self._peer_stopped(key, now)
        if transfer is not None:
            return self._live_message(transfer, message, now)
        ended = self._ended.get(key)
        if ended is not None:
            return [ev.SendToPeer(event.peer, ended.answer)]
        return self._early_message(event.peer, message, now)

    def _open(self, event: ev.Open, now: float) -> list[ev.Action]:
        """Register a transfer. If a fence came first, report the transfer failed and its memory free. No
        effect for a known or completed transfer."""
        if event.key in self._transfers:
            return []
        if (ended := self._ended.get(event.key)) is not None:
            # A fence may arrive before the Submit: then the transfer has failed already, and has no memory
            # here.
            if ended.state is not State.fenced:
                return []
            answer = ended.answer
            error = answer.error if isinstance(answer, r.Fence | r.Refused) else _gone()
            return [
                ev.TellScheduler(r.TransferFailed(event.key, error)),
                ev.TellScheduler(r.TransferFreed(event.key)),
            ]
        transfer = self._transfers[event.key] = Transfer(event.key, event.peer, event.seconds, self._ranks)
        return self._opened(transfer, now)

    def _tick(self, now: float) -> list[ev.Action]:
        """Fail transfers past a deadline, and repeat unanswered messages, stops, fences and revocations.
        Forget old transfers."""
        # A failing transfer has no deadline: the memory is free only after the proof of a fence.
        actions: list[ev.Action] = []
        for transfer in list(self._transfers.values()):
            if transfer.revoke_at is not None and transfer.revoke_at <= now:
                transfer.revoke_after = min(2 * transfer.revoke_after, self._patience.longest)
                transfer.revoke_at = now + transfer.revoke_after
                actions.append(ev.Revoke(transfer.key, transfer.peer))
            if transfer.state >= State.failing:
                actions += self._stop_again(transfer, now)
                continue
            if transfer.deadline is not None and transfer.deadline <= now:
                error = DeadlineExceeded("a transfer between groups took too long")
                actions += self._fail(transfer, error.info(), now)
            elif transfer.bind_by is not None and transfer.bind_by <= now:
                actions += self._fail(
                    transfer, Unavailable("no receiver accepted the transfer in time").info(), now
                )
            elif transfer.say is not None and transfer.say_at <= now:
                actions += self._say(transfer, transfer.say, now)
        self._ended.expire(now)
        return actions + self._remind(now)

    def _stop_again(self, transfer: Transfer, now: float) -> list[ev.Action]:
        """Repeat ``StopRanks`` to the ranks of a failing transfer: the frame, or a rank's answer, may be
        lost."""
        if not transfer.running or transfer.stop_at > now:
            return []
        transfer.stop_after = min(2 * transfer.stop_after, self._patience.longest)
        transfer.stop_at = now + transfer.stop_after
        return [ev.StopRanks(transfer.key)]

    def _remind(self, now: float) -> list[ev.Action]:
        """Repeat fences without an answer. A fence with waiting memory is repeated without end."""
        actions: list[ev.Action] = []
        for key, notice in list(self._notices.items()):
            transfer = self._transfers.get(key)
            if notice.until <= now and (transfer is None or not self._needs_peer(transfer)):
                del self._notices[key]
            elif notice.due <= now:
                after = min(2 * notice.after, max(self._patience.longest, self._patience.retry))
                self._notices[key] = notice._replace(due=now + after, after=after)
                actions.append(ev.SendToPeer(notice.peer, notice.message))
        return actions

    def _rank_report(self, event: ev.RankReport, now: float) -> list[ev.Action]:
        """Record the outcome of a rank: fail the transfer, make a bound transfer active, or continue an
        active transfer. Does nothing unless the transfer is bound or active."""
        transfer = self._transfers.get(event.key)
        if transfer is None or transfer.state not in (State.bound, State.active):
            return []
        if transfer.outcomes.take(event.rank, event.outcome, event.error) is Outcome.failed:
            return self._fail(transfer, transfer.outcomes.error or _gone(), now)
        if transfer.state is State.bound:
            transfer.move(State.active)
        return self._progressed(transfer, now)

    def _rank_stopped(self, key: TransferKey, rank: int, now: float) -> list[ev.Action]:
        transfer = self._transfers.get(key)
        if transfer is None or transfer.state is not State.failing or rank not in transfer.running:
            return []
        transfer.running.discard(rank)
        return self._settle(transfer, now)

    def _all_there(self, transfer: Transfer, now: float) -> list[ev.Action]:
        """Fail a newly bound transfer if a local rank is gone: the part of the rank would never be sent."""
        lost = Unavailable("a process of the transfer was lost")
        return self._fail(transfer, lost.info(), now) if self._gone else []

    def _rank_ended(self, rank: int, now: float) -> list[ev.Action]:
        """Record the end of a rank's process: fail all bound transfers, and count the rank as stopped in
        failing transfers."""
        actions: list[ev.Action] = []
        self._gone.add(rank)
        for transfer in list(self._transfers.values()):
            if transfer.was_bound and transfer.state is not State.failing:
                lost = Unavailable("a process of the transfer was lost")
                actions += self._fail(transfer, lost.info(), now)
            # `_fail` may have ended the transfer.
            if transfer.key in self._transfers:
                actions += self._rank_stopped(transfer.key, rank, now)
        return actions

    def _peer_lost(self, peer: Peer, now: float) -> list[ev.Action]:
        """Fail all transfers with a dead peer and forget the fences that wait for the peer."""
        actions: list[ev.Action] = []
        for key in [key for key, notice in self._notices.items() if notice.peer == peer]:
            del self._notices[key]
        # A dead peer touches no memory, so the transfers need no fence.
        for transfer in [transfer for transfer in self._transfers.values() if transfer.peer == peer]:
            transfer.peer_is_quiet()
            actions += self._fail(transfer, PeerEnded("the other end of the transfer was lost").info(), now)
        return actions

    def _peer_stopped(self, key: TransferKey, now: float) -> list[ev.Action]:
        """Handle proof of a quiet peer (``Fenced`` or revoked access). Fails the transfer if still live."""
        self._notices.pop(key, None)
        transfer = self._transfers.get(key)
        if transfer is None:
            return []
        transfer.peer_is_quiet()
        return self._fail(transfer, Unavailable("the other end has ended the transfer").info(), now)

    def _fenced_by_peer(self, peer: Peer, fence: r.Fence, now: float) -> list[ev.Action]:
        """Fail the transfer; ``Fenced`` follows once all ranks have stopped. Remember and answer a fence for
        an unknown transfer at once."""
        transfer = self._transfers.get(fence.key)
        if transfer is not None:
            transfer.peer_asked = True
            return self._fail(transfer, fence.error, now)
        # Remember a fence for an unknown transfer: a later Submit for the transfer must fail.
        size = len(r.encode(fence)) + _TOMBSTONE_BYTES
        self._ended.add_of(peer, fence.key, EndedTransfer(State.fenced, fence), size, now)
        return [ev.SendToPeer(peer, r.Fenced(key=fence.key))]

    # ---- end of a transfer

    def _fail(
        self, transfer: Transfer, error: ErrorInfo, now: float, answer: r.TransferMessage | None = None
    ) -> list[ev.Action]:
        """Fail the transfer, unless the transfer is failing already. The memory is free after the fence.

        ``answer``: answer to late messages; default: the fence.
        """
        actions: list[ev.Action] = []
        if transfer.state < State.failing:
            fence = r.Fence(key=transfer.key, error=error)
            transfer.say, transfer.answer = None, answer or fence
            actions.append(ev.TellScheduler(r.TransferFailed(transfer.key, error)))
            actions.append(ev.StopRanks(transfer.key))
            # A lost rank cannot answer `Stop`; the end of its process is the proof.
            transfer.running -= self._gone
            # Before the bind, ranks have no peer addresses: no rank can touch the peer.
            if not transfer.was_bound:
                transfer.running.clear()
            transfer.stop_after = self._patience.stop
            transfer.stop_at = now + transfer.stop_after
            transfer.move(State.failing)
            if not transfer.peer_stopped:
                actions.append(ev.SendToPeer(transfer.peer, fence))
                due, until = now + self._patience.retry, now + self._patience.remember
                self._notices[transfer.key] = _Notice(transfer.peer, fence, due, self._patience.retry, until)
                if self._needs_peer(transfer):
                    transfer.revoke_after = self._patience.fence
                    transfer.revoke_at = now + transfer.revoke_after
        return actions + self._settle(transfer, now)

    def _reject(self, event: ev.Open, error: ErrorInfo, now: float) -> list[ev.Action]:
        """Refuse a transfer before its start. Notifies the scheduler and fences the peer, which may be
        waiting."""
        fence = r.Fence(key=event.key, error=error)
        retry = self._patience.retry
        until = now + self._patience.remember
        self._notices[event.key] = _Notice(event.peer, fence, now + retry, retry, until)
        to_scheduler = (
            ev.TellScheduler(r.TransferFailed(event.key, error)),
            ev.TellScheduler(r.TransferFreed(event.key)),
        )
        return [*to_scheduler, ev.SendToPeer(event.peer, fence)]

    def _settle(self, transfer: Transfer, now: float) -> list[ev.Action]:
        """Continue a failing transfer once all ranks have stopped: answer the fence of the peer, and report
        the memory free once the peer has stopped, too."""
        actions: list[ev.Action] = []
        if transfer.running:
            return actions
        if transfer.peer_asked:
            transfer.peer_asked = False
            actions.append(ev.SendToPeer(transfer.peer, r.Fenced(key=transfer.key)))
        if transfer.peer_stopped or not self._needs_peer(transfer):
            transfer.move(State.fenced)
            assert transfer.answer is not None
            self._end(transfer, transfer.answer, now)
            actions.append(ev.TellScheduler(r.TransferFreed(transfer.key)))
        return actions

    def _end(self, transfer: Transfer, answer: r.TransferMessage, now: float) -> None:
        """Remove the transfer and remember the end. ``answer``: answer to late messages."""
        del self._transfers[transfer.key]
        self._ended.add(transfer.key, EndedTransfer(transfer.state, answer), now)

    def _say(self, transfer: Transfer, message: r.TransferMessage, now: float) -> list[ev.Action]:
        """Send ``message`` now, and schedule repetitions until an answer arrives."""
        transfer.say, transfer.say_at = message, now + self._patience.retry
        return [ev.SendToPeer(transfer.peer, message)]


def _gone() -> ErrorInfo:
    return Unavailable("the transfer has ended").info()
