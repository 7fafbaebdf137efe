"""The engine of one group: scheduler and executor, with one or two steps in flight.

    _plan     the scheduler builds the step; balance, overlap and domain set their fields; it is sealed once
    _launch   forward; sample
    _commit   read, commit, learn
    _mask     of a constrained step: masks and sample, once all before it have committed

What is in flight is what ran: one immutable plan, from ``seal`` to ``commit``. With two steps in flight, step
N + 1 is planned and launched before step N's tokens are read:

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
from weft.engine.domain import Domain
from weft.engine.grammars import AWAIT_S as GRAMMAR_S
from weft.engine.grammars import GrammarSource, ModelGrammars
from weft.engine.group import GroupExecutor
from weft.engine.room_start import make_embeddings, make_rooms
from weft.engine.rooms import HeadRooms
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
"""Of one wait for a step whose end is told."""
RECOVERY_POLL = 0.05
"""Seconds that a ``step`` waits for a group that is being formed anew."""


class EngineCore:
    """Takes Submits, makes TokenEvents."""

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
        """Loads the model (with a progress bar on stderr if ``progress``) unless a ``runner`` is given.

        ``domain``: where other replicas have a part in every step; by default what ``config`` says.
        ``spans``: where traced sequences are written to; closed with the engine. ``grammars``: by default
        those of the model's tokenizer.

        Raises ConfigError for anything that cannot be served as configured.
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
        """Which steps are computed in micro-batches."""
        self.balance = Balance(config.parallel.eplb_interval)
        """At which steps experts move."""
        self.incarnation = secrets.randbits(64)
        """Of this engine: no other has it."""
        self.rooms = make_rooms(config, self.runner, self.incarnation, self._clock)
        """Transfers to or from other groups; None in a group that does everything itself."""
        self.embeddings = make_embeddings(config, self.runner, self.incarnation, self._clock)
        """Likewise of embeddings of images; None in a group that neither sends nor takes any."""
        self._stages = StageTimes(spans, self._clock.now)
        self._stages.follow(rooms.tally for rooms in self._all_rooms)
        self.grammars = grammars or GrammarSource(lambda: ModelGrammars(config))
        """Grammars of sequences, until they are compiled."""
        rings = config.transfer.role == "prefill" and config.device == "cpu" and self.domain is None
        self._bell = self.runner.bell or (Doorbell() if rings else None)
        """Rung at the end of a step, for a group that prefills: until then it takes in messages of rooms."""
        self.sources = sources_of(self.grammars, self.rooms, self.embeddings, self._bell)
        """All of them are there before a loop begins, as it asks for ``sockets`` once."""
        self._depth = config.scheduler.steps_in_flight
        self._in_flight: deque[tuple[StepHandle, float]] = deque()
        """Steps in flight, and when the planning of each began."""
        self._stalled = False
        """Whether the last ``step`` could only have waited for the device."""
        self._launching = False
        """Whether a step is being made; one that an interrupt cut short stays so, and none can follow."""
        self._completed = -math.inf
        """When the last result was read."""
        self._mask_seconds = self._encode_seconds = 0.0
        self._lost_at: float | None = None
        """When ranks were lost; None while the group takes steps."""

    @property
    def deterministic(self) -> bool:
        """Whether a sequence's logits are bitwise equal whatever its batch, chunks, cache hits, preemptions
        and steps in flight are (E1): always with --deterministic, else where every operation is invariant.
        """
        return not self.runner.varying

    def describe_determinism(self) -> str:
        """``deterministic: yes``, or no and because of what."""
        varying = self.runner.varying
        return f"deterministic: no, by {', '.join(varying)}" if varying else "deterministic: yes"

    def describe_speculation(self) -> str | None:
        """How many drafts were accepted so far, in words; None before the first."""
        stats = self.scheduler.stats()
        verified = sum(stats.drafts)
        accepted = sum(stats.drafts_accepted)
        if not verified:
            return None
        places = zip(stats.drafts_accepted, stats.drafts, strict=True)
        shares = ", ".join(f"{right / all_:.0%}" for right, all_ in places if all_)
        return f"drafts: {accepted} of {verified} accepted; by place {shares}"

    def submit(self, submit: Submit) -> list[TokenEvent]:
        """Queues a sequence. An event means that its emitted ids had ended it already.

        Raises InvalidRequest, ContextLength or Overloaded; then nothing changed.
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
        """Ends a sequence wherever it is. Idempotent; unknown ids are fine. What follows for its room, and
        may for others, comes with the next ``hear``: here callers may care for this sequence alone.
        """
        self.grammars.forget(sequence)
        self._stages.forget(sequence)
        return self._told(self.scheduler.finish(sequence))

    def _told(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """``events``, which leave the engine."""
        self._stages.told(events)
        return events

    def _asked(self) -> list[TokenEvent]:
        """Whatever the scheduler asks of ``sources`` is carried out."""
        return [event for source in self.sources for event in source.asked(self.scheduler)]

    @property
    def sockets(self) -> Sequence[Any]:
        """To sleep on while there is no work: replicas ring there, and sources speak."""
        domain = () if self.domain is None else self.domain.sockets
        return [*domain, *(socket for source in self.sources for socket in source.sockets)]

    def hear(self) -> list[TokenEvent]:
        """Takes in what came from ``sources``, and ends what awaited it for too long. Does not wait."""
        events = [event for source in self.sources for event in source.take(self.scheduler)]
        expired = self.scheduler.expire(self._clock.now())
        return self._told(events + expired + self._asked())

    @property
    def awaiting(self) -> bool:
        """Whether there is nothing to do before something comes from outside, or is late."""
        return not self.has_work() and self.scheduler.awaiting

    @property
    def transferring(self) -> bool:
        """Whether other groups may still take what this one has computed."""
        return any(rooms.moving for rooms in self._all_rooms)

    @property
    def _all_rooms(self) -> list[HeadRooms]:
        return [rooms for rooms in (self.rooms, self.embeddings) if rooms is not None]

    def sleep(self, seconds: float) -> None:
        """Waits until something may have come from outside, or for ``seconds``."""
        if not self.sockets:  # zmq would not wait
            time.sleep(seconds)
            return
        poller = zmq.Poller()
        for socket in self.sockets:
            poller.register(socket, zmq.POLLIN)
        poller.poll(max(round(seconds * 1e3), 1))

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self.scheduler.steps

    def has_work(self) -> bool:
        """Whether ``step`` has anything to do, if only beside other replicas."""
        if self._unfinished() or self.recovering:
            return True
        return self.domain is not None and self.domain.awake

    def _unfinished(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work()

    @property
    def recovering(self) -> bool:
        """Whether ranks were lost, and their group is being formed anew: no step is made meanwhile."""
        return self._lost_at is not None

    def check(self) -> None:
        """Looks after the ranks while there is nothing to compute. Does not wait. Raises EngineDead."""
        if self.recovering:
            return
        try:
            self.runner.check()
        except GroupLost as lost:
            self._lose(lost)

    def step(self) -> list[TokenEvent]:
        """Launches the next step, if one can be planned, and commits the oldest one when it must.

        When ranks are lost, what ran waits until they are there again. Raises EngineDead (or whatever the
        device raised) when the group cannot go on.
        """
        if self._lost_at is not None:
            if self.runner.recovered(RECOVERY_POLL):
                log.info("the group is whole again after %.1f s", self._clock.now() - self._lost_at)
                self._lost_at = None
                before = self.scheduler.stats().requeued
                given_up = self.scheduler.requeue_all()
                again = self.scheduler.stats().requeued - before - len(given_up)
                log.info("%d sequences are computed again, %d are given up", again, len(given_up))
                for rooms in self._all_rooms:
                    rooms.regain()
                return self._told(given_up + self._asked())
            return self._told(self._asked())
        events: list[TokenEvent] = []
        try:
            self._step(events)
        except GroupLost as lost:  # what was committed before is told
            self._lose(lost)
            events += self._asked()
        return self._told(events)

    def _lose(self, lost: GroupLost) -> None:
        """Ranks are lost, and with them the steps in flight."""
        self._in_flight.clear()
        self._launching = self._stalled = False
        self._completed = -math.inf
        self._lost_at = self._clock.now()  # first: an interrupt may come between
        self.scheduler.lose()
        for rooms in self._all_rooms:
            rooms.lose()
        self.runner.recover(lost)

    def _step(self, events: list[TokenEvent]) -> None:
        """``step``, whose events go into ``events`` as they are made."""
        if self._launching:
            raise EngineDead("a step was interrupted, and the engine can't go on")
        self._mask()
        plan = None
        if len(self._in_flight) < self._depth:  # else an interrupt cut the last wait short: read first
            self._launching = True
            began = self._clock.now()
            plan = self._plan(began)
            if plan is not None:
                self._launch(plan, began)
            self._launching = False
            events += self._asked()
        self._stalled = False
        if self._in_flight and (plan is None or len(self._in_flight) >= self._depth):
            # Where somebody rings at the end of a step, the loop does not wait for it in here.
            self._stalled = self._bell is not None and not self.runner.done(self._in_flight[0][0])
            if self._stalled:
                self.runner.check()
            else:
                self._commit(events)
        elif plan is None and self.scheduler.in_flight:
            raise EngineDead("a step was planned and never launched")

    def wait_ms(self) -> int:
        """How long a loop that has work may sleep on ``sockets`` before the next ``step``."""
        return STALLED_MS if self._stalled and not self.runner.done(self._in_flight[0][0]) else 0

    def _plan(self, now: float) -> StepPlan | None:
        """The plan of the next step; None when there is nothing to do."""
        builder = self.scheduler.build(now)
        if builder is not None:
            self.balance.ask(builder)
            self.overlap.ask(builder)
        if self.domain is not None:
            builder = self.domain.settle(builder, self._unfinished(), self.scheduler.idle)
        plan = None if builder is None else self.scheduler.seal(builder)
        if plan is not None:
            self._stages.admitted(self.scheduler.admitted(plan), now)
        return plan

    def _launch(self, plan: StepPlan, began: float) -> None:
        self.balance.launched(plan)
        handle = self.runner.forward(plan)
        if not plan.constrained:
            self._sample(handle)
        self._in_flight.append((handle, began))
        self._mask()

    def _mask(self) -> None:
        """Samples the oldest step in flight, if it is constrained and that is still to be done: all before it
        have committed, so its masks can be made; its forward runs meanwhile.

        INVARIANT: where anything is in flight, its oldest step is sampled when this returns; so no forward
        is launched behind one that is not (see ``weft.types.plan.TokenMasks``).
        """
        if not self._in_flight or not (handle := self._in_flight[0][0]).plan.constrained:
            return
        if handle.sampled is not None:
            return
        launching, self._launching = self._launching, True  # an interrupt of it could not be resumed
        began = self._clock.now()
        masks = self.scheduler.masks(handle.plan)
        self._mask_seconds += self._clock.now() - began
        self._sample(handle, masks)
        self._launching = launching

    def _sample(self, handle: StepHandle, masks: TokenMasks | None = None) -> None:
        self.runner.sample(handle, masks)
        bell = self._bell
        if bell is not None and bell is not self.runner.bell and handle.sampled is not None:
            handle.sampled.add_done_callback(lambda _: bell.ring())

    def _commit(self, events: list[TokenEvent]) -> None:
        """Waits for the oldest step, and commits it. Its events are in ``events`` before masks are sent, as
        that may find that ranks are lost."""
        handle, began = self._in_flight[0]  # it stays there when an interrupt cuts the wait short
        try:
            result = self.runner.read(handle)
        except Exception:
            self._in_flight.popleft()
            raise
        self._in_flight.popleft()
        # A step that was launched behind another one starts when that one ends.
        now = self._clock.now()
        seconds = now - max(began, self._completed)
        self._completed = now
        events += self.scheduler.commit(handle.plan, result, now)
        self._encode_seconds += handle.encode_seconds
        unlike = handle.uncaptured or handle.encode_seconds > 0  # what it took says nothing of its tokens
        self.scheduler.observe(handle.plan, seconds, unlike)
        self.overlap.observe(handle.plan, handle.times)
        self._mask()
        events += self._asked()

    def stats(self) -> HeadStats:
        """Counters and gauges of scheduler, transfers and overlap."""
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
        """What a front must know of this engine."""
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
        """``Scheduler.follow_prefixes``."""
        return self.scheduler.follow_prefixes()

    def close(self, failed: bool = False) -> None:
        """Waits for what is in flight (its results are dropped) and ends the device thread and trace.

        ``failed``: another engine will replace this one, and take over supervised ranks.
        """
        if (report := self.describe_speculation()) is not None:
            log.info("%s", report)
        if (report := self.overlap.describe()) is not None:
            log.info("%s", report)
        self.grammars.close()
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
