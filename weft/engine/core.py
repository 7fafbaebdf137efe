"""The engine of one group: a scheduler and an executor, with one or two steps in flight.

    _plan     the scheduler builds the step; balance, overlap and domain set fields; then freeze
    _launch   forward; sample
    _commit   read, commit, learn
    _mask     of a constrained step: masks and sample, once all earlier steps have committed

Each step in flight has one plan. The plan is immutable from ``seal`` to ``commit``. With two steps in flight,
step N + 1 is planned and launched before the tokens of step N are read:

    launch N+1 ──────────────┐
    read N, commit N         │ runs meanwhile
    (mask N+1)               │
    launch N+2 (knows N) ────┘

Not thread-safe: one thread submits, steps and finishes.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from weft.common.clock import Clock, SystemClock
from weft.common.errors import EngineDead
from weft.common.log import get_logger
from weft.config.fingerprint import fingerprint, tower_fingerprint
from weft.config.resolved import EngineConfig
from weft.engine.balance import Balance
from weft.engine.disagg.rooms import HeadRooms
from weft.engine.domain import Domain
from weft.engine.grammars import AWAIT_S as GRAMMAR_S
from weft.engine.grammars import GrammarSource, ModelGrammars
from weft.engine.group import GroupExecutor
from weft.engine.room_start import make_embeddings, make_rooms
from weft.engine.sources import sources_of
from weft.engine.stage_times import StageTimes
from weft.engine.start import start_executor
from weft.engine.step_scheduler import make_scheduler
from weft.group.types import GroupLost
from weft.kv.prefix_log import PrefixLog
from weft.overlap.policy import OverlapPolicy, mode_of
from weft.runner.doorbell import Doorbell
from weft.runner.step_handle import StepHandle
from weft.tracing.writer import SpanWriter
from weft.types.messages import OLDEST, VERSION, HeadStats, Submit, TokenEvent, Welcome
from weft.types.plan import StepPlan, TokenMasks

log = get_logger(__name__)

STALLED_MS = 50
"""Maximum milliseconds of one wait on the sockets while the wake-up socket reports the end of the step."""
RECOVERY_POLL = 0.05
"""Seconds that one call of ``step`` waits for a group in recovery."""


class EngineCore:
    """The engine: takes ``Submit`` messages and makes ``TokenEvent`` messages."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: bool = True,
        clock: Clock | None = None,
        runner: GroupExecutor | None = None,
        domain: Domain | None = None,
        spans: SpanWriter | None = None,
        grammars: GrammarSource | None = None,
    ) -> None:
        """Load the model, unless a ``runner`` is given, and start the scheduler and the sources.

        ``progress``: show a progress bar on stderr. ``domain``: the expert-parallel group (default: the
        runner's). ``spans``: writer for traced sequences, closed by ``close``. ``grammars``: default: the
        model tokenizer's.

        Raises ConfigError for an unusable configuration.
        """
        self.config = config
        self._clock = clock or SystemClock()
        self._fingerprint = "" if config.transfer.role in ("unified", "encode") else fingerprint(config)
        self._tower = tower_fingerprint(config)
        self.runner = runner or start_executor(config, progress=progress)
        self.scheduler = make_scheduler(config, self.runner.kv)
        self.domain = domain or self.runner.domain
        rows = config.transfer.role != "encode"
        self.overlap = OverlapPolicy(mode_of(config.parallel if rows else None, config.device))
        """Decides which steps run in micro-batches."""
        self.balance = Balance(config.parallel.eplb_interval)
        """Decides before which steps experts move between ranks."""
        self.incarnation = secrets.randbits(64)
        """Random 64-bit number of the engine. Distinguishes restarts for the peers of transfers."""
        # `make_rooms` needs the ranks, so the runner is loaded before.
        self.rooms = make_rooms(config, self.runner, self.incarnation, self._clock)
        """KV transfers with other groups. None unless the role is ``prefill`` or ``decode``."""
        self.embeddings = make_embeddings(config, self.runner, self.incarnation, self._clock)
        """Transfers of image embeddings with other groups. None in a group without embedding transfers."""
        self._stages = StageTimes(spans, self._clock.now)
        self._stages.follow(rooms.tally for rooms in self._all_rooms)
        self.grammars = grammars or GrammarSource(lambda: ModelGrammars(config))
        """Compiles grammars. A sequence stays blocked until the end of the compile."""
        rings = config.transfer.role == "prefill" and config.device == "cpu" and self.domain is None
        self._bell = self.runner.bell or (Doorbell() if rings else None)
        """Wake-up socket for step ends, or None. A prefill group on a CPU handles transfers during a step."""
        self.sources = sources_of(self.grammars, self.rooms, self.embeddings, self._bell)
        """Sources of external input, complete before a loop starts: a loop reads ``sockets`` once."""
        self._depth = config.scheduler.steps_in_flight
        self._in_flight: deque[tuple[StepHandle, float]] = deque()
        """Steps in flight, oldest first, each with the start time of its planning."""
        self._stalled = False
        """True if the last ``step`` returned early because the oldest step was still running."""
        self._launching = False
        """True while a step is made. Stays True after an interrupt: then no further step is possible."""
        self._completed = -math.inf
        """Time at which the last result was read; minus infinity before the first result."""
        self._mask_seconds = self._encode_seconds = 0.0
        self._lost_at: float | None = None
        """Time at which ranks were lost; None while the group runs steps."""

    @property
    def deterministic(self) -> bool:
        """True if the logits of a sequence are bitwise invariant: batch, chunks, cache hits, preemptions and
        steps in flight do not change one bit. True with --deterministic, and wherever every operation is
        invariant.
        """
        return not self.runner.varying

    def describe_determinism(self) -> str:
        """Return ``deterministic: yes``, or ``deterministic: no, by`` and the names of the varying
        operations.
        """
        varying = self.runner.varying
        return f"deterministic: no, by {', '.join(varying)}" if varying else "deterministic: yes"

    def describe_speculation(self) -> str | None:
        """Return a sentence with the share of accepted drafts, overall and by draft position; None without
        drafts.
        """
        stats = self.scheduler.stats()
        verified = sum(stats.drafts)
        accepted = sum(stats.drafts_accepted)
        if not verified:
            return None
        places = zip(stats.drafts_accepted, stats.drafts, strict=True)
        shares = ", ".join(f"{right / all_:.0%}" for right, all_ in places if all_)
        return f"drafts: {accepted} of {verified} accepted; by position {shares}"

    def submit(self, submit: Submit) -> list[TokenEvent]:
        """Queue a sequence, start its grammar compile and register its transfers.

        Return the events, which may belong to other sequences and transfers, too.

        Among the events is the end of the sequence if the emitted ids already end the sequence or the grammar
        is unusable. Raises InvalidRequest, ContextLength or Overloaded. The engine is unchanged after an
        error.
        """
        now = self._clock.now()
        if submit.grammar is None:
            events = self.scheduler.add(submit, now)
        else:
            events = self.scheduler.add(submit, now, until=now + GRAMMAR_S)
            events = events or self.grammars.open(submit, self.scheduler)
        self._stages.submitted(submit, now)
        if self.rooms is not None and submit.room is not None:
            self.rooms.open(submit.room)
        if self.embeddings is not None:
            for item in submit.media:
                if item.room is not None:
                    self.embeddings.open(item.room)
        return self._told(events + self._asked())

    def finish(self, sequence: int) -> list[TokenEvent]:
        """End a sequence in any state and return its events. Idempotent; unknown ids are ignored.

        Consequences for transfers and for other sequences follow with the next ``hear``, because some callers
        handle the events of one sequence only.
        """
        self.grammars.forget(sequence)
        self._stages.forget(sequence)
        return self._told(self.scheduler.finish(sequence))

    def _told(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Record ``events`` in the stage times and return ``events`` unchanged. Every event leaves the engine
        here.
        """
        self._stages.told(events)
        return events

    def _asked(self) -> list[TokenEvent]:
        """Let every source carry out the scheduler's requests.

        Return the events of the sources. Does not block.
        """
        return [event for source in self.sources for event in source.asked(self.scheduler)]

    @property
    def sockets(self) -> Sequence[Any]:
        """Sockets and descriptors to poll while there is no work. Replicas of the expert-parallel group and
        the sources wake the engine through these sockets.
        """
        domain = () if self.domain is None else self.domain.sockets
        return [*domain, *(socket for source in self.sources for socket in source.sockets)]

    def hear(self) -> list[TokenEvent]:
        """Handle new input of the sources and end sequences blocked past the time limit. Return the events.
        Does not block.
        """
        events = [event for source in self.sources for event in source.take(self.scheduler)]
        expired = self.scheduler.expire(self._clock.now())
        return self._told(events + expired + self._asked())

    @property
    def awaiting(self) -> bool:
        """True if there is no work until external input arrives or a time limit passes."""
        return not self.has_work() and self.scheduler.awaiting

    @property
    def transferring(self) -> bool:
        """True while a transfer to or from another group may still complete."""
        return any(rooms.moving for rooms in self._all_rooms)

    @property
    def _all_rooms(self) -> list[HeadRooms]:
        return [rooms for rooms in (self.rooms, self.embeddings) if rooms is not None]

    def sleep(self, seconds: float) -> None:
        """Block until a socket of ``sockets`` is readable, at most for ``seconds``.

        Does not read the sockets.
        """
        if not self.sockets:  # zmq returns at once if no socket is registered
            time.sleep(seconds)
            return
        poller = zmq.Poller()
        for socket in self.sockets:
            poller.register(socket, zmq.POLLIN)
        poller.poll(max(round(seconds * 1e3), 1))

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self.scheduler.steps

    def has_work(self) -> bool:
        """Return True if ``step`` has work. A replica of an expert-parallel group also steps for the other
        replicas.
        """
        if self._unfinished() or self.recovering:
            return True
        return self.domain is not None and self.domain.awake

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

    def step(self) -> list[TokenEvent]:
        """Launch the next step, if there is a plan, and commit the oldest step when the pipeline is full or
        there is no next step. Return the events, of sources as well; empty when nothing happened.

        With a wake-up socket the call does not wait for the oldest step: see ``wait_ms``. When ranks are
        lost, running sequences go back to the queue after the recovery, which is logged. Later calls drive
        the recovery, and block up to ``RECOVERY_POLL`` seconds each. Raises EngineDead, or an error of the
        device, when the group cannot continue.
        """
        if self._lost_at is not None:
            if self.runner.recovered(RECOVERY_POLL):
                took = self._clock.now() - self._lost_at
                self._lost_at = None
                # `requeued` counts the sequences given up, too; the log line shows the two numbers apart.
                before = self.scheduler.stats().requeued
                given_up = self.scheduler.requeue_all()
                again = self.scheduler.stats().requeued - before - len(given_up)
                log.info(
                    "the group recovered after %.1f s: %d sequences are recomputed, %d are given up",
                    took,
                    again,
                    len(given_up),
                )
                for rooms in self._all_rooms:
                    rooms.regain()
                return self._told(given_up + self._asked())
            return self._told(self._asked())
        events: list[TokenEvent] = []
        try:
            self._step(events)
        except GroupLost as lost:  # `events` keeps the commits from before the loss
            self._lose(lost)
            events += self._asked()
        return self._told(events)

    def _lose(self, lost: GroupLost) -> None:
        """Drop the steps in flight, fail the transfers and start the recovery of the group.

        Sets ``recovering``. Raises EngineDead if the group has recovered too often.
        """
        self._in_flight.clear()
        self._launching = self._stalled = False
        self._completed = -math.inf
        self._lost_at = self._clock.now()  # set first: an interrupt may come before the next line
        self.scheduler.lose()
        for rooms in self._all_rooms:
            rooms.lose()
        self.runner.recover(lost)

    def _step(self, events: list[TokenEvent]) -> None:
        """Run one step and append the events to ``events``. An exception then loses no committed event.

        Set ``_stalled`` instead of a commit if the oldest step still runs and a wake-up socket will report
        the end. Raises GroupLost, and EngineDead after an interrupted step.
        """
        if self._launching:
            raise EngineDead("a step was interrupted, and the engine can't go on")
        self._mask()
        plan = None
        # Full only after an interrupt cut the last wait short: then read first.
        if len(self._in_flight) < self._depth:
            self._launching = True
            began = self._clock.now()
            plan = self._plan(began)
            if plan is not None:
                self._launch(plan, began)
            self._launching = False
            events += self._asked()
        self._stalled = False
        if self._in_flight and (plan is None or len(self._in_flight) >= self._depth):
            # With a wake-up socket the caller sleeps on `sockets`. Without a wake-up socket `_commit` blocks
            # here.
            self._stalled = self._bell is not None and not self.runner.done(self._in_flight[0][0])
            if self._stalled:
                self.runner.check()
            else:
                self._commit(events)
        elif plan is None and self.scheduler.in_flight:
            raise EngineDead("a step was planned and never launched")

    def wait_ms(self) -> int:
        """Return the milliseconds for which a loop with work may sleep on ``sockets`` before the next
        ``step``. 0 unless the last ``step`` returned early and the oldest step still runs.
        """
        return STALLED_MS if self._stalled and not self.runner.done(self._in_flight[0][0]) else 0

    def _plan(self, now: float) -> StepPlan | None:
        """Return the frozen plan of the next step, or None when there is nothing to do.

        The plan has slots and blocks reserved in the scheduler. Records the admissions in the stage times. In
        an expert-parallel group, blocks until all replicas have voted. Raises GroupLost.
        """
        builder = self.scheduler.build(now)
        if builder is not None:
            self.balance.ask(builder)
            self.overlap.ask(builder)
        # All replicas of an expert-parallel group must launch the same step. `settle` may replace an absent
        # builder by an idle step, or hold the local builder back.
        if self.domain is not None:
            builder = self.domain.settle(builder, self._unfinished(), self.scheduler.idle)
        plan = None if builder is None else self.scheduler.seal(builder)
        if plan is not None:
            self._stages.admitted(self.scheduler.admitted(plan), now)
        return plan

    def _launch(self, plan: StepPlan, began: float) -> None:
        """Launch the plan's forward pass, and its sampling unless masks are due.

        Append the step to the steps in flight, with ``began``, the start of its planning. Raises GroupLost.
        """
        self.balance.launched(plan)
        handle = self.runner.forward(plan)
        if not plan.constrained:
            self._sample(handle)
        self._in_flight.append((handle, began))
        self._mask()

    def _mask(self) -> None:
        """Build the masks of the oldest step in flight and sample the step, if the step is constrained and
        not sampled.

        All earlier steps have committed, so the grammar states are current. The forward pass runs meanwhile.

        INVARIANT: on return, the oldest step in flight is sampled. So no forward pass is launched behind an
        unsampled step (see ``weft.types.plan.TokenMasks``).
        """
        if not self._in_flight or not (handle := self._in_flight[0][0]).plan.constrained:
            return
        if handle.sampled is not None:
            return
        # An interrupt in here leaves the flag set: see `_launching`.
        launching, self._launching = self._launching, True
        began = self._clock.now()
        masks = self.scheduler.masks(handle.plan)
        self._mask_seconds += self._clock.now() - began
        self._sample(handle, masks)
        self._launching = launching

    def _sample(self, handle: StepHandle, masks: TokenMasks | None = None) -> None:
        """Launch the sampling of a step.

        Ring ``_bell`` at the end, unless the runner rings the same socket itself.
        """
        self.runner.sample(handle, masks)
        bell = self._bell
        if bell is not None and bell is not self.runner.bell and handle.sampled is not None:
            handle.sampled.add_done_callback(lambda _: bell.ring())

    def _commit(self, events: list[TokenEvent]) -> None:
        """Block until the oldest step has ended, commit the step and append the events to ``events``.

        Cost model and overlap policy learn from the step's time. The events are in ``events`` before masks
        are sent, because sending can raise GroupLost. An error of the read drops the step; an interrupt
        leaves the step in flight.
        """
        # Not popped yet: an interrupt of the wait must leave the step in flight.
        handle, began = self._in_flight[0]
        try:
            result = self.runner.read(handle)
        except Exception:
            self._in_flight.popleft()
            raise
        self._in_flight.popleft()
        # A step launched behind another step starts when the earlier step ends.
        now = self._clock.now()
        seconds = now - max(began, self._completed)
        self._completed = now
        events += self.scheduler.commit(handle.plan, result, now)
        self._encode_seconds += handle.encode_seconds
        unlike = handle.uncaptured or handle.encode_seconds > 0  # time not explained by the step's tokens
        self.scheduler.observe(handle.plan, seconds, unlike)
        self.overlap.observe(handle.plan, handle.times)
        self._mask()
        events += self._asked()

    def stats(self) -> HeadStats:
        """Return counters and gauges of the scheduler, the transfers, the grammars and overlap."""
        stats = self.scheduler.stats()
        images = None if self.embeddings is None else self.embeddings.stats(stats.embedding_transfers)
        return msgspec.structs.replace(
            stats,
            mask_seconds=self._mask_seconds,
            encode_seconds=self._encode_seconds,
            grammars_compiled=self.grammars.compiled,
            transfers=None if self.rooms is None else self.rooms.stats(stats.transfers),
            embedding_transfers=images,
            overlapped_steps=self.overlap.steps,
            communication_seconds=self.overlap.communication,
            communication_hidden_seconds=self.overlap.hidden,
            queue_times=self._stages.queue,
            prefill_times=self._stages.prefill,
        )

    def welcome(self, incarnation: int) -> Welcome:
        """Return the ``Welcome`` message, a description of the engine for API servers.

        ``incarnation`` is passed on.
        """
        kv = self.runner.kv
        return Welcome(
            versions=(OLDEST, VERSION),
            vocab_size=self.config.spec.vocab_size,
            max_model_len=kv.max_model_len,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            num_blocks=tuple(pool.num_blocks for pool in kv.pools),
            incarnation=incarnation,
            deterministic=self.deterministic,
            block_size=kv.block_size,
            role=self.config.transfer.role,
            fingerprint=self._fingerprint,
            rooms="" if self.rooms is None else self.rooms.address,
            embeddings="" if self.embeddings is None else self.embeddings.address,
            tower=kv.media is not None and kv.media.tower,
            tower_fingerprint=self._tower,
        )

    def follow_prefixes(self) -> tuple[PrefixLog, int] | None:
        """Return the result of ``Scheduler.follow_prefixes``."""
        return self.scheduler.follow_prefixes()

    def close(self, failed: bool = False) -> None:
        """Wait for the steps in flight, drop the results, and release the ranks, the transfers and the trace.

        Logs the shares of accepted drafts and of overlap. Errors of steps in flight are logged, not raised.
        ``failed``: another engine will take over the supervised ranks, so leave the ranks running.
        """
        if (report := self.describe_speculation()) is not None:
            log.info("%s", report)
        if (report := self.overlap.describe()) is not None:
            log.info("%s", report)
        self.grammars.close()
        # Transfers end before the ranks: a transfer uses the memory of the ranks.
        for rooms in self._all_rooms:
            rooms.close()
        while self._in_flight:
            try:
                self.runner.read(self._in_flight.popleft()[0])
            except Exception as error:
                log.warning("a step in flight failed while closing: %s", error)
        self.runner.close(leave=failed)
        if self._bell is not None:
            self._bell.close()
        if self.domain is not None:
            self.domain.close()
        self._stages.close()
