"""The step loop of one group: a scheduler and an executor, with one or two steps in flight.

    launch    plan, freeze, forward, sample
    commit    read, commit, learn
    _mask     for a constrained step: make the masks and sample, once all earlier steps have committed

Each step in flight has one plan. The plan is immutable from ``freeze`` to ``commit``. With two steps in
flight, step N + 1 is planned and launched before the tokens of step N are read:

    launch N+1 ──────────────┐
    read N, commit N         │ runs meanwhile
    (mask N+1)               │
    launch N+2 (knows N) ────┘

The clock and the executor are arguments. In an engine process the executor is the group of ranks
(``weft.engine.group``) and the clock is the machine's. In the simulators the executor computes nothing and
only advances virtual time. The module never imports torch.

Not thread-safe: one thread submits, steps and finishes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from weft.common.clock import Clock
from weft.common.errors import EngineDead
from weft.common.log import get_logger
from weft.engine.stage_times import StageTimes
from weft.group.types import GroupLost
from weft.kv.prefix_log import PrefixLog
from weft.scheduler.plan_builder import PlanBuilder
from weft.tracing.writer import SpanWriter
from weft.types.messages import EngineStats, Submit, TokenEvent
from weft.types.plan import StepPlan, StepResult, TokenMasks

if TYPE_CHECKING:
    from weft.engine.disagg.engine_transfers import EngineTransfers
    from weft.engine.event_sources import AwaitedSource
    from weft.engine.grammars import GrammarSource
    from weft.engine.step_scheduler import StepScheduler
    from weft.runner.wakeup_descriptor import WakeupDescriptor

log = get_logger(__name__)

GRAMMAR_S = 60.0
"""Maximum seconds that a sequence stays blocked on a grammar. The deadline of the compiler is shorter."""
STALLED_MS = 50
"""Maximum milliseconds of one wait on the sockets while the wake-up socket reports the end of the step."""
RECOVERY_POLL = 0.05
"""Seconds that one call of ``step`` waits for a group in recovery."""


class Launched(Protocol):
    """A launched step of an executor."""

    @property
    def plan(self) -> StepPlan: ...


H = TypeVar("H", bound=Launched)


class Executor(Protocol[H]):
    """Runs plans in the order of launch. ``weft.engine.group.GroupExecutor`` documents the methods.

    The defaults fit an executor without masks, with a group that recovers by itself or is never lost.
    """

    def forward(self, plan: StepPlan) -> H: ...

    def sample(self, handle: H, masks: TokenMasks | None = None) -> None:
        return None

    def read(self, handle: H) -> StepResult: ...

    def done(self, handle: H) -> bool:
        return True

    def check(self) -> None:
        return None

    def recover(self, lost: GroupLost) -> None:
        return None

    def recovered(self, wait: float) -> bool:
        return True


@dataclass(slots=True)
class InFlight(Generic[H]):
    """A step in flight."""

    handle: H
    began: float
    """Time at which planning began."""
    sampled: bool = False
    """True once sampling is launched."""


class EngineLoop(Generic[H]):
    """Takes ``Submit`` messages and makes ``TokenEvent`` messages."""

    def __init__(
        self,
        scheduler: StepScheduler,
        runner: Executor[H],
        clock: Clock,
        depth: int,
        spans: SpanWriter | None = None,
    ) -> None:
        """``depth``: maximum number of steps in flight. ``spans``: writer for traced sequences."""
        self.scheduler = scheduler
        self.runner = runner
        self.transfers: EngineTransfers | None = None
        """KV transfers with other groups. None unless the role is ``prefill`` or ``decode``."""
        self.embeddings: EngineTransfers | None = None
        """Transfers of image embeddings with other groups. None in a group without embedding transfers."""
        self.grammars: GrammarSource | None = None
        """Compiles grammars. A sequence stays blocked until the end of the compile."""
        self.sources: list[AwaitedSource] = []
        """Sources of external input."""
        self._clock = clock
        self._depth = depth
        self._stages = StageTimes(spans, clock.now)
        self._wakeup: WakeupDescriptor | None = None
        """Wake-up socket for step ends. None: ``step`` blocks until the end of the step instead."""
        self._in_flight: deque[InFlight[H]] = deque()
        """Steps in flight, oldest first."""
        self._stalled = False
        """True if the last ``step`` returned early because the oldest step was still running."""
        self._launching = False
        """True while a step is made. Stays True after an interrupt: then no further step is possible."""
        self._completed = -math.inf
        """Time at which the last result was read; minus infinity before the first result."""
        self._mask_seconds = 0.0
        self._lost_at: float | None = None
        """Time at which ranks were lost; None while the group runs steps."""

    # ---- sequences

    def submit(self, submit: Submit) -> list[TokenEvent]:
        """Queue a sequence. Return its events: empty, unless the emitted ids already end the sequence or the
        grammar is unusable.

        Raises InvalidRequest, ContextLength or Overloaded. The engine is unchanged after an error.
        """
        now = self._clock.now()
        if submit.grammar is None or self.grammars is None:
            events = self.scheduler.add(submit, now)
        else:
            events = self.scheduler.add(submit, now, until=now + GRAMMAR_S)
            events = events or self.grammars.open(submit, self.scheduler)
        self._stages.submitted(submit, now)
        self._open(submit)
        return self._recorded(events) + self._serve_requests()

    def _open(self, submit: Submit) -> None:
        """Open the transfers of an accepted sequence."""
        if self.transfers is not None and submit.transfer is not None:
            self.transfers.open(submit.transfer)
        if self.embeddings is not None:
            for item in submit.media:
                if item.transfer is not None:
                    self.embeddings.open(item.transfer)

    def finish(self, sequence: int) -> list[TokenEvent]:
        """End a sequence in any state and return its events. Idempotent; unknown ids are ignored.

        Consequences for transfers and for other sequences follow with the next ``poll``, because some callers
        handle the events of one sequence only.
        """
        if self.grammars is not None:
            self.grammars.forget(sequence)
        self._stages.forget(sequence)
        return self._recorded(self.scheduler.finish(sequence))

    def _recorded(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Record ``events`` in the stage times and return ``events`` unchanged. Every event leaves the engine
        here.
        """
        self._stages.record(events)
        return events

    def _serve_requests(self) -> list[TokenEvent]:
        """Let every source carry out the scheduler's requests. Return the events of the sources."""
        return self._recorded([event for source in self.sources for event in source.serve(self.scheduler)])

    def poll(self) -> list[TokenEvent]:
        """Handle new input of the sources and end sequences blocked past the time limit. Return the events.
        Does not block.
        """
        events = [event for source in self.sources for event in source.take(self.scheduler)]
        events += self.scheduler.expire(self._clock.now())
        return self._recorded(events) + self._serve_requests()

    @property
    def blocked(self) -> bool:
        """True if there is no work until external input arrives or a time limit passes."""
        return not self.has_work() and self.scheduler.blocked

    @property
    def transferring(self) -> bool:
        """True while a transfer to or from another group may still complete."""
        return any(transfers.moving for transfers in self.all_transfers)

    @property
    def all_transfers(self) -> list[EngineTransfers]:
        """The transfers with other groups: of KV and of image embeddings."""
        return [transfers for transfers in (self.transfers, self.embeddings) if transfers is not None]

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self.scheduler.steps

    def follow_prefixes(self) -> tuple[PrefixLog, int] | None:
        """Return the result of ``Scheduler.follow_prefixes``."""
        return self.scheduler.follow_prefixes()

    def stats(self) -> EngineStats:
        """Return counters and gauges of the scheduler, the transfers and the loop."""
        stats = self.scheduler.stats()
        moved, images = stats.transfers, stats.embedding_transfers
        return msgspec.structs.replace(
            stats,
            mask_seconds=self._mask_seconds,
            transfers=moved if self.transfers is None else self.transfers.stats(moved),
            embedding_transfers=images if self.embeddings is None else self.embeddings.stats(images),
            **self._stages.stats(),
        )

    # ---- loss and recovery

    def has_work(self) -> bool:
        """Return True if ``step`` has work."""
        return self._unfinished() or self.recovering

    def _unfinished(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work()

    @property
    def recovering(self) -> bool:
        """True while the group recovers from lost ranks. No step is launched during a recovery."""
        return self._lost_at is not None

    def check(self) -> None:
        """Check the ranks while there is nothing to compute. Does not block.

        After a loss of ranks, start the recovery. Raises EngineDead if the group has recovered too often.
        """
        if self.recovering:
            return
        try:
            self.runner.check()
        except GroupLost as lost:
            self._lose(lost)

    def _lose(self, lost: GroupLost) -> None:
        """Drop the steps in flight, fail the transfers and start the recovery of the group."""
        self._in_flight.clear()
        self._launching = self._stalled = False
        self._completed = -math.inf
        self._lost_at = self._clock.now()  # set first: an interrupt may come before the next line
        self.scheduler.lose()
        for transfers in self.all_transfers:
            transfers.lose()
        self.runner.recover(lost)

    def _recover(self, lost_at: float) -> list[TokenEvent]:
        """Return running sequences to the queue once the group runs again. Return the events."""
        if not self.runner.recovered(RECOVERY_POLL):
            return self._serve_requests()
        took = self._clock.now() - lost_at
        self._lost_at = None
        # `requeued` includes the sequences that end here. The log line shows the two numbers apart.
        before = self.scheduler.stats().requeued
        ended = self.scheduler.requeue_all()
        recomputed = self.scheduler.stats().requeued - before - len(ended)
        log.info(
            "the group recovered after %.1f s: %d sequences are recomputed, %d are given up",
            took,
            recomputed,
            len(ended),
        )
        for transfers in self.all_transfers:
            transfers.regain()
        return self._recorded(ended) + self._serve_requests()

    # ---- one step

    def step(self) -> list[TokenEvent]:
        """Launch the next step, if there is a plan, and commit the oldest step when the pipeline is full or
        there is no next step. Return the events.

        When ranks are lost, running sequences go back to the queue after the recovery, which later calls
        drive. Raises EngineDead, or an error of the device, when the group cannot continue.
        """
        if self._lost_at is not None:
            return self._recover(self._lost_at)
        events: list[TokenEvent] = []
        try:
            launched = self.launch(events)
            self._stalled = False
            if self.due(launched):
                # With a wake-up socket the caller sleeps on `sockets`. Without a wake-up socket `commit`
                # blocks here.
                self._stalled = self._wakeup is not None and not self.runner.done(self._in_flight[0].handle)
                if self._stalled:
                    self.runner.check()
                else:
                    self.commit(events)
            elif not launched and self.scheduler.in_flight:
                raise EngineDead("a step was planned and never launched")
        except GroupLost as lost:  # `events` keeps the commits from before the loss
            self._lose(lost)
            events += self._serve_requests()
        return events

    def launch(self, events: list[TokenEvent]) -> bool:
        """Plan and launch the next step, unless the pipeline is full. Append the events to ``events``.

        Return True if a step was launched.
        """
        if self._launching:
            raise EngineDead("a step was interrupted, and the engine cannot continue")
        self._mask()
        # Full here only after an interrupt ended the last wait early. Then the oldest step is read first.
        if len(self._in_flight) >= self._depth:
            return False
        self._launching = True
        began = self._clock.now()
        plan = self._plan(began)
        if plan is not None:
            self._launch(plan, began)
        self._launching = False
        events += self._serve_requests()
        return plan is not None

    def due(self, launched: bool) -> bool:
        """Return True if the oldest step must be committed, because no step can be launched before.

        ``launched``: the result of the last ``launch``.
        """
        return bool(self._in_flight) and (not launched or len(self._in_flight) >= self._depth)

    def wait_ms(self) -> int:
        """Return the milliseconds for which a loop with work may sleep on ``sockets`` before the next
        ``step``.
        """
        return STALLED_MS if self._stalled and not self.runner.done(self._in_flight[0].handle) else 0

    def _plan(self, now: float) -> StepPlan | None:
        """Return the frozen plan of the next step, or None when there is nothing to do."""
        builder = self._agree(self.scheduler.build(now))
        if builder is None:
            return None
        plan = self.scheduler.freeze(builder)
        self._stages.admitted(self.scheduler.admitted(plan), now, plan.tokens)
        return plan

    def _agree(self, builder: PlanBuilder | None) -> PlanBuilder | None:
        """Return the builder of the step to launch. A subclass sets fields, or replaces the builder."""
        return builder

    def _launch(self, plan: StepPlan, began: float) -> None:
        step = InFlight(self.runner.forward(plan), began)
        if not plan.constrained:
            self._sample(step)
        self._in_flight.append(step)
        self._mask()

    def _mask(self) -> None:
        """Build the masks of the oldest step in flight and sample the step, if the step is constrained and
        not sampled.

        All earlier steps have committed, so the grammar states are current. The forward pass runs meanwhile.

        INVARIANT: on return, the oldest step in flight is sampled. So no forward pass is launched behind an
        unsampled step (see ``weft.types.plan.TokenMasks``).
        """
        if not self._in_flight or (step := self._in_flight[0]).sampled:
            return
        # An interrupt in here leaves the flag set: see `_launching`.
        launching, self._launching = self._launching, True
        began = self._clock.now()
        masks = self.scheduler.masks(step.handle.plan)
        self._mask_seconds += self._clock.now() - began
        self._sample(step, masks)
        self._launching = launching

    def _sample(self, step: InFlight[H], masks: TokenMasks | None = None) -> None:
        self.runner.sample(step.handle, masks)
        step.sampled = True

    def commit(self, events: list[TokenEvent]) -> None:
        """Block until the oldest step has ended, commit the step and append the events to ``events``.

        The events are in ``events`` before masks are sent, because sending can raise GroupLost.
        """
        # Not popped yet: an interrupt of the wait must leave the step in flight.
        step = self._in_flight[0]
        try:
            result = self.runner.read(step.handle)
        except Exception:
            self._in_flight.popleft()
            raise
        self._in_flight.popleft()
        # A step launched behind another step starts when the earlier step ends.
        now = self._clock.now()
        seconds = now - max(step.began, self._completed)
        self._completed = now
        events += self._recorded(self.scheduler.commit(step.handle.plan, result, now))
        self._learn(step.handle, seconds)
        self._mask()
        events += self._serve_requests()

    def _learn(self, handle: H, seconds: float) -> None:
        """Report the device ``seconds`` of a committed step to the policies of the scheduler."""
        self.scheduler.observe(handle.plan, seconds)
