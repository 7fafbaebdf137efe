"""The group of a simulated engine: the product's ``Membership``, and a shell that carries out actions.

The shell works like ``weft.engine.group``: frames to and from ranks over links with delay, a carrier that
starts processes and connects communicators, and a watch with heartbeats. Every decision of the membership is
compared with the state of the simulator.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from testing.cluster.check import require
from testing.cluster.ranks import BLOCKS, SETTINGS, RankProcess, Replica, Work
from testing.cluster.reports import Reports
from weft.common.restarts import RestartBudget
from weft.engine.disagg.group_transfers import GroupTransfers
from weft.group import types as t
from weft.group.meeting import Meeting
from weft.group.membership import Membership
from weft.sim.timeline import TimelineOwner
from weft.types import frames as f

MEETING_S = 0.05
"""Seconds between two reads of the other engines' leases during a meeting."""


class Group:
    """The group of one simulated engine. The ranks are processes of ``replica``."""

    def __init__(
        self,
        owner: TimelineOwner,
        replica: Replica,
        incarnation: str,
        *,
        load: float,
        meeting: Meeting | None = None,
        leases: list[t.Lease | None] | None = None,
        budget: RestartBudget | None = None,
        lag: int = 1,
    ) -> None:
        """Create the group.

        ``owner``: the engine process. ``load``: seconds to load the engine's own rank. ``leases``: by
        replica. For ``meeting``, ``budget`` and ``lag`` see ``Membership``.
        """
        pace = replica.pace
        self.owner = owner
        self.replica = replica
        self.rank = replica.ranks[0]
        self.others = tuple(replica.ranks[1:])
        self.incarnation = incarnation
        self.membership = Membership(
            self.rank,
            replica.members,
            settings=SETTINGS,
            rank_timeout=pace.timeout,
            incarnation=incarnation,
            stores=f"store{incarnation}",
            meeting=meeting,
            budget=budget,
            hello_s=pace.hello,
            load_s=pace.load,
            lag=lag,
        )
        self.troubled = False
        """True if an epoch, a try to form one, or a rank process was ever lost."""
        self.closed = False
        self.transfers: dict[f.Cache, GroupTransfers] = {}
        """Transfers of ranks, by cache. Empty without transfers, and before the first step."""
        self._closing = False
        self._timeline = replica.timeline
        self._load_s = load
        self._number = 0 if meeting is None else meeting.replica
        self._leases = [] if leases is None else leases
        self._away = self._ready = False
        """``_away``: the engine's own rank loads and reads no frames. ``_ready``: the rank is ready."""
        self._frames: deque[tuple[RankProcess, bytes, f.ToEngine]] = deque()
        """Frames not yet read."""
        self._carrying: deque[t.Spawn | t.Connect] = deque()
        self._carried: t.Spawn | t.Connect | None = None
        self._connected_epoch = -1
        """The last epoch with connected communicators."""
        self._reports = Reports(self.name, self.membership, replica)
        self._queue: deque[Work] = deque()
        """Steps not yet begun by the engine's own rank."""
        self._running: Work | None = None
        self._waited: int | None = None
        """The step awaited by the owner."""

    # -- beginning and end

    def start(self) -> None:
        """Begin, because the engine process listens."""
        self.replica.group = self
        self._feed(t.Own("started"))
        if not self.membership.alone:
            self._timeline.at(self._timeline.now, self, self._watch)

    def end(self, dismiss: bool | None) -> None:
        """End the group with the engine. Idempotent.

        ``dismiss`` is True if the ranks end, too; None if the engine was killed and can notify nobody.
        """
        if self.closed:
            return
        self._closing = True
        if dismiss is not None:
            self._feed(t.Close(dismiss))
        self.closed = True
        self.replica.engine_process_ended(self)

    @property
    def alive(self) -> bool:
        """True if the engine's own rank is alive, on the timeline and in collectives: the owner must live."""
        return self.owner.alive and not self.closed

    @property
    def stalled_until(self) -> float:
        """Stall of the owner, which is this rank's process; see ``alive``."""
        return self.owner.stalled_until

    @property
    def name(self) -> str:
        """Name of the owner, which is this rank's process; see ``alive``."""
        return self.owner.name

    @property
    def running(self) -> bool:
        """True if the group takes steps."""
        return self.membership.phase == "running"

    # -- steps

    def launch(self, work: Work) -> None:
        """Send a step to every rank, and launch this rank's share.

        A rank without a connection counts as gone, and no further rank gets the step.
        """
        for rank in self.others:
            process = self.replica.by_peer.get(self.membership.members[rank].peer or b"")
            if process is None or not process.alive:
                self._feed(t.Gone(rank, "it is not connected"))
                return
            self._post(process, process.take_step, work)
        self._queue.append(work)
        if self._running is None:
            self._begin()

    def send_transfer(self, rank: int, data: bytes) -> None:
        """Send a transfer frame to ``rank``, in order with steps; report ``Gone`` if not connected."""
        process = self.replica.by_peer.get(self.membership.members[rank].peer or b"")
        if process is not None and process.alive:
            self._post(process, process.take, f.decode_to_rank(data))
        else:
            gone = t.Gone(rank, "it is not connected")
            self._timeline.at(self._timeline.now, self, self._feed, gone)

    def wait_for(self, step: int) -> None:
        """Wait until ``step`` counts; then call ``owner.step_counts``."""
        self._waited = step
        self._settle()

    def check_count(self, step: int, epoch: int) -> None:
        """Raise Violation unless the result of ``step``, made in ``epoch``, may count."""
        self._reports.check_count(step, epoch)

    def peer_replica_gone(self, epoch: int) -> None:
        """Fail the running step of ``epoch`` on all ranks, because another replica of the expert-parallel
        group is gone. Other epochs are ignored.
        """
        self.replica.excuse()
        if self.running and self.membership.epoch == epoch:
            for process in list(self.replica.living.values()):
                if process.epoch == epoch:
                    process.fail(collective=True)
            self._feed(t.OwnFailure(epoch, "a replica is gone", collective=True))

    def _begin(self) -> None:
        """Begin the oldest queued step on the engine's own rank, or fail as planned."""
        work = self._running = self._queue.popleft()
        self._reports.begin(work.step)
        if self.replica.mishaps.befalls("step", self.rank):
            self.replica.excuse()
            self._feed(t.OwnFailure(work.epoch, "planted", collective=False))
            return
        key = (self.replica.name, work.epoch, work.step)
        ended = partial(self._step_ended, work)
        self.replica.collectives.join(key, len(self.replica.ranks), work.seconds, self, ended)

    def _step_ended(self, work: Work, whole: bool) -> None:
        """Report the end of a step on the engine's own rank, and begin the next.

        ``whole`` is False if a peer is gone.
        """
        if self._running is not work or self.closed:
            return
        self._running = None
        if not whole:
            self._queue.clear()
            self._feed(t.OwnFailure(work.epoch, "a peer is gone", collective=True))
            return
        if not self.running or self.membership.epoch != work.epoch:
            return
        if self._queue:
            self._begin()
        self._feed(t.OwnOutcome(work.step, work.checksum))

    def _settle(self) -> None:
        if self._waited is not None and self.running and self.membership.counts(self._waited):
            self._waited = None
            self.owner.step_counts()

    # -- the membership

    def _feed(self, event: t.Event) -> None:
        """Give the membership an event, carry out the actions, and react to a change of phase.

        Ignored once closed.
        """
        if self.closed:
            return
        members = self.membership
        before = members.phase
        actions = members.on(event, self._timeline.now)
        if actions:
            self._carry_out(actions)
        if members.phase != before:
            self._changed(before)
        if not self._ready:
            self._advance()
        if self._waited is not None:
            self._settle()

    def _carry_out(self, actions: list[t.Action]) -> None:
        """Carry out all actions; blocking actions one after another."""
        # `Spawn` and `Connect` block in the product, so the carrier runs one action after the other.
        for action in actions:
            if isinstance(action, t.SendFrame):
                self._send(action)
            elif isinstance(action, t.Abort):
                self._abort()
            elif isinstance(action, t.Renew):
                self._leases[self._number] = action.lease
            elif isinstance(action, t.TellEngine):
                frame = action.frame
                if (
                    isinstance(frame, f.TransferToEngine)
                    and (own := self.transfers.get(frame.cache)) is not None
                ):
                    own.report(frame)
                    self.owner.transfer_news()
            else:
                self._carrying.append(action)
        if self._carrying and self._carried is None:
            self._carry()

    def _changed(self, before: str) -> None:
        """React to a new phase of the membership: notify the owner, resume after a loss, count epochs.

        Raise Violation for a loss without an incident.
        """
        timeline, members = self._timeline, self.membership
        if before == "running" and not self._closing:
            excused = self.replica.excused_until >= timeline.now
            why = "" if members.lost is None else members.lost.message
            require(
                excused, f"{self.name} lost epoch {members.epoch} ({why}), and nothing had happened to it"
            )
        if timeline.logs:
            why = f": {members.lost.message}" if members.lost is not None else ""
            timeline.note(self.name, "..", "", f"epoch {members.epoch} is {members.phase}{why}")
        if members.phase == "running":
            self._reports.check_epoch()
            timeline.count("epochs")
            self.owner.group_runs()
        elif members.phase == "lost" or (before == "lost" and members.phase != "ended"):
            # The membership may skip "lost" at once, if no steps had to be dropped first.
            self.troubled = True
            timeline.count("epochs lost", before == "running")
            if members.unresumed is not None:
                timeline.after(0.0, 0.05 * self.replica.pace.timeout, self, self._resume)
        elif members.phase == "ended" and members.failed is not None and not self._closing:
            self.troubled = True
            timeline.at(timeline.now, self, self.owner.group_failed, members.failed)
        else:
            self.troubled = self.troubled or before in ("meeting", "forming", "running")

    def _resume(self) -> None:
        """Let the step thread notice the loss: drop all steps and resume. Ignored if resumed already."""
        lost = self.membership.unresumed
        if lost is not None:
            self._drop_steps()
            self.owner.group_lost()
            self._feed(t.Resume(lost))

    def _drop_steps(self) -> None:
        self._queue.clear()
        self._reports.clear()
        self._running = self._waited = None

    def _advance(self) -> None:
        """Move this rank's own stage forward, as far as the stages of the others allow."""
        members = self.membership
        if members.phase == "ended" or self._away:
            return
        stage = members.own_stage
        if stage == "started" and members.welcomed:
            self._away = True
            self._feed(t.Own("loading"))
            self._timeline.at(self._timeline.now + self._load_s, self, self._loaded)
        elif stage == "loaded" and members.pools is not None:
            self._ready = True
            self._feed(t.Own("ready"))

    def _loaded(self) -> None:
        self._away = False
        self._feed(t.Own("loaded", BLOCKS))
        while self._frames and not self.closed:
            self._read(*self._frames.popleft())

    # -- frames

    def receive(self, process: RankProcess, frame: f.ToEngine) -> None:
        """Receive a frame of a rank, after the delay of the link. Breaks the connection where planned."""
        timeline = self._timeline
        if timeline.logs:
            timeline.note(process.name, "->", self.name, frame)
        usual = timeline.now + self.replica.pace.delay * timeline.rng.random()
        if process.reports_due > usual + self.replica.pace.delay and isinstance(frame, f.StepOutcome):
            self.replica.mishaps.seen("report late")
        process.reports_due = max(usual, process.reports_due)
        connection = process.connection
        timeline.at(process.reports_due, self, self._arrived, process, process.peer, connection, frame)
        if process.loses_report and isinstance(frame, f.StepOutcome):
            process.loses_report = False
            process.break_connection()
        if process.loses_word and isinstance(frame, f.TransferToEngine):
            process.loses_word = False
            process.break_connection()

    def _arrived(self, process: RankProcess, peer: bytes, connection: int, frame: f.ToEngine) -> None:
        """Read a frame, or keep the frame while the own rank is away.

        Frames of an earlier connection are lost.
        """
        if connection != process.connection:
            if peer == process.peer and isinstance(frame, f.StepOutcome):
                self.replica.mishaps.seen("report lost")
            elif peer == process.peer and isinstance(frame, f.TransferToEngine):
                self.replica.mishaps.seen("room report lost")
        elif self._away:
            self._frames.append((process, peer, frame))
        else:
            self._read(process, peer, frame)

    def _read(self, process: RankProcess, peer: bytes, frame: f.ToEngine) -> None:
        """Feed a frame to the membership.

        Raise Violation if a frame of a process given up changes anything.
        """
        members = self.membership
        # Frames of a process already given up must not change anything.
        if process.given_up_by is self:
            before = self._reports.known_of(process.rank)
            actions = members.on(t.FrameReceived(peer, frame), self._timeline.now)
            told = [one for one in actions if not (isinstance(one, t.SendFrame) and _refuses(one.frame))]
            heard = f"{self.name} heard rank {process.rank}, which it had given up: {frame}"
            require(not told and self._reports.known_of(process.rank) == before, heard)
            self._carry_out(actions)
            return
        if isinstance(frame, f.StepOutcome) and self.running:
            self._reports.take(process.rank, peer, frame)
        self._feed(t.FrameReceived(peer, frame))

    def _send(self, send: t.SendFrame) -> None:
        """Send a frame to a rank. Without a connection, report ``Gone``."""
        process = self.replica.by_peer[send.peer]
        if _refuses(send.frame):
            process.given_up_by = self
        if process.alive and process.peer == send.peer:
            self._post(process, process.take, send.frame)
        elif send.rank is not None:
            gone = t.Gone(send.rank, "it is not connected")
            self._timeline.at(self._timeline.now, self, self._feed, gone)

    def _post(self, process: RankProcess, take: object, what: object) -> None:
        """Post ``what`` to the process over the present connection, in order."""
        timeline = self._timeline
        due = timeline.now + self.replica.pace.delay * timeline.rng.random()
        process.frames_due = max(due, process.frames_due)
        connection = process.connection
        timeline.at(process.frames_due, process, process.arrived, connection, take, self, what)

    # -- blocking calls, and the watch

    def _carry(self) -> None:
        """Begin the oldest blocking action. Raise Violation if an epoch comes again."""
        action = self._carried = self._carrying.popleft()
        pace = self.replica.pace
        if isinstance(action, t.Spawn):
            self._timeline.after(0.0, 0.03 * pace.slow, self, self._spawn, action)
            return
        require(action.epoch > self._connected_epoch, f"{self.name}: epoch {action.epoch} came again")
        self._connected_epoch = action.epoch
        self._reports.clear()
        size, ended = self.replica.size, partial(self._connected, action)
        self.replica.collectives.join(action.store, size, 0.02 * pace.slow, self, ended)

    def _spawn(self, action: t.Spawn) -> None:
        """Start the process of a rank, after the end of the former process if ``anew``.

        Report ``Spawned``.
        """
        replica = self.replica
        if action.anew:
            self.troubled = True
            replica.kill(action.rank)
            for transfers in self.transfers.values():
                transfers.ended(action.rank)
                self.owner.transfer_news()
        self._carried = None
        self._feed(t.Spawned(action.rank, replica.spawn(action.rank)))
        self._carry_next()

    def _connected(self, connect: t.Connect, whole: bool) -> None:
        """Report the outcome of a connection attempt and begin the next blocking action.

        ``whole`` is False if a peer is gone.
        """
        if self._carried is not connect:
            return
        self._carried = None
        if self.replica.mishaps.befalls("connect", self.rank):
            self._feed(t.OwnFailure(connect.epoch, "planted", collective=False))
        elif whole:
            self._feed(t.Connected(connect.epoch))
        else:
            self._feed(t.OwnFailure(connect.epoch, "no peer", collective=True))
        self._carry_next()

    def _carry_next(self) -> None:
        if self._carrying and self._carried is None and not self.closed:
            self._carry()

    def _abort(self) -> None:
        """Abort communicators: free the engine's own rank from a pending collective."""
        self.replica.collectives.leave(self.rank)
        self._queue.clear()
        self._running = None
        if isinstance(self._carried, t.Connect):
            ended = 0.05 * self.replica.pace.timeout
            self._timeline.after(0.0, ended, self, self._connected, self._carried, False)

    def _watch(self) -> None:
        """Exchange heartbeats, and report ended processes and read leases. Repeats until the group ends."""
        timeline, replica, members = self._timeline, self.replica, self.membership
        if members.phase == "ended":
            return
        for rank in self.others:
            # This end notices only local processes; the host of a remote rank restarts it alone.
            process = replica.living.get(rank)
            if process is None:
                if rank not in replica.remote:
                    self._feed(t.Gone(rank, "its process ended"))
            elif process.group is self and process.stalled_until <= timeline.now:
                self._heartbeat(process)
        self._feed(t.Read(heartbeats=True))
        if not self._away:
            if members.leases_due(timeline.now):
                self._feed(t.LeasesRead(tuple(self._leases)))
            self._feed(t.Read())
        tick = MEETING_S if members.phase == "meeting" else replica.pace.watch
        timeline.at(timeline.now + tick, self, self._watch)

    def _heartbeat(self, process: RankProcess) -> None:
        """Exchange heartbeats with a rank, which then leaves an aborted epoch."""
        epoch = process.epoch if process.formed else -1
        heartbeat = f.RankHeartbeat(rank=process.rank, epoch=epoch, step=0, incarnation=self.incarnation)
        self._feed(t.FrameReceived(b"", heartbeat))
        if process.running and process.epoch <= self.membership.aborted:
            process.fail(collective=True)


def _refuses(frame: f.ToRank) -> bool:
    return isinstance(frame, f.RankRefused)
