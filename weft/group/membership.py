"""Membership of a group as a pure state machine of the engine process: events and the time in, actions out.

    gathering ──► meeting ──► forming ──► running
        ▲        (EP group)      │           │ a rank is gone, or failed
        │                        ▼           ▼
        ╰── replaced ◄────────── lost ◄──────╯ ──► ended, past tries and budget

gathering   every rank connects (RankHello), loads weights, receives pool sizes and allocates pools
meeting     only in an expert-parallel group: the engine processes agree on the number of the next epoch
forming     all ranks connect communicators, with empty slots
running     steps run; a step is settled when every rank has reported the same outcome
lost        waits until the engine has dropped all steps (``Resume``), or until the engine's rank has loaded
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec

from weft.common.errors import ConfigError, EngineDead, WeftError
from weft.common.log import get_logger
from weft.common.restarts import RestartBudget
from weft.group import types as t
from weft.group.liveness import COLLECTIVE, GRACE, SILENT, Liveness
from weft.group.meeting import Meeting
from weft.group.roster import RankMember, Roster
from weft.group.steps import Steps
from weft.group.tries import Tries
from weft.group.types import GroupLost
from weft.group.waits import HELLO_S, LAG, LOAD_S, LOOK_MEETING_S, LOOK_S, late
from weft.types import frames as f
from weft.types.tiers import BlocksCopied
from weft.types.weights import WeightsReport

log = get_logger(__name__)

Phase = Literal["gathering", "meeting", "forming", "running", "lost", "ended"]


class Membership:
    """Membership state of one group, in the engine process. Only ``on`` changes the state."""

    def __init__(
        self,
        rank: int,
        members: Mapping[int, bool],
        *,
        settings: Mapping[str, str],
        rank_timeout: float = 10.0,
        incarnation: str = "",
        heartbeats: str = "",
        stores: str = "",
        meeting: Meeting | None = None,
        budget: RestartBudget | None = None,
        hello_s: float = HELLO_S,
        load_s: float = LOAD_S,
        lag: int = LAG,
    ) -> None:
        """Create a membership in phase ``gathering``; the event ``Own("started")`` starts the ranks.

        ``rank`` is the rank of the engine process. ``members`` maps every other rank to True if the rank runs
        on this host. ``settings`` are the settings on which all ranks must agree. ``incarnation`` and
        ``heartbeats`` are the incarnation and the heartbeat address of this engine process. ``stores`` is the
        prefix of rendezvous store addresses; with an empty prefix no rank connects. ``meeting`` is given only
        in an expert-parallel group. ``lag`` is explained at ``counts``.
        """
        welcome = f.RankWelcome(heartbeats=heartbeats, incarnation=incarnation)
        self.rank, self._roster = rank, Roster(rank, members, settings, welcome)
        self.phase: Phase = "gathering"
        self.epoch = self.aborted = -1
        """Number of the present or last epoch (-1: none); number of the last ended epoch."""
        self.lost: GroupLost | None = None
        """Reason for the end of the last epoch or of the last attempt at an epoch; None during an epoch."""
        self.failed: WeftError | None = None
        """Reason for the final end of the group; None before the end."""
        self.steps = Steps(rank, tuple(members), COLLECTIVE * rank_timeout)
        self.lag = lag
        self.tries = Tries(budget)
        self._stores = stores
        self._timeout, self._hello_s, self._load_s = rank_timeout, hello_s, load_s
        self._liveness = Liveness(SILENT * rank_timeout)
        self._meeting = meeting
        self._own: t.Own = t.Own("started")
        """Load stage of the engine's rank."""
        self._stepping = False
        """True while the engine may have steps of the current or of the lost epoch."""
        self._connecting: int | None = None
        """Epoch of the ``Connect`` action in progress; None without such an action."""
        self._judging: tuple[float, str] | None = None
        """After a failed collective: deadline for a report of the cause, and the message of the failure."""
        self._until = 0.0
        """Deadline of phase ``meeting`` or ``forming``, in seconds."""
        self._now = self._read = 0.0
        """Time of the current event; time of the last ``Read`` of frames."""

    # ---- the interface of the shell

    def on(self, event: t.Event, now: float) -> list[t.Action]:
        """Apply ``event`` at time ``now`` and return the actions to carry out, in order.

        ``now`` is in seconds and never decreases. After the end of the group every event except ``Close`` is
        ignored. Raises nothing: read ``lost`` and ``failed`` afterwards.
        """
        self._now = now
        if self.phase != "ended" or isinstance(event, t.Close):
            self._take(event)
            self._advance()
        return self._roster.take_actions()

    @property
    def alone(self) -> bool:
        """True if the group has one rank and no meeting. Then any failure ends the group."""
        return not self.members and self._meeting is None

    @property
    def members(self) -> Mapping[int, RankMember]:
        """All ranks except the rank of the engine process."""
        return self._roster.members

    @property
    def pools(self) -> tuple[int, ...] | None:
        """Number of blocks of each pool; None until all ranks have loaded."""
        return self._roster.pools

    @property
    def own_stage(self) -> str:
        """Load stage of the engine's rank: ``started``, ``loading``, ``loaded`` or ``ready``."""
        return self._own.stage

    def counts(self, step: int) -> bool:
        """Return True if the engine may commit ``step``.

        The step must have ended on the engine's rank, and step ``step - lag`` must have ended on all ranks.
        """
        return self.steps.own >= step and self.steps.settled(step - self.lag)

    @property
    def welcomed(self) -> bool:
        """True if all ranks have connected."""
        return all(member.peer is not None for member in self.members.values())

    def heartbeat(self, peer: bytes) -> f.RankHeartbeat:
        """Return the answer to a heartbeat of the rank process with the control connection ``peer``."""
        return f.RankHeartbeat(
            rank=self.rank,
            epoch=self.epoch,
            step=self.steps.own,
            incarnation=self._roster.welcome.incarnation,
            aborted=self.aborted,
            given_up=self._roster.has_given_up(peer),
        )

    def leases_due(self, now: float) -> bool:
        """Return True if the shell should read the leases and send ``LeasesRead``."""
        if self._meeting is None or self.phase not in ("meeting", "running"):
            return False
        return now - self._meeting.looked >= (LOOK_MEETING_S if self.phase == "meeting" else LOOK_S)

    @property
    def unresumed(self) -> GroupLost | None:
        """Reason for the loss of the epoch while the group waits only for ``Resume``; otherwise None."""
        return self.lost if self.phase == "lost" and self._stepping and self._own.stage == "ready" else None

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of the current waits, in seconds; None if nothing has a deadline."""
        return min((due for due, _ in self._deadlines()), default=None)

    # ---- events

    def _take(self, event: t.Event) -> None:
        """Apply one event, without moving to the next phase. Actions collect in the roster."""
        # ``Read`` has two cases, for frames and for heartbeats. The narrower pattern must come first.
        match event:
            case t.FrameReceived(peer, frame):
                self._frame(peer, frame)
            case t.Read(heartbeats=False):
                # After a long gap this process was suspended, and reports of ranks may be unread.
                if self._now - self._read > COLLECTIVE * self._timeout / 2:
                    self.steps.extend(self._now)
                self._read = self._now
                # One overdue wait per event: the handler may change all other deadlines.
                overdue = next((end for due, end in self._deadlines() if self._now >= due), None)
                if overdue is not None:
                    overdue()
            case t.OwnOutcome(step, checksum):
                self._compare(self.steps.take(self.rank, step, checksum, self._now))
            case t.Read():
                silent = None if self.phase == "lost" else self._liveness.silent(self._now)
                if silent is not None:
                    self._lose(GroupLost(silent, "no heartbeat in time"))
            case t.Gone(rank, how):
                self._gone(rank, how)
            case t.Garbled(peer, error):
                self._roster.refuse(peer, error)
                if not self.tries.ran and isinstance(error, f.VersionMismatch):
                    self._end(ConfigError(error.message))
            case t.Spawned(rank, outlived):
                member = self.members[rank]
                member.starting, member.outlived, member.since = False, outlived, self._now
                self.tries.fresh = self.tries.fresh and not outlived
            case t.Own():
                self._advance_own(event)
            case t.Connected():
                self._connecting, self._until = None, self._now + self._timeout
                if self.phase != "forming":  # the epoch was lost meanwhile
                    self._roster.actions.append(t.Abort())
            case t.OwnFailure(epoch, message, collective):
                if epoch == self._connecting:
                    self._connecting = None
                if epoch == self.epoch and collective:
                    self._judge(message)
                elif self.aborted < epoch == self.epoch:
                    self._lose(GroupLost(self.rank, message))
            case t.LeasesRead(leases):
                self._leases(leases)
            case t.Resume(lost):
                self._resume(lost)
            case t.WeightsChosen(updates):
                self._roster.welcome = msgspec.structs.replace(self._roster.welcome, updates=updates)
            case t.Unable(error):
                self._end(error)
            case t.Close(dismiss, leave):
                if dismiss:
                    self._roster.dismiss(local_only=leave)
                self._end(self.failed or EngineDead("the engine is closed"))

    def _frame(self, peer: bytes, frame: f.ToEngine) -> None:
        """Apply a frame of a rank.

        Frames of replaced processes and of other epochs are dropped, except reports about transfers.
        """
        if isinstance(frame, f.RankHello):
            self._hello(peer, frame)
            return
        if isinstance(frame, f.RankHeartbeat):
            # Another incarnation: the rank still reports to an earlier engine process.
            if frame.incarnation == self._roster.welcome.incarnation:
                self._liveness.heartbeat(frame.rank, self._now, new=frame.epoch < 0)
            return
        member = self._roster.of(peer, frame.rank)
        if member is None:
            return
        match frame:
            case f.Loaded(rank=rank, blocks=blocks):
                self._loaded(rank, blocks)
            case f.Ready():
                member.ready, member.endpoint, member.embeddings = True, frame.endpoint, frame.embeddings
            case f.RankFailed(rank=rank, epoch=epoch, error=error) if epoch < 0:
                self._lose(GroupLost(rank, error.message, refused=error.blame == "client"))
            # Transfers, copies and updates of weights outlast epochs: the epoch of the frame does not matter.
            case f.TransferReport() | f.TransferStopped() | BlocksCopied() | WeightsReport():
                self._roster.actions.append(t.TellEngine(frame))
            case _ if frame.epoch != self.epoch:
                pass
            case f.Formed():
                member.formed = self.phase == "forming"
            case f.StepOutcome(rank=rank, step=step, checksum=checksum):
                if self.phase == "running":
                    self._compare(self.steps.take(rank, step, checksum, self._now))
            case f.RankFailed(rank=rank, error=error, comm=collective):
                member.stopped, member.bereft = True, collective
                if collective:
                    self._judge(error.message)
                elif self.aborted < self.epoch:  # else: a late report of a known loss
                    self._lose(GroupLost(rank, error.message))

    def _hello(self, peer: bytes, hello: f.RankHello) -> None:
        """Apply a hello.

        A new process of a rank ends a formed epoch. Before the first epoch, different settings end the group.
        """
        rank = hello.rank
        try:
            if not self._roster.hello(peer, hello, self._now):
                return
        except ConfigError as error:
            if not self.tries.ran:
                self._end(error)
            return
        self._liveness.forget(rank)
        self.tries.fresh = self.tries.fresh and hello.epoch < 0
        self.members[rank].stopped = self.phase != "gathering"
        if self.phase in ("meeting", "forming", "running"):
            if hello.epoch < 0:
                self._lose(GroupLost(rank, "its process was restarted"))
            else:
                self._lose(GroupLost(None, f"rank {rank} had lost its engine process, and has reconnected"))

    def _loaded(self, rank: int, blocks: tuple[int, ...]) -> None:
        try:
            self._roster.loaded(rank, blocks)
        except EngineDead as error:
            self._end(error)

    def _gone(self, rank: int, how: str) -> None:
        """Note the end of a rank's process.

        The epoch is lost, unless a rank taken over from an earlier engine process ends before the epoch.
        """
        member = self.members[rank]
        if member.starting or member.gone:
            return
        member.gone = how
        if member.outlived and self.phase == "gathering":  # an expected end: no attempt is spent
            self._replace(rank, how)
        else:
            self._lose(GroupLost(rank, how))

    def _compare(self, other: tuple[int, int] | None) -> None:
        """Lose the epoch if a rank sampled other tokens. ``other``: (rank, step), from ``Steps.take``."""
        if other is not None:
            rank, step = other
            self._lose(GroupLost(rank, f"it sampled other tokens in step {step} than the engine"))

    def _judge(self, message: str) -> None:
        """Wait a short time after a failed collective until a rank reports or shows the cause.

        The epoch is lost at once when every other rank has only seen the collective fail.
        """
        if self.phase not in ("forming", "running"):
            return
        if self._judging is None:
            self._judging = self._now + GRACE * self._timeout, message
            self._roster.actions.append(t.Abort())
        if all(member.bereft for member in self.members.values()):
            self._lose(GroupLost(None, message))

    def _leases(self, leases: Sequence[t.Lease | None]) -> None:
        """Apply the leases of all replicas: the epoch is lost if another replica has moved on.

        While meeting, propose an epoch or connect.
        """
        assert self._meeting is not None
        self._meeting.looked = self._now
        if self.phase == "running" and self._meeting.moved_on(self.epoch, leases):
            self._lose(GroupLost(None, "another replica was restarted"))
        elif self.phase == "meeting":
            answer = self._meeting.look(leases)
            if isinstance(answer, t.Lease):
                self._roster.actions.append(t.Renew(answer))
            elif answer is not None:
                self._connect(answer)

    def _advance_own(self, own: t.Own) -> None:
        """Record the load stage of the engine's rank.

        "started" starts all local ranks. A delayed attempt begins as soon as the engine's rank is not busy.
        """
        self._own = own
        if own.stage == "started":
            self._gather()
            for rank, member in self.members.items():
                if member.local:
                    self._roster.spawn(rank, anew=False)
            return
        if own.stage == "loaded":
            self._loaded(self.rank, own.blocks)
        if self.phase == "lost" and not self._engaged:
            self._again()

    # ---- losing

    @property
    def _engaged(self) -> bool:
        """True while the frame-reading thread is busy: the thread runs steps, loads or allocates."""
        stage = self._own.stage
        return self._stepping or stage == "loading" or (stage == "loaded" and self.pools is not None)

    def _lose(self, lost: GroupLost) -> None:
        """End the epoch, or the attempt to form an epoch, and log the loss.

        Sets ``lost``. Does nothing in phases ``lost`` and ``ended``.

        The next attempt begins at once unless the engine still has steps or the engine's rank is busy.
        """
        if self.phase in ("lost", "ended"):
            return
        log.error("%s", lost.message)
        self.phase, self.lost, self._judging = "lost", lost, None
        self._end_epoch()
        if not self._engaged:
            self._again()

    def _resume(self, lost: GroupLost) -> None:
        """Begin to form the group again, because the engine has dropped its steps.

        A repeated call is ignored.
        """
        if not self._stepping:  # a repeated ``Resume``
            return
        self._lose(lost)
        self._stepping = False
        self.tries.renew(self._now)
        self._again()

    def _again(self) -> None:
        """Use up one attempt: replace the ranks at fault and enter phase ``gathering``.

        End the group instead without an attempt left, without other ranks, or as long as no rank has been in
        any epoch (``Tries.fresh``): a failed first start is not repeated.
        """
        lost = self.lost
        assert lost is not None
        # Before the first epoch a refused configuration is an error of the user, not a loss.
        if self.alone or not self.tries.again():
            self._end(ConfigError(lost.message) if lost.refused and not self.tries.ran else lost)
            return
        for rank, member in self.members.items():
            # A rank with ``stopped`` set has left the epoch in order and can stay.
            if member.gone or (rank == lost.rank and not member.stopped):
                self._replace(rank, member.gone or lost.reason)
        self._gather()

    def _gather(self) -> None:
        """Enter phase ``gathering``: reset the epoch state of all ranks and their deadlines."""
        self.phase = "gathering"
        for member in self.members.values():
            member.since = self._now
            member.formed = member.stopped = member.bereft = False
        ready = [rank for rank, member in self.members.items() if member.ready]
        self._liveness.expect(ready, self._now, [rank for rank in self.members if rank not in ready])

    def _replace(self, rank: int, why: str) -> None:
        self._roster.replace(rank, why)
        self._liveness.forget(rank)

    def _end_epoch(self) -> None:
        """Abort the communicators of all ranks. Sends ``Abort`` once per epoch."""
        self._roster.actions.append(t.Abort())
        if self.aborted < self.epoch:
            self.aborted = self.epoch
            self._roster.tell_all(f.Abort(epoch=self.epoch))

    def _end(self, error: WeftError) -> None:
        self._end_epoch()
        self.phase, self.failed = "ended", error

    # ---- forming

    def _advance(self) -> None:
        """Move to the next phase when all ranks are ready for the next phase.

        Does nothing while the engine's rank connects.
        """
        members = self.members.values()
        if self._connecting is not None:
            return
        if self.phase == "gathering" and self._own.stage == "ready":
            if any(not member.ready or member.starting for member in members):
                return
            # Higher than the epoch of any rank under any earlier engine process.
            epoch = max(self.epoch, self._roster.seen) + 1
            if self.alone:
                self.epoch = epoch
                self._run()
            elif self._meeting is not None:
                self.phase, self._until = "meeting", self._now + self._load_s
                self._meeting.want(epoch)
            else:
                store = self._stores and f"{self._stores}/epoch{epoch}-{self._roster.welcome.incarnation}"
                self._connect(t.Connect(epoch, store, ()))
        elif self.phase == "forming" and not self._judging and all(member.formed for member in members):
            self._run()

    def _connect(self, connect: t.Connect) -> None:
        """Enter phase ``forming``: send ``Form`` to all ranks and connect the engine's rank."""
        self.phase, self.epoch = "forming", connect.epoch
        self.tries.fresh = self.tries.fresh and connect.epoch <= 0
        self._connecting = connect.epoch
        self.steps.clear()
        self._liveness.expect(self.members, self._now)
        for rank, member in self.members.items():
            assert member.peer is not None, "all ranks have connected"
            form = f.Form(epoch=connect.epoch, store=connect.store, weights=self._weights)
            self._roster.actions.append(t.SendFrame(member.peer, form, rank))
        self._roster.actions.append(connect)

    @property
    def _weights(self) -> int:
        """Version of the weights of the group."""
        updates = self._roster.welcome.updates
        return updates[-1].version if updates else 0

    def _run(self) -> None:
        """Enter phase ``running``. In an expert-parallel group, renew the lease."""
        self.phase, self.lost = "running", None
        self.tries.run()
        self._stepping = True
        if self._meeting is not None:
            self._roster.actions.append(t.Renew(self._meeting.begun(self.epoch)))

    def _deadlines(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """Yield (deadline, handler) of each wait in the current phase."""
        if self._judging is not None:
            yield self._judging[0], self._judged
        if self.phase == "gathering":
            for rank, member in self.members.items():
                # During ``Spawn`` the shell reports the end of the wait, so no deadline applies.
                if member.starting:
                    continue
                if member.peer is None:
                    patience = self._timeout if member.outlived else self._hello_s
                    yield member.since + patience, partial(self._gone, rank, late("connect", patience))
                elif self._roster.is_late(rank):
                    yield member.since + self._load_s, self._late(rank, "load", self._load_s)
        elif self.phase == "meeting":
            yield self._until, self._late(None, "meet all engines of the expert-parallel group", self._load_s)
        elif self.phase == "forming" and self._connecting is None and self._judging is None:
            for rank, member in self.members.items():
                if not member.formed:
                    yield self._until, self._late(rank, "form", self._timeout)
        elif self.phase == "running" and (missing := self.steps.late()) is not None:
            due, rank, step = missing
            yield due, self._late(rank, f"finish step {step}", COLLECTIVE * self._timeout)

    def _late(self, rank: int | None, what: str, patience: float) -> Callable[[], None]:
        return partial(self._lose, GroupLost(rank, late(what, patience)))

    def _judged(self) -> None:
        """End the wait for the cause of a failed collective. A single rank without a report is at fault."""
        assert self._judging is not None
        silent = [rank for rank, member in self.members.items() if not member.bereft]
        self._lose(GroupLost(silent[0] if len(silent) == 1 else None, self._judging[1]))
