"""A simulated head: the real ``HeadProtocol`` over the real ``Scheduler``, in a process of virtual time.

Its engine is one rank. A simulated group of ranks plugs in at ``Engine._launch`` and ``lose_group``: there a
step goes out and a result comes back, and there ranks are lost. What lies between (membership: who takes
part, since which epoch, and when all have reported) is a state machine beside the scheduler, driven by the
same events.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from weft.common.errors import EngineDead
from weft.config.resolved import KVConfig
from weft.config.sections import SchedulerSection
from weft.routing.head_protocol import HeadProtocol, Outgoing
from weft.scheduler import Scheduler
from weft.sim.check import VOCABULARY, TokenModel, Violation, require
from weft.sim.engine import depth_of
from weft.sim.network import Link
from weft.types import messages as m
from weft.types.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from weft.sim.cluster import Cluster

HEARTBEAT_S = 1.0
STEP_S = 0.02
"""Of a step; and as much again for every 8 tokens."""


class _Launched(NamedTuple):
    plan: StepPlan
    result: StepResult
    complete: float
    dies: bool


class Engine:
    """``EngineCore``'s loop on virtual time: one or two steps in flight."""

    def __init__(self, kv: KVConfig, section: SchedulerSection, model: TokenModel) -> None:
        self.kv = kv
        self.section = section
        self.model = model
        self.scheduler = Scheduler(kv, section, VOCABULARY)
        self.recovering = False
        """Whether ranks were lost, and no step is made until the group is whole."""
        self._depth = depth_of(section)
        self._in_flight: deque[_Launched] = deque()
        self._free_at = 0.0

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

    def launch(self, now: float) -> float | None:
        """Launches the next step, if any. Until when the oldest one is waited for; None if it is not."""
        plan = self.scheduler.plan(now) if len(self._in_flight) < self._depth else None
        if plan is not None:
            self._launch(plan, now)
        if self._in_flight and (plan is None or len(self._in_flight) >= self._depth):
            return self._in_flight[0].complete
        return None

    def commit_oldest(self, now: float) -> list[m.TokenEvent] | None:
        """What the oldest step made; None when the process died of it."""
        step = self._in_flight.popleft()
        if step.dies:
            return None
        return self.scheduler.commit(step.plan, step.result, now)

    def lose_group(self) -> int:
        """Ranks are lost, and the steps in flight with them. Returns how many those were."""
        lost = len(self._in_flight)
        self._in_flight.clear()
        self.recovering = True
        return lost

    def regroup(self) -> list[m.TokenEvent]:
        """The ranks are there again, with empty slot tables."""
        self.recovering = False
        self._free_at = 0.0
        return self.scheduler.requeue_all()

    def _launch(self, plan: StepPlan, now: float) -> None:
        result, dies = self.model.run(plan)
        seconds = STEP_S * (1.0 + plan.tokens / 8)
        self._free_at = max(now, self._free_at) + seconds
        self._in_flight.append(_Launched(plan, result, self._free_at, dies))


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
    """A process: it listens, loads, serves, and ends. The loop is that of ``weft.engine.engine_server``:
    between steps it takes what came, and while it waits for a step it takes nothing.
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
        self.engine = Engine(cluster.kv, cluster.section, TokenModel(cluster.row_errors, cluster.poison))
        kind = HeadProtocol if version > 1 else OldHeadProtocol
        self.protocol = kind(self.engine, cluster.rng.getrandbits(32))
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
        now = self.cluster.now
        self.cluster.at(now + listen, self, self._listen)
        self.cluster.at(now + listen + load, self, self._serve)

    def _listen(self) -> None:
        self.listens = True
        for link in self.connecting:
            self.cluster.connect(link)
        self.connecting.clear()

    def _serve(self) -> None:
        self.ready = True
        self.cluster.supervisor.serves(self)
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
            if self.engine.recovering:
                return
            if not self.engine.has_work():
                if self.protocol.draining:
                    cluster.supervisor.drained(self)
                break
            try:
                complete = self.engine.launch(cluster.now)
            except EngineDead as error:
                raise Violation(f"{self.name}: the engine failed by itself: {error.message}") from error
            if complete is not None:
                self._busy = True
                self._waits += 1
                cluster.at(max(complete, cluster.now), self, self._complete, self._waits)
                return
            if not self.engine.scheduler.in_flight:
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

    def lose_group(self) -> int:
        """Its ranks are lost. Returns how many steps were in flight."""
        self._busy = False
        lost = self.engine.lose_group()
        self._turn()
        return lost

    def regroup(self) -> None:
        """Its ranks are there again."""
        if self.engine.recovering:
            self._send(self.protocol.events(self.engine.regroup()))
            self._turn(worked=True)

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
