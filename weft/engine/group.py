"""Executes the decisions of ``weft.group.membership``. All ranks of a group execute every step.

    forward(plan)    digest, one frame to every rank, then the local Runner
    sample(handle)   masks of a constrained step as another frame to every rank
    read(handle)     the local result, and every rank's outcome of the step before. Raises GroupLost if a rank
                     failed, does not answer, or sampled other tokens

The tokens of a step leave the engine before the outcomes of the other ranks are known. The outcomes are
checked before the tokens of the next step leave. A group of one rank sends no frames and computes no digest.

    the stepping thread      sends and receives frames, reads and writes leases
    the carrier thread       blocking work: ends and starts processes, connects communicators
    the watch thread         heartbeats, ended processes; aborts hung collectives
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor as Carrier
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from weft.common.clock import Clock, SystemClock
from weft.common.errors import EngineDead, known_error
from weft.common.log import get_logger
from weft.config.resolved import KVConfig
from weft.engine.disagg.group_transfers import GroupTransfers
from weft.engine.expert_group import ExpertGroup
from weft.engine.group_links import GroupLinks, Share
from weft.engine.ranks.executor import RankRunner, checksum, moves
from weft.engine.ranks.ranks import Ranks
from weft.engine.ranks.step_pixels import StepPixels
from weft.engine.ranks.watch import EngineWatch
from weft.engine.tiers.group_tier import GroupTier, make_group_tier
from weft.engine.weights.group_weights import GroupWeights
from weft.engine.weights.rank_weights import RankWeights
from weft.group import types as t
from weft.group.liveness import COLLECTIVE
from weft.group.membership import Membership
from weft.group.sizes import blocks_of, sized
from weft.group.types import GroupLost
from weft.kv.digest import SlotDigest
from weft.parallel.control import PeerGone
from weft.parallel.group_comm import CommLost
from weft.parallel.store import join_store
from weft.runner.graphs.graphs import DecodeGraphs
from weft.runner.step_handle import StepHandle
from weft.runner.wakeup_descriptor import WakeupDescriptor
from weft.speculation.base import Drafter
from weft.types import frames as f
from weft.types.plan import StepPlan, StepResult, TokenMasks
from weft.types.tiers import BlocksCopied
from weft.types.transfer import Endpoint
from weft.types.weights import WeightsReport, WeightsUpdate

log = get_logger(__name__)

CLOSE_S = 30.0
"""Maximum seconds for ``close`` to wait for the formation of an epoch."""
_TURN = 0.05
"""Seconds of one wait for frames. Between two waits the thread checks for errors of other threads."""

R = TypeVar("R")


class GroupExecutor:
    """The engine's side of a group. Used from one thread, which steps."""

    def __init__(
        self,
        membership: Membership,
        load: Callable[[], Share],
        links: GroupLinks,
        *,
        rank_timeout: float = 10.0,
        clock: Clock | None = None,
        carrier: Carrier | None = None,
    ) -> None:
        """Start the group and block until the first epoch runs.

        ``load`` loads the local share of the model, after all ranks have connected. ``links``: closed with
        the group, also after a failed start. ``rank_timeout``: seconds; all deadlines for ranks are multiples
        of ``rank_timeout``. ``carrier``: thread for blocking work (default: a new thread).

        Raises ConfigError for a rank with another configuration, or unable to load the model. Raises
        GroupLost when a rank does not start.
        """
        self.membership = membership
        """State machine of the group. Events are fed under the lock. Other reads need no lock, because the
        fields read only grow or are replaced as a whole.
        """
        self._links, self._timeout = links, rank_timeout
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._carrier = carrier or ThreadPoolExecutor(1, thread_name_prefix="weft-group")
        self._carried: Future[None] | None = None
        """Last action of the carrier; None before the first."""
        self._outbox: deque[t.SendFrame | t.Renew] = deque()
        """Frames and leases for the stepping thread to send."""
        self._inbox: deque[tuple[bytes, bytes]] = deque()
        """Received frames, not handled yet. A frame leaves after the handling, so that an interrupt loses no
        frame.
        """
        self._actions: deque[t.Action] = deque()
        """Decided actions, not executed yet. Kept here, so that an interrupt loses no action."""
        self._store: Any = None
        """Communicator store of the current epoch, referenced until the next epoch."""
        self.transfers: GroupTransfers | None = None
        """KV transfers of the ranks; None in a group without KV transfers."""
        self.embeddings: GroupTransfers | None = None
        """Embedding transfers of the ranks; None in a group without embedding transfers."""
        self.tier: GroupTier | None = None
        """KV tier of the ranks; None in a group without a tier."""
        self.weights: GroupWeights | None = None
        """Weights of the ranks; None for a runner whose weights can't change."""
        self._results: dict[int, StepResult] = {}
        """Results of steps completed on the local rank, until ``read`` returns the result."""
        self._pixels = StepPixels()
        links.resources.callback(links.mesh.close)
        self._watch: EngineWatch | None = None
        if links.heartbeats is not None:
            handlers = self._on_heartbeat, self._on_watch_check
            self._watch = EngineWatch(links.heartbeats, rank_timeout, *handlers)
            self._watch.start()
        try:
            self._start(load)
        except BaseException:
            self._end(dismiss=False)
            raise

    def _start(self, load: Callable[[], Share]) -> None:
        """Load the local share and form the first epoch.

        Sets ``_runner``, ``wakeup``, ``transfers`` and ``embeddings``. Blocks. Raises the errors of
        ``__init__``.
        """
        members = self.membership
        self._feed(t.Own("started"))
        self._until(lambda: members.welcomed)
        self._feed(t.Own("loading"))
        share = load()
        self._feed(t.Own("loaded", blocks_of(share.kv)))
        self._until(lambda: members.pools is not None)
        assert members.pools is not None
        # The smallest pool of all ranks counts: every rank must have the same block numbers.
        self._runner = share.runner(sized(share.kv, members.pools))
        self._links.resources.callback(self._runner.close)
        self.wakeup: WakeupDescriptor | None = getattr(self._runner, "wakeup", None)
        """Wake-up socket, signalled at the end of each step on the local rank; None where ``read`` blocks
        instead.
        """
        self._digest = SlotDigest(self.kv.num_slots, len(self.kv.pools))
        self.transfers = self._make_transfers("kv")
        self.embeddings = self._make_transfers("embeddings")
        self.tier = make_group_tier(
            self._runner, members.members, self._send_ready, lambda: self._turn(0), self._links.channel
        )
        local: RankWeights | None = getattr(self._runner, "weights", None)
        if local is not None:
            self.weights = GroupWeights(local, members.members, self._send_ready, self._choose, self._settled)
        self._feed(t.Own("ready"))
        self._until(lambda: members.phase == "running")

    def _make_transfers(self, cache: f.Cache) -> GroupTransfers | None:
        """Return the transfers of all ranks for ``cache``, or None if the local runner has none."""
        transfer, reports, local_endpoint = moves(self._runner, cache)
        if transfer is None or reports is None:
            return None
        members = self.membership.members
        numbers = {rank: number for number, rank in enumerate(sorted(members), 1)}

        def endpoints() -> list[Endpoint | None]:
            others = [members[rank] for rank in numbers]
            return [local_endpoint, *(one.endpoint if cache == "kv" else one.embeddings for one in others)]

        sockets = self._links.channel.sockets
        return GroupTransfers(transfer, reports, endpoints, numbers, self._send_ready, sockets, cache)

    def _choose(self, updates: tuple[WeightsUpdate, ...]) -> None:
        """Make ranks that start from now on read the weights of ``updates``."""
        self._feed(t.WeightsChosen(updates))

    def _settled(self, reported: Callable[[], bool]) -> None:
        """Block until ``reported()``, which may raise EngineDead. Raises GroupLost."""
        self._guard(lambda: self._wait(reported))

    def _send_ready(self, rank: int, data: bytes) -> bool:
        """Send a frame to a rank. Return False during the rank's start or load: such a rank takes no part in
        transfers."""
        member = self.membership.members[rank]
        if member.ready:
            self._send(member.peer, data, rank)
        return member.ready

    # ---- the interface of a Runner

    @property
    def runner(self) -> RankRunner:
        """Runner of this rank."""
        return self._runner

    @property
    def kv(self) -> KVConfig:
        return self._runner.kv

    @property
    def graphs(self) -> DecodeGraphs | None:
        return self._runner.graphs

    @property
    def drafter(self) -> Drafter | None:
        return self._runner.drafter

    @property
    def varying(self) -> tuple[str, ...]:
        return self._runner.varying

    def done(self, handle: StepHandle) -> bool:
        """Return True if ``read`` would not block."""
        steps, before = self.membership.steps, handle.plan.step - self.membership.lag
        return self._runner.done(handle) and steps.settled(before)

    @property
    def expert_group(self) -> ExpertGroup | None:
        """Expert-parallel group of the replica; None without a group."""
        return self._links.expert_group

    @property
    def processes(self) -> Ranks | None:
        """Worker processes on the local host; None without workers."""
        return self._links.processes

    def forward(self, plan: StepPlan) -> StepHandle:
        """Send the step to every rank and launch the local share. Return the handle of the step.

        Raises GroupLost. Raises EngineDead for a plan in conflict with the slot table; then no frame was
        sent. Also handles received frames.
        """
        self._check()
        members = self.membership.members
        if members:
            digest = self._digest.take(plan)
            # Handle received frames, to find a lost rank before the launch.
            self._turn(0)
            self._check()
            framed = self._pixels.framed(plan, members.values())
            epoch = self.membership.epoch
            self._broadcast(f.StepFrame(step=plan.step, epoch=epoch, plan=framed, digest=digest))
        return self._guard(lambda: self._runner.forward(plan))

    def sample(self, handle: StepHandle, masks: TokenMasks | None = None) -> None:
        """Launch the sampling of the step on the local rank. With ``masks``, send the masks to the other
        ranks first.

        The other ranks sample after the forward pass, a constrained step only with masks. Raises GroupLost.
        """
        if masks is not None and self.membership.members:
            self._check()
            self._broadcast(f.LateMasks(step=handle.plan.step, epoch=self.membership.epoch, masks=masks))
        self._guard(lambda: self._runner.sample(handle, masks))

    def _broadcast(self, frame: f.StepFrame | f.LateMasks) -> None:
        """Send ``frame`` to every other rank. Raises GroupLost if a rank has no connection."""
        data = f.encode(frame)
        for rank, member in self.membership.members.items():
            self._send(member.peer, data, rank)
        self._check()

    def read(self, handle: StepHandle) -> StepResult:
        """Block until the step has ended on the local rank, and on all ranks the step ``membership.lag``
        steps earlier. Return the result, once.

        A step without rows waits for all ranks where ``wakeup`` is None: no collective keeps the ranks
        together, and transfers may then write the freed blocks. Raises GroupLost, also when a rank's checksum
        differs. After an interrupted wait the call can be repeated.
        """
        step = handle.plan.step
        if not self.membership.members:
            return self._guard(lambda: self._runner.read(handle))
        if step not in self._results:
            self._results[step] = self._guard(lambda: self._runner.read(handle))
        if self.membership.steps.own < step:  # not yet reported, also if an interrupt came after the read
            self._feed(t.OwnOutcome(step, checksum(self._results[step])))
        self._wait(lambda: self.membership.counts(step))
        self._pixels.settled(step - self.membership.lag)
        # An encode group (with a wake-up socket) receives nothing from other groups.
        if not handle.plan.rows and self.wakeup is None:
            self.settle()
        return self._results.pop(step)

    def settle(self) -> None:
        """Block until every rank has reported the outcome of all steps read here. Raises GroupLost."""
        steps = self.membership.steps
        self._wait(lambda: steps.settled(steps.own))

    def check(self) -> None:
        """Check the other ranks while nothing is computed. Does not block. Raises GroupLost."""
        if not self.membership.alone:
            self._turn(0)
            self._check()

    # ---- loss and recovery

    def recover(self, lost: GroupLost) -> None:
        """Start to form the group again after GroupLost, with all slots empty. The caller has dropped the
        steps in flight.

        Raises EngineDead after too many recoveries.
        """
        self._results.clear()
        self._pixels.clear()
        self._feed(t.Resume(lost))
        if self.membership.failed is not None:
            raise self.membership.failed

    def recovered(self, wait: float) -> bool:
        """Return True if the group runs steps again; the slot digest is then empty.

        Block up to ``wait`` seconds for the new epoch.

        Raises EngineDead when the group cannot be formed, at the latest at the deadlines of ``Membership``.
        """
        until = self._clock.now() + wait
        while self.membership.phase != "running":
            self._resume_or_raise()
            if (left := until - self._clock.now()) <= 0:
                return False
            self._turn(min(left, _TURN))
        self._digest.clear()
        return True

    def close(self, leave: bool = False) -> None:
        """End the group in any phase. ``leave``: leave supervised and remote ranks to the next engine.

        A running group first waits for all outcomes. Errors of the ranks are logged, not raised.
        """
        processes = self._links.processes
        dismiss = not leave or processes is None or not processes.outlive
        try:
            if dismiss and self.membership.phase == "running":
                self.settle()
        except EngineDead as error:
            log.warning("error while closing: %s", error.message)
        self._end(dismiss, leave)

    def _end(self, dismiss: bool, leave: bool = False) -> None:
        """End all threads, connections and resources, however far the start has come.

        ``dismiss``: the ranks end as well (``leave``: local ranks only). Ranks that do not end wait for
        another engine. Blocks for up to ``CLOSE_S`` seconds while an epoch is being formed, then logs a
        warning and continues.
        """
        self._feed(t.Close(dismiss, leave))
        until = self._clock.now() + CLOSE_S
        while self._carried is not None and not wait([self._carried], 0.1).done:
            self._abort()  # repeatedly: a connection attempt may begin after an abort
            if self._clock.now() > until:
                log.warning("forming an epoch did not end in time")
                break
        self._flush()
        self._carrier.shutdown(wait=False, cancel_futures=True)
        if self._watch is not None:
            self._watch.close()
        self._links.resources.close()

    # ---- the stepping thread

    def _check(self) -> None:
        """Raise the error of a failed group, GroupLost after a loss, or EngineDead before the first epoch."""
        members = self.membership
        if (lost := members.failed or members.lost) is not None:
            raise lost
        if members.phase != "running":
            raise EngineDead("a step was planned before the group was formed")

    def _until(self, reached: Callable[[], bool]) -> None:
        """Handle frames until ``reached()`` is True. Blocks. Raises EngineDead once the group has failed."""
        while not reached():
            self._resume_or_raise()
            self._turn(_TURN)

    def _resume_or_raise(self) -> None:
        """Resume the formation of the group after another loss. Raises EngineDead once the group has failed.

        The stepping thread waits for the group and has no steps in flight. So the formation can resume at
        once.
        """
        if (lost := self.membership.unresumed) is not None:
            self._feed(t.Resume(lost))
        if self.membership.failed is not None:
            raise self.membership.failed

    def _wait(self, reported: Callable[[], bool]) -> None:
        """Block until ``reported()``, a report of the other ranks, is True. Raises GroupLost."""
        while not reported():
            self._check()
            self._turn(_TURN)

    def _guard(self, work: Callable[[], R]) -> R:
        """Return ``work()`` of the local rank. An error of ``work`` ends the epoch.

        Raises GroupLost with the rank at fault, or the error itself in a group of one rank.
        """
        members = self.membership
        if members.alone:
            return work()
        try:
            return work()
        except Exception as error:
            self._failed(members.epoch, error)
            while members.phase == "running":  # a failed collective: wait for the rank at fault to report
                self._turn(_TURN)
            raise (members.lost or members.failed or error) from error

    def _turn(self, wait: float) -> None:
        """Send queued frames and leases, and feed received frames to ``membership``.

        Block up to ``wait`` seconds for the first frame.

        An undecodable frame is fed as ``Garbled``. Reads the leases when due. Raises nothing: losses show in
        ``membership``.
        """
        self._flush()
        while True:
            if not self._inbox and (received := self._links.channel.receive(wait)) is not None:
                self._inbox.append(received)
            if not self._inbox:
                break
            wait = 0  # only the first receive may block
            # Peek, and pop after the event is fed: an interrupt must not lose the frame.
            peer, data = self._inbox[0]
            try:
                event: t.Event = t.FrameReceived(peer, self._pixels.check(f.decode_to_engine(data)))
            except f.FrameError as error:
                event = t.Garbled(peer, error)
            self._feed(event)
            self._inbox.popleft()
        leases = self._links.leases
        if leases is not None and self.membership.leases_due(self._clock.now()):
            self._feed(t.LeasesRead(tuple(leases.read())))
        self._feed(t.Read())
        self._flush()

    def _flush(self) -> None:
        """Send all queued frames and write all queued leases."""
        while self._outbox:
            action = self._outbox.popleft()
            if isinstance(action, t.SendFrame):
                self._send(action.peer, f.encode(action.frame), action.rank)
            elif self._links.leases is not None:
                self._links.leases.write(action.lease)

    def _send(self, peer: bytes | None, data: bytes, rank: int | None) -> None:
        """Send ``data`` to a peer.

        Without a connection (or with ``peer`` None), feed the loss of ``rank``; ignored if ``rank`` is None.
        """
        try:
            if peer is None:
                raise PeerGone("the rank has not connected")
            self._links.channel.send(peer, data)
        except PeerGone:
            if rank is not None:
                self._feed(t.Gone(rank, "the rank is not connected"))

    # ---- any thread

    def _feed(self, event: t.Event) -> None:
        """Feed ``event`` to ``membership`` and execute the actions. Safe from any thread.

        Aborts run at once. Frames and leases are queued for the stepping thread, reports go to the transfers,
        and process starts and connections go to the carrier.
        """
        with self._lock:
            self._actions.extend(self.membership.on(event, self._clock.now()))
            while self._actions:
                action = self._actions.popleft()
                if isinstance(action, t.Abort):
                    self._abort()
                elif isinstance(action, t.SendFrame | t.Renew):
                    self._outbox.append(action)
                elif isinstance(action, t.TellEngine):
                    self._deliver_report(action.frame)
                else:
                    self._carried = self._carrier.submit(self._run_blocking, action)

    def _deliver_report(self, frame: f.ReportToEngine) -> None:
        """Pass the report of a rank to the transfers, the KV tier or the weights."""
        if isinstance(frame, WeightsReport):
            if self.weights is not None:
                self.weights.report(frame)
            return
        if isinstance(frame, BlocksCopied):
            if self.tier is not None:
                self.tier.report(frame)
            return
        transfers = self.transfers if frame.cache == "kv" else self.embeddings
        if transfers is not None:
            transfers.report(frame)

    def _abort(self) -> None:
        """Abort the collectives of the group and of the expert-parallel group. Safe from any thread."""
        self._links.mesh.abort()
        if self._links.expert_group is not None:
            self._links.expert_group.abort()

    def _failed(self, epoch: int, error: Exception) -> None:
        """Feed an ``error`` of the local rank in ``epoch`` to ``membership``."""
        self._feed(t.OwnFailure(epoch, known_error(error).message, isinstance(error, CommLost)))

    # ---- the watch's thread

    def _on_heartbeat(self, heartbeat: f.RankHeartbeat) -> f.RankHeartbeat:
        """Feed a rank's heartbeat to ``membership`` and return the answer."""
        self._feed(t.FrameReceived(b"", heartbeat))
        return self.membership.heartbeat(heartbeat.peer)

    def _on_watch_check(self) -> None:
        """Feed the ends of local processes and a check of the heartbeat deadlines to ``membership``."""
        processes = self._links.processes
        with self._lock:  # under the lock: a process replaced by the carrier must not be reported as dead
            for rank, how in processes.dead() if processes is not None else ():
                self._feed(t.Gone(rank, how))
            self._feed(t.Read(heartbeats=True))

    # ---- blocking work, in the carrier's thread

    def _run_blocking(self, action: t.Spawn | t.Connect) -> None:
        """Execute a blocking action and feed the outcome (``Connected``, ``Spawned`` or an error).

        Never raises.

        Before a process is replaced, kill the old process and report the end to the transfers.
        """
        processes = self._links.processes
        try:
            if isinstance(action, t.Connect):
                self._connect(action)
            elif processes is not None:
                if action.anew:
                    processes.kill(action.rank)
                    for reports in (self.transfers, self.embeddings, self.tier, self.weights):
                        if reports is not None:
                            reports.ended(action.rank)
                self._feed(t.Spawned(action.rank, processes.spawn(action.rank)))
        except Exception as error:
            known = known_error(error)
            self._feed(t.Unable(known))

    def _connect(self, action: t.Connect) -> None:
        """Reset the slots of the local runner and connect the communicators for the epoch of ``action``.

        Feed ``Connected``, or the failure of the epoch. Blocks.
        """
        epoch, store, expert_group = action.epoch, action.store, self._links.expert_group
        patience = COLLECTIVE * self._timeout
        try:
            self._runner.reset()
            self._store = join_store(store, patience) if store else None
            self._links.mesh.connect(self._store, epoch, patience)
            if expert_group is not None:
                expert_group.connect(join_store(store, patience), epoch, patience, action.wakeups)
        except Exception as error:
            self._failed(epoch, error)
        else:
            self._feed(t.Connected(epoch))
