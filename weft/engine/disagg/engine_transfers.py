"""The engine's side of the transfers of a group: between the scheduler, the ranks and the engine processes of
other groups.

    scheduler   requests() ───────►┐        ┌──► ranks       Push, Expect, Stop: frames, in order with steps
    ranks       reports ──────────►│ trans- ├──► engines     messages
    engines     messages ─────────►│ fers   ├──► scheduler   transfer(event)
    peers       ends of processes ►┘        └──► log, counters

``weft.disagg.protocol`` decides. This module executes the decisions on the engine's thread and never blocks.
A call without new input costs a few checks of queues.

* Memory of a sender after the end or silence of a peer: see ``weft.engine.disagg.peers``.
* When a group is lost and formed again, all transfers fail at once, because the memory may be gone. Surviving
  ranks receive ``StopTransfer``, and again after the recovery, because the connection may have lost the first
  frame. The end of a replaced rank's process ends the rank's transfers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from weft.common.clock import Clock
from weft.common.counted_log import CountedLog
from weft.common.errors import ErrorInfo, NoCommonTransport, Unavailable, WeftError
from weft.common.log import get_logger
from weft.disagg.protocol import transfer_events as ev
from weft.disagg.protocol.pairing import Pairing
from weft.disagg.protocol.receiver import TransferReceiver
from weft.disagg.protocol.sender import TransferSender, not_needed
from weft.disagg.protocol.transfer_table import TransferPatience
from weft.disagg.protocol.volume import transfer_bytes
from weft.engine.disagg import transfer_notes as notes
from weft.engine.disagg.group_transfers import RankEvent
from weft.engine.disagg.peers import Peers, PeerWatch
from weft.engine.disagg.transfer_ends import TransferRanks, TransferScheduler
from weft.engine.disagg.transfer_notes import TransferNotes, TransferTally
from weft.types import frames as f
from weft.types import transfer as r
from weft.types.messages import TokenEvent, TransferStats
from weft.types.transfer import Outcome, Peer, TransferKey

if TYPE_CHECKING:
    from weft.engine.disagg.transfer_channel import Arrived, TransferChannel

log = get_logger(__name__)

TICK_S = 0.1
"""Seconds between two checks of deadlines."""
TIDY_S = 30.0
"""Seconds between two checks for unused connections."""
IDENTIFY_S = 30.0
"""Maximum seconds until a peer reports its process id. Before the report, the end of the peer is not
detected."""
ASK_S = 1.0
"""Seconds between two requests for the process id of a peer."""
POSTPONE_S = 0.5
"""Seconds after which a sender asks again while the local group is in recovery."""
HASH_BYTES = 16
"""Bytes of the hash of one base block in an offer."""
MOST_MESSAGES = 256
"""Maximum messages handled in one call of ``take``, so that steps are not delayed."""


class EngineTransfers:
    """The transfers of one engine process, as an ``AwaitedSource``. Used from the stepping thread."""

    def __init__(
        self,
        sends: bool,
        ranks: TransferRanks,
        channel: TransferChannel,
        *,
        incarnation: int,
        clock: Clock,
        patience: TransferPatience = TransferPatience(),
        peers: Peers | None = None,
        pairing: Pairing | None = None,
    ) -> None:
        """``sends``: True for the sender's side, False for the receiver's side.

        ``channel``: closed by ``close``. ``incarnation``: the engine's number, as in the Welcome.
        ``patience``: time limits of transfers. ``peers``: detects ends of peers (default: ``PeerWatch``),
        closed by ``close``. ``pairing``: chooses the transport for each receiver. None: ranks have one
        transport.
        """
        self._sends = sends
        self._ranks, self._channel, self._clock = ranks, channel, clock
        self._machine: TransferSender | TransferReceiver
        if sends:
            self._machine = TransferSender(len(ranks.ranks), "copy", patience, incarnation)
        else:
            self._machine = TransferReceiver(ranks.dims, "copy", patience)
        self._peers: Peers = peers or PeerWatch()
        self._pairing = pairing
        self._lost: set[Peer] = set()
        self._ranks_ready = True
        """False from the loss of ranks until the group runs again."""
        self._deferred_offers: dict[TransferKey, ev.Action] = {}
        """Offers received during a recovery. The scheduler receives the offers after the recovery."""
        self._gone_ranks: set[int] = set()
        """Ranks whose process has ended, until ``regain``."""
        self._records: dict[TransferKey, TransferNotes] = {}
        self._stops: dict[TransferKey, set[int]] = {}
        """Transfers with a pending ``StopTransfer`` -> ranks without an acknowledgement."""
        self._actions: deque[ev.Action] = deque()
        self._tick_at = self._tidy_at = self._ask_at = 0.0
        self._unidentified: dict[TransferKey, float] = {}
        """Transfers with an unknown peer process -> time at which the transfer is cancelled."""
        self.tally = TransferTally(self._sends)
        self._limited_log = CountedLog(log)
        self.bad = 0
        """Number of unreadable or invalid messages, which were dropped."""

    # ---- the interface for the step loop

    @property
    def address(self) -> str:
        """Address of the engine process for peers."""
        return self._channel.address

    @property
    def sockets(self) -> Sequence[Any]:
        """Sockets and descriptors to poll while idle."""
        return [*self._channel.sockets, *self._ranks.sockets, *self._peers.sockets]

    @property
    def next_due(self) -> float | None:
        """Time at which ``take`` has work even without input; None if there is no deadline."""
        due = self._machine.next_due()
        if self._unidentified:
            due = self._ask_at if due is None else min(due, self._ask_at)
        return None if due is None else max(due, self._tick_at)

    @property
    def moving(self) -> bool:
        """True while a transfer may still complete. A draining engine process waits for the transfers."""
        return any(not record.failed for record in self._records.values())

    def stats(self, of_scheduler: TransferStats | None) -> TransferStats:
        """Return the transfer counters, merged with the gauges of the scheduler."""
        stats = msgspec.structs.replace(self.tally.stats, open=len(self._machine))
        if of_scheduler is None:
            return stats
        return msgspec.structs.replace(
            stats,
            blocked=of_scheduler.blocked,
            fetching=of_scheduler.fetching,
            pinned_blocks=of_scheduler.pinned_blocks,
            returns=of_scheduler.returns,
        )

    def open(self, parameters: r.TransferParameters) -> None:
        """Register the transfer of a Submit and start its deadline.

        Known keys are ignored. The caller must call ``serve`` afterwards.

        An unknown peer is asked for its process id. The transfer of an ended peer fails.
        """
        key, peer = parameters.key, parameters.peer
        if key in self._records:
            return
        self._records[key] = TransferNotes(peer)
        self._on(ev.Open(key, peer, parameters.seconds))
        if self._machine.state(key) is r.State.done:  # a late Submit of a finished transfer: no answer is due
            del self._records[key]
        if peer in self._lost:
            self._on(ev.PeerLost(peer))
        elif not self._peers.knows(peer):
            self._unidentified[key] = self._clock.now() + IDENTIFY_S
            self._channel.send(peer, b"", asks=True)

    def take(self, scheduler: TransferScheduler) -> list[TokenEvent]:
        """Handle ended peers, received messages and deadlines. Return the events. Does not block."""
        for peer in self._peers.take():
            self._peer_ended(peer)
        for _ in range(MOST_MESSAGES):
            arrived = self._channel.receive()
            if arrived is None:
                break
            self._arrived(arrived)
        now = self._clock.now()
        if now >= self._tick_at:
            self._tick(now)
        return self.serve(scheduler)

    def serve(self, scheduler: TransferScheduler) -> list[TokenEvent]:
        """Execute the scheduler's requests and handle the reports of ranks. Return the events. Does not
        block.

        Call ``serve`` after each input to the scheduler, and after each launch or commit of a step.
        """
        for event in self._ranks.take():
            self._rank_reported(event)
        events: list[TokenEvent] = []
        # An executed action may create requests, and a request may create actions: loop until both are empty.
        while True:
            while self._actions:
                self._carry_out(self._actions.popleft(), scheduler, events)
            requests = scheduler.transfer_requests()
            if not requests:
                return events
            for request in requests:
                self._request(request)

    def lose(self) -> None:
        """Fail all transfers after the loss of ranks. The caller must call ``serve`` afterwards."""
        self._ranks_ready = False
        lost = Unavailable("a process of the transfer was lost").info()
        for key in list(self._records):
            self._on(ev.Cancel(key, lost))

    def regain(self) -> None:
        """Resume after the recovery: repeat pending stops and release deferred offers. The caller must call
        ``serve``.
        """
        for event in self._ranks.take():  # reports from before the recovery
            self._rank_reported(event)
        self._ranks_ready = True
        for rank in self._gone_ranks:
            self._on(ev.RankBack(rank))
        self._gone_ranks.clear()
        for key in self._stops:
            self._ranks.send(f.StopTransfer(key=key))
        self._actions.extend(self._deferred_offers.values())
        self._deferred_offers.clear()

    def close(self) -> None:
        """Send a cancellation of every transfer to the peer and close the channel. The transfers of the ranks
        end with the processes.
        """
        ends = Unavailable("an engine of the transfer is shutting down").info()
        for key in list(self._records):
            self._on(ev.Cancel(key, ends))
        for action in self._actions:
            if isinstance(action, ev.SendToPeer):
                self._send(action.peer, action.message)
        self._actions.clear()
        self._channel.close()
        self._peers.close()

    # ---- input

    def _on(self, event: ev.SenderEvent | ev.ReceiverEvent) -> None:
        """Feed ``event`` to the state machine and queue the resulting actions for ``serve``."""
        machine = self._machine
        now = self._clock.now()
        if isinstance(machine, TransferSender):
            assert not isinstance(event, ev.Reserve | ev.Postpone | ev.Refuse), "an event of receivers"
            self._actions.extend(machine.on(event, now))
        else:
            assert not isinstance(event, ev.Offer | ev.Finished), "an event of senders"
            self._actions.extend(machine.on(event, now))

    def _request(self, request: r.TransferRequest) -> None:
        """Feed a request of the scheduler to the state machine, and note the time of its stage."""
        key = request.key
        match request:
            case r.OfferTransfer(num_prompt=num_prompt, num_cached=num_cached, hashes=hashes):
                dims = self._ranks.dims
                message = r.Admitted(key=key, num_prompt=num_prompt, dims=dims, hashes=hashes)
                self._mark(key, notes.OFFERED)
                self._on(ev.Offer(message, num_cached))
            case r.FinishTransfer(first=first):
                self._mark(key, notes.FIRST_TOKEN)
                self._on(ev.Finished(r.Metadata(key=key, first=() if first is None else (first,))))
            case r.CancelTransfer(error=error):
                self._on(ev.Cancel(key, error or not_needed()))
            case r.ReserveTransfer(start=start, blocks=blocks):
                endpoints = self._ranks.endpoints() or ()
                dims = self._ranks.dims
                self._mark(key, notes.BOUND)
                self._on(
                    ev.Reserve(r.Bound(key=key, start=start, dims=dims, blocks=blocks, endpoints=endpoints))
                )
            case r.PostponeTransfer(seconds=seconds):
                self._mark(key, notes.POSTPONED)
                self._on(ev.Postpone(key, seconds))
            case r.RefuseTransfer(error=error):
                self._on(ev.Refuse(key, error))

    def _arrived(self, arrived: Arrived) -> None:
        """Handle a message of a peer.

        Note the peer's process, answer a question for the local process, and feed the body to the state
        machine.

        Messages of ended peers are dropped. An unreadable message is counted in ``bad``, logged and dropped.
        A message that breaks the state machine cancels only its own transfer.
        """
        peer = arrived.peer
        self._peers.register(peer, arrived.process)
        if arrived.asks:
            self._channel.send(peer, b"", asks=False)
        if not arrived.body or peer in self._lost:
            return
        try:
            message = r.decode(arrived.body)
            if isinstance(message, r.Admitted) and len(message.hashes) % HASH_BYTES:
                raise r.TransferMessageError("the hashes of a prompt are truncated")
        except r.TransferMessageError as error:
            self.bad += 1
            self._limited_log.warn(
                "dropped an invalid message of another engine: %s (%s)", error.message, peer.name
            )
            return
        try:
            self._on(ev.PeerMessage(peer, message))
        except Exception:  # an invalid message must end only the message's own transfer
            log.exception("processing a message of %s failed", peer.name)
            self.bad += 1
            bad = r.TransferMessageError("the other end of the transfer sent an invalid message")
            self._on(ev.Cancel(message.key, bad.info()))

    def _rank_reported(self, event: RankEvent) -> None:
        """Note the stage of a rank's report and feed the report to the state machine.

        An ended rank counts as stopped in all transfers, and is marked back at ``regain``.
        """
        # A failed outcome leaves no mark; the state machine receives every report below.
        match event:
            case ev.RankReport(key, _, outcome) if outcome is not Outcome.failed:
                self._mark(key, notes.FIRST_BYTE)
                if outcome is Outcome.done:
                    self._mark(key, notes.LAST_BYTE)
            case ev.RankReport(key, _, _, error):
                self._blame_transports(key, error)
            case ev.RankStopped(key, rank):
                self._has_stopped(key, rank)
            case ev.RankGone(rank):
                self._gone_ranks.add(rank)
                for key in list(self._stops):
                    self._has_stopped(key, rank)
        self._on(event)

    def _has_stopped(self, key: TransferKey, rank: int) -> None:
        """Remove ``rank`` from the pending stop of ``key``. Unknown keys are ignored."""
        pending = self._stops.get(key)
        if pending is not None:
            pending.discard(rank)
            if not pending:
                del self._stops[key]

    def _peer_ended(self, peer: Peer) -> None:
        """Mark the peer as lost, close its connection and feed the loss to the state machine. Logged."""
        log.info("the engine at the other end of transfers has ended: %s", peer.name)
        self._lost.add(peer)
        self._channel.drop(peer)
        self._on(ev.PeerLost(peer))

    def _tick(self, now: float) -> None:
        """Handle due deadlines, look for ended peers and tidy the connections.

        Called every ``TICK_S`` seconds.
        """
        self._tick_at = now + TICK_S
        due = self._machine.next_due()
        if due is not None and due <= now:
            self._on(ev.TransferTick())
        self._peers.look()
        if self._unidentified and now >= self._ask_at:
            self._identify_peers(now)
        if now >= self._tidy_at:
            self._tidy_at = now + TIDY_S
            self._channel.tidy()

    def _identify_peers(self, now: float) -> None:
        """Request the process id of unknown peers again, and cancel transfers of silent peers.

        Without the process id, the early end of a peer would go unnoticed until the transfer's own deadline,
        which may not have begun.
        """
        self._ask_at = now + ASK_S
        for key, until in list(self._unidentified.items()):
            record = self._records.get(key)
            if record is None or record.failed or self._peers.knows(record.peer):
                del self._unidentified[key]
            elif now >= until:
                del self._unidentified[key]
                self._on(ev.Cancel(key, Unavailable("the other end of the transfer never answered").info()))
            else:
                self._channel.send(record.peer, b"", asks=True)

    # ---- output

    def _carry_out(self, action: ev.Action, scheduler: TransferScheduler, events: list[TokenEvent]) -> None:
        """Execute one action of the state machine. Append the scheduler's events to ``events``.

        An action sends a message, sends a command to the ranks, or passes an event to the scheduler. During a
        recovery, an offer is deferred, and the peer must repeat the offer after ``POSTPONE_S`` seconds.
        """
        match action:
            case ev.SendToPeer(peer, message):
                self._send(peer, message)
            # During a recovery the scheduler cannot answer an offer.
            case ev.TellScheduler(r.TransferWanted(key)) if not self._ranks_ready:
                self._deferred_offers[key] = action
                self._on(ev.Postpone(key, POSTPONE_S))
            case ev.TellScheduler(event):
                self._note(event)
                events += scheduler.transfer(event, self._clock.now())
            case ev.Push(key, offer, bound, num_cached):
                chosen = self._with_transport(key, bound)
                if chosen is not None and self._may_begin(key, offer, chosen):
                    blocks = scheduler.transfer_blocks(key)
                    self._ranks.send(
                        f.PushTransfer(offer=offer, bound=chosen, blocks=blocks, num_cached=num_cached)
                    )
            case ev.Expect(key, offer, bound):
                if self._may_begin(key, offer, bound):
                    self._ranks.send(f.ExpectTransfer(offer=offer, bound=bound))
            case ev.StopRanks(key):
                self._stops[key] = set(self._ranks.ranks)
                self._ranks.send(f.StopTransfer(key=key))
            case ev.Revoke(key, peer):
                self._revoke(key, peer)

    def _with_transport(self, key: TransferKey, bound: r.Bound) -> r.Bound | None:
        """Return ``bound`` with one transport to the receiver, or None for an unknown transfer. Without a
        common transport, cancel the transfer and return None."""
        record = self._records.get(key)
        if record is None or self._pairing is None:
            return None if record is None else bound
        try:
            return self._pairing.choose(record.peer, bound, self._clock.now())
        except NoCommonTransport as error:
            self._limited_log.warn("no transfer to %s is possible: %s", record.peer.name, error.message)
            self._on(ev.Cancel(key, error.info()))
            return None

    def _blame_transports(self, key: TransferKey, error: ErrorInfo | None) -> None:
        """Record a failure at a rank as a failure of the transports of the transfer."""
        record = self._records.get(key)
        if record is not None and self._pairing is not None:
            for transport in record.transports:
                self._pairing.failed(record.peer, transport, error, self._clock.now())

    def _may_begin(self, key: TransferKey, offer: r.Admitted, bound: r.Bound) -> bool:
        """Record the volume and the transports of a transfer and return True if ranks may begin.

        Return False for an unknown or failed transfer. During a recovery, cancel and return False.
        """
        if not self._ranks_ready:
            self._on(ev.Cancel(key, Unavailable("the group is recovering").info()))
            return False
        record = self._records.get(key)
        if record is None or record.failed:
            return False
        record.transports = frozenset(endpoint.transport for endpoint in bound.endpoints)
        record.nbytes = transfer_bytes(offer.dims, bound.dims, bound.start, offer.num_prompt)
        return True

    def _send(self, peer: Peer, message: r.TransferMessage) -> None:
        """Send a message to a peer; ended peers are ignored.

        A message that cannot be encoded cancels its transfer.
        """
        if peer in self._lost:
            return
        try:
            body = r.encode(message)
        except WeftError as error:
            self._on(ev.Cancel(message.key, error.info()))
            return
        self._channel.send(peer, body, asks=not self._peers.knows(peer))

    def _revoke(self, key: TransferKey, peer: Peer) -> None:
        """Feed ``Revoked`` or ``PeerLost`` once no peer can use the sender's bytes: see
        ``weft.engine.disagg.peers``. Otherwise log a warning: the blocks stay pinned.
        """
        record = self._records.get(key)
        # With TCP only local ranks read the memory. With other transports the peer may read. Then only the
        # end of the peer's process proves that nobody reads.
        if record is None or record.transports <= {"tcp"}:
            self._on(ev.Revoked(key))
        elif peer in self._lost:
            self._on(ev.PeerLost(peer))
        else:
            log.warning(
                "no answer from the other end of transfer %d/%d: %s; blocks stay pinned until it answers",
                key.transfer,
                key.attempt,
                peer.name,
            )

    # ---- counters and log

    def _mark(self, key: TransferKey, what: str) -> None:
        record = self._records.get(key)
        if record is not None:
            record.mark(what, self._clock.now())

    def _note(self, event: r.TransferEvent) -> None:
        """Note the stage of an event in records, counters and log.

        Received and freed transfers leave the records.
        """
        key, now = event.key, self._clock.now()
        match event:
            case r.TransferWanted():
                self._mark(key, notes.OFFERED)
            case r.TransferBound():
                self._mark(key, notes.BOUND)
            case r.TransferReceived():
                self.tally.received(key, self._records.pop(key, None), now)
            case r.TransferFailed(error=error):
                self.tally.failed(key, self._records.get(key), error, now, self.address)
            case r.TransferFreed():
                self._records.pop(key, None)
