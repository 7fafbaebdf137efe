"""A simulated head: the real ``HeadProtocol`` over the real ``Scheduler``, in a process of virtual time.

Its group (``weft.sim.group``) has one rank or several. A step goes out at ``Engine._launch``, to all ranks,
and its result is committed when the group's ``Membership`` says that it counts; ``Engine.lose_group`` and
``Engine.regroup`` are the loss of an epoch and the beginning of the next one.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from weft.common.errors import EngineDead, WeftError
from weft.common.restarts import RestartBudget
from weft.config.resolved import KVConfig
from weft.config.sections import SchedulerSection
from weft.group.meeting import Meeting
from weft.kv.kinds import FullKind
from weft.routing.head_protocol import HeadProtocol, Outgoing
from weft.scheduler import Scheduler
from weft.sim.check import VOCABULARY, TokenModel, Violation, require
from weft.sim.engine import depth_of
from weft.sim.group import Group
from weft.sim.network import Link
from weft.sim.ranks import Replica, Work
from weft.types import messages as m
from weft.types.plan import AppendBlocks, AppendEach, StepPlan, StepResult

if TYPE_CHECKING:
    from weft.sim.cluster import Cluster

HEARTBEAT_S = 1.0
STEP_S = 0.02
"""Of a step; and as much again for every 8 tokens."""


class _Launched(NamedTuple):
    plan: StepPlan
    result: StepResult
    epoch: int
    complete: float
    """When it is, where the group is one rank."""
    dies: bool


class Engine:
    """``EngineCore``'s loop on virtual time: one or two steps in flight."""

    def __init__(self, kv: KVConfig, section: SchedulerSection, model: TokenModel) -> None:
        self.kv = kv
        self.section = section
        self.model = model
        self.group: Group | None = None
        """Once the process listens."""
        self.holds: Counter[int] = Counter()
        """Blocks that somebody outside may still write to."""
        self.held_over: set[int] = set()
        """Those of them that were on hold when the group was lost."""
        self.scheduler = Scheduler(kv, section, VOCABULARY)
        self.recovering = False
        """Whether ranks were lost, and no step is made until the group is whole."""
        self._depth = depth_of(section)
        self._in_flight: deque[_Launched] = deque()
        self._free_at = 0.0
        self._slots: dict[int, int] = {}
        """Slot -> key, from which this rank's checksums are made."""

    def submit(self, submit: m.Submit) -> list[m.TokenEvent]:
        return self.scheduler.add(submit, 0.0)

    def finish(self, sequence: int) -> list[m.TokenEvent]:
        return self.scheduler.finish(sequence)

    def has_work(self) -> bool:
        return self.recovering or bool(self._in_flight) or self.scheduler.has_work()

    def stats(self) -> m.HeadStats:
        return self.scheduler.stats()

    def welcome(self, incarnation: int) -> m.Welcome:
        """What a front must know of it."""
        return m.Welcome(
            versions=(m.OLDEST, m.VERSION),
            vocab_size=VOCABULARY,
            max_model_len=self.kv.max_model_len,
            max_num_seqs=self.section.max_num_seqs,
            num_blocks=tuple(pool.num_blocks for pool in self.kv.pools),
            incarnation=incarnation,
            block_size=self.kv.block_size,
        )

    def launch(self, now: float) -> _Launched | None:
        """Launches the next step, if any. The oldest one in flight, if that is waited for."""
        plan = self.scheduler.plan(now) if len(self._in_flight) < self._depth else None
        if plan is not None:
            self._launch(plan, now)
        if self._in_flight and (plan is None or len(self._in_flight) >= self._depth):
            return self._in_flight[0]
        return None

    def commit_oldest(self, now: float) -> list[m.TokenEvent] | None:
        """What the oldest step made; None when the process died of it."""
        step = self._in_flight.popleft()
        assert self.group is not None
        self.group.check_count(step.plan.step, step.epoch)
        if step.dies:
            return None
        return self.scheduler.commit(step.plan, step.result, now)

    def lose_group(self) -> int:
        """The epoch is lost, and the steps in flight with it. Returns how many those were."""
        lost = len(self._in_flight)
        self._in_flight.clear()
        self.recovering = True
        return lost

    def regroup(self) -> list[m.TokenEvent]:
        """An epoch runs again: all slots are empty."""
        self.recovering = False
        self._free_at = 0.0
        self.model.clear()
        self._slots.clear()
        self.held_over = set(self.holds)
        return self.scheduler.requeue_all()

    def hold(self, seconds: float, now: float) -> list[int]:
        """Puts the blocks of a running sequence on hold, as if somebody outside wrote to them. Returns them."""
        state = self.scheduler._state
        kind = state.caches.kinds[0]
        assert isinstance(kind, FullKind)
        blocks: list[int] = []
        for slot in state.order().tolist()[:1]:
            blocks = [block for block in kind._tables[slot].blocks if block]
        for block in blocks:
            self.scheduler.hold(0, block, now + seconds)
            self.holds[block] += 1
        return blocks

    def unhold(self, blocks: list[int]) -> None:
        """The other side of ``hold``."""
        self.holds.subtract(blocks)
        self.holds += Counter()
        self.held_over.intersection_update(self.holds)
        for block in blocks:
            self.scheduler.unhold(0, block)

    def _launch(self, plan: StepPlan, now: float) -> None:
        if self.held_over:
            self._check_blocks(plan)
        result, step, dies = self.model.run(plan)
        seconds = STEP_S * (1.0 + step.tokens / 8)
        self._free_at = max(now, self._free_at) + seconds
        assert self.group is not None
        epoch = self.group.membership.epoch
        self._in_flight.append(_Launched(plan, result, epoch, self._free_at, dies))
        if self.group.others:
            checksum = step.run(self._slots)
            self.group.launch(Work(epoch, plan.step, seconds, checksum, step.run))

    def _check_blocks(self, plan: StepPlan) -> None:
        """Raises Violation where ``plan`` gives a block to somebody that is on hold since before a loss."""
        for op in plan.ops:
            if isinstance(op, AppendBlocks | AppendEach):
                held = self.held_over.intersection(op.blocks.tolist())
                require(not held, f"step {plan.step} gives blocks {sorted(held)} away, which are on hold")


class OldHeadProtocol(HeadProtocol):
    """Of a head that speaks version 1 and nothing else."""

    def on(self, front: bytes, message: m.ToHead) -> Outgoing:
        if isinstance(message, m.Goodbye) or (isinstance(message, m.Submit) and message.attempt):
            raise Violation(f"a head of version 1 got {type(message).__name__} of version 2")
        if not isinstance(message, m.Hello):
            return super().on(front, message)
        require(message.versions[0] <= 1, "a front that speaks version 1 no more")
        answers = super().on(front, msgspec.structs.replace(message, versions=(1, 1)))
        return [
            (
                to,
                msgspec.structs.replace(answer, versions=(1, 1)) if isinstance(answer, m.Welcome) else answer,
            )
            for to, answer in answers
        ]


class HeadProcess:
    """A process: it listens, loads, serves, and ends. The loop is that of ``weft.engine.head``: between steps
    it takes what came, and while it waits for a step it takes nothing.
    """

    def __init__(self, cluster: Cluster, instance: str, number: int, version: int) -> None:
        self.cluster = cluster
        self.instance = instance
        self.version = version
        self.name = f"{instance}#{number}"
        self.alive = True
        self.stalled_until = 0.0
        self.listens = False
        self.ready = False
        self.replaced = False
        """Whether another one takes its place, or none."""
        self.slow = False
        """Whether it will not start in time."""
        self.incarnation = cluster.rng.getrandbits(32)
        self.replica: Replica = cluster.replicas[instance]
        self.domain_gone = False
        """Whether another head of its domain ended while it lived."""
        self._load_s = 0.0
        self.engine = Engine(cluster.kv, cluster.section, TokenModel(cluster.row_errors, cluster.poison))
        kind = HeadProtocol if version > 1 else OldHeadProtocol
        self.protocol = kind(self.engine, self.incarnation)
        self.links: dict[bytes, Link] = {}
        """Connection -> its link."""
        self.connecting: list[Link] = []
        """Links that wait for it to listen."""
        self._inbox: deque[tuple[bytes, m.ToHead]] = deque()
        self._waits = 0
        """Number of the step waited for, if ``_busy``; a new one for every wait."""
        self._busy = False
        self._heartbeat_due = False

    # -- life

    def start(self, listen: float, load: float) -> None:
        """It will listen after ``listen`` seconds, and serve ``load`` seconds later."""
        self._load_s = load
        self.cluster.at(self.cluster.now + listen, self, self._listen)

    @property
    def group(self) -> Group:
        """Once it listens."""
        assert self.engine.group is not None
        return self.engine.group

    @property
    def excused(self) -> bool:
        """Whether something happened to it, or to its ranks, for which it may not start in time."""
        group = self.engine.group
        troubled = group is not None and group.troubled
        return self.slow or not self.alive or (not self.ready and (troubled or self.domain_gone))

    def _listen(self) -> None:
        cluster = self.cluster
        self.listens = True
        for link in self.connecting:
            cluster.connect(link)
        self.connecting.clear()
        domain = cluster.instances[self.instance]
        meeting = None
        if domain:
            number = list(cluster.instances).index(self.instance)
            meeting = Meeting(number, f"store{self.name}", "", self.name)
        self.engine.group = Group(
            self,
            self.replica,
            self.name,
            load=self._load_s,
            meeting=meeting,
            leases=cluster.leases,
            budget=RestartBudget(cluster.rank_budget, 600.0),
            lag=cluster.lag,
        )
        self.engine.group.start()

    def _serve(self) -> None:
        self.ready = True
        self.cluster.at(self.cluster.now + HEARTBEAT_S, self, self._timer)
        self._turn()

    def fail(self, error: EngineDead) -> None:
        """The engine raised: every front hears of it, then the process ends."""
        self._send(self.protocol.failed(error))
        self.cluster.end_head(self, lingers=True)

    # -- what comes

    def receive(self, link: Link, message: m.ToHead) -> None:
        """A message arrived."""
        self._inbox.append((link.connection, message))
        if self.ready and not self._busy:
            self._turn()

    def forget(self, link: Link) -> None:
        """The connection is gone, as it notices now."""
        self.links.pop(link.connection, None)
        self.protocol.forget(link.connection)
        self.check()
        if self.ready and not self._busy:
            self._turn()

    # -- the loop

    def _turn(self, worked: bool = False) -> None:
        """``worked``: whether it was busy until now. Fronts hear at once that all is done."""
        cluster = self.cluster
        worked = worked or self.engine.has_work()
        while self.alive:
            while self._inbox:
                self._send(self.protocol.on(*self._inbox.popleft()))
            self.check()
            if self.protocol.stopped:
                cluster.stopped(self)
                return
            if self.engine.recovering or not self.group.running:
                return
            if not self.engine.has_work():
                if self.protocol.draining:
                    cluster.supervisor.drained(self)
                break
            try:
                step = self.engine.launch(cluster.now)
            except EngineDead as error:
                raise Violation(f"{self.name}: the engine failed by itself: {error.message}") from error
            if step is not None:
                self._busy = True
                self._waits += 1
                if self.group.others:
                    self.group.wait_for(step.plan.step)
                else:
                    cluster.at(max(step.complete, cluster.now), self, self._complete, self._waits)
                return
            if not self.engine.scheduler.in_flight and self.engine.has_work():
                raise Violation(f"{self.name}: work waits and nothing is planned")
        if worked or self._heartbeat_due:
            self._heartbeat()

    def _complete(self, number: int) -> None:
        """The step waited for is complete."""
        if number != self._waits or not self._busy:
            return
        self._busy = False
        try:
            events = self.engine.commit_oldest(self.cluster.now)
        except EngineDead as error:
            raise Violation(f"{self.name}: the engine failed by itself: {error.message}") from error
        if events is None:
            self.cluster.poisoned(self)
            return
        self._send(self.protocol.events(events, self.engine.scheduler.steps))
        if self._heartbeat_due:
            self._heartbeat()
        self._turn(worked=True)

    def _timer(self) -> None:
        self.cluster.at(self.cluster.now + HEARTBEAT_S, self, self._timer)
        if self._busy:
            self._heartbeat_due = True
        else:
            self._heartbeat()

    def _heartbeat(self) -> None:
        self._heartbeat_due = False
        self._send(self.protocol.heartbeats())

    def _send(self, outgoing: Outgoing) -> None:
        for connection, message in outgoing:
            link = self.links.get(connection)
            if link is not None:
                self.cluster.network.to_front(link, message)

    # -- what happens to it

    def group_lost(self) -> None:
        """See ``Owner``."""
        cluster = self.cluster
        self._busy = False
        lost = self.engine.lose_group()
        cluster.groups_lost += 1
        cluster.counts["steps lost with their ranks"] += lost
        cluster.note(self.name, "..", "", f"its epoch is lost, with {lost} steps")
        if self._heartbeat_due:
            self._heartbeat()
        self._turn()

    def group_runs(self) -> None:
        """See ``Owner``."""
        if not self.ready:
            self._serve()
        elif self.engine.recovering:
            self._send(self.protocol.events(self.engine.regroup()))
            if self.engine.held_over:
                self.cluster.count("blocks on hold over a loss", len(self.engine.held_over))
            self._turn(worked=True)

    def group_failed(self, error: WeftError) -> None:
        """See ``Owner``."""
        self.cluster.happened("group given up")
        if self.ready:
            self.fail(EngineDead(error.message))
        else:
            self.cluster.end_head(self)

    def step_counts(self) -> None:
        """See ``Owner``."""
        self.cluster.at(self.cluster.now, self, self._complete, self._waits)

    def hold(self, seconds: float) -> bool:
        """Blocks of a running sequence are on hold for so long. Whether there were any."""
        blocks = self.engine.hold(seconds, self.cluster.now)
        if blocks:
            self.cluster.note(self.name, "..", "", f"blocks {blocks} are on hold for {seconds:.3f} s")
            self.cluster.at(self.cluster.now + seconds, self, self._unhold, blocks)
        return bool(blocks)

    def _unhold(self, blocks: list[int]) -> None:
        self.engine.unhold(blocks)
        if self.ready and not self._busy:
            self._turn()

    def drain(self) -> None:
        """It takes nothing new, and ends when nothing is left."""
        self.protocol.draining = True
        if self.ready and not self._busy:
            self._turn()

    def evict(self) -> int | None:
        """Gives a sequence back to its front, if one that knows of it has any. Returns which."""
        for sequence, owner in self.protocol._owners.items():
            link = self.links.get(owner.front)
            if link is not None and link.version > 1:
                self.engine.finish(sequence)
                event = m.TokenEvent(sequence=sequence, finish="evicted")
                self._send(self.protocol.events([event]))
                return sequence
        return None

    def check(self) -> None:
        """Raises Violation unless all that is live here belongs to a front, and all that belongs is live."""
        live = self.engine.scheduler._state.live.keys()
        owned = self.protocol._owners.keys()
        if live != owned:
            raise Violation(f"{self.name}: live {sorted(live)}, owned by fronts {sorted(owned)}")
