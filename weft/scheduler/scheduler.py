"""The scheduler: accept sequences, plan steps, commit step results. Pure: no I/O, no clock, no torch.

``build`` returns the next step as a ``PlanBuilder``. ``weft.scheduler.planner`` chooses the rows. Expert
balancing, overlap and the expert-parallel group then set further fields on the builder. ``freeze`` freezes
the builder into an immutable plan. The plan is in flight until ``commit``. The scheduler can build one step
while another step is in flight.

A sequence is blocked while external input (KV, grammar, images) is missing. A blocked sequence is no work and
fails at a deadline. Every other waiting sequence must make progress. Only one reason excuses waiting
sequences without a row in flight: blocks are short, and pins or image transfers before the deadline hold
memory.

A sequence with a transfer (``Submit.transfer``) is prefilled by one group and decoded by another group. Such
a sequence never returns to the queue. When a group cannot continue the sequence, the group returns the
sequence to the router with the finish reason "evicted". See ``weft.scheduler.transfers.scheduler_transfers``.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from weft.common.errors import DeadlineExceeded, EngineDead, ErrorInfo, InvalidRequest, Overloaded
from weft.common.log import get_logger
from weft.common.restarts import MOST_LOSSES
from weft.config.resolved import KVConfig
from weft.config.sections.all import SchedulerSection, SpeculationSection, TransferSection
from weft.config.sizing.budget import check_budget
from weft.kv.prefix_log import PrefixLog
from weft.kv.tiers import TierBook
from weft.scheduler.commit import commit
from weft.scheduler.constraints import Constraint, TokenMatcher, masks_of
from weft.scheduler.loads import Loads
from weft.scheduler.plan_builder import PlanBuilder
from weft.scheduler.planner import Planner
from weft.scheduler.sequence import Running, Sequence
from weft.scheduler.state import SchedulerState
from weft.scheduler.transfers.media_transfers import MediaTransfers
from weft.scheduler.transfers.scheduler_transfers import SchedulerTransfers
from weft.scheduler.validate import check_submit
from weft.types.messages import EngineStats, Submit, TokenEvent, TransferStats
from weft.types.plan import (
    MAX_PROMPT_LOGITS,
    AdapterUpdate,
    AllocSlot,
    SlotUpdate,
    StepPlan,
    StepResult,
    TokenMasks,
)
from weft.types.routes import RouteShape
from weft.types.sampling import ALL_LOGPROBS
from weft.types.tiers import StoreMode
from weft.types.transfer import Blocks, TransferEvent, TransferKey, TransferRequest

_log = get_logger(__name__)


MAX_IN_FLIGHT = 2
ALL_LOGPROBS_BYTES = 16 << 20
"""Maximum bytes of prompt logprobs over the whole vocabulary in one step. One position is always allowed."""
MAX_EMPTY_PLANS = 64
"""Maximum consecutive plans without rows while work waits and no row is in flight. Then the group fails."""
BLOCKED_S = 600.0
"""Default time-out in seconds for external input (KV, grammar). ``add(until=...)`` overrides the default."""


class Scheduler:
    """The control core of one group.

    Raises ConfigError, with the names of the flags, when the caches cannot hold one sequence of
    ``max_model_len``, or when the decode rows of a step could leave less than one block of tokens for
    prefill.
    """

    def __init__(
        self,
        kv: KVConfig,
        section: SchedulerSection,
        vocab_size: int,
        speculation: SpeculationSection | None = None,
        transfer: TransferSection | None = None,
        remembered_bytes: int = 0,
        retention: float = 0.0,
        *,
        generates: bool = True,
        places: int = 0,
        classifies: bool = False,
        routes: RouteShape | None = None,
    ) -> None:
        """Create the scheduler with an empty queue and empty caches.

        ``kv``: cache sizes and the maximum number of drafts. ``speculation``: adaptive or fixed draft counts.
        ``transfer``: the role of the group. ``remembered_bytes``: memory for earlier prompts, used to explain
        cache misses. ``retention``: seconds for which the blocks of a session are evicted after all others.
        ``generates``: False for an embedding model; ``classifies`` and ``routes``: see ``check_submit``.
        ``places``: places for LoRA adapters.
        """
        check_budget(section, kv.block_size, kv.drafts)
        self._section = section
        self._vocab_size = vocab_size
        self._generates, self._classifies, self._routes = generates, classifies, routes
        threshold = section.long_prefill_token_threshold or section.max_num_batched_tokens
        # A decode row with drafts counts as a chunk. Blocks for the drafts to propose are reserved with the
        # row.
        whole = 0 if kv.media is None else kv.media.whole  # a chunk may have all tokens of an image
        longest = max(min(threshold, section.max_num_batched_tokens), whole, 1 + kv.drafts) + kv.drafts
        self._state = SchedulerState(kv, longest, remembered_bytes, retention, places)
        self.planner = Planner(self._state, section, speculation)
        """The planner chooses the rows of each step."""
        self._step = 0
        self._arrivals = 0
        self._empty_plans = 0
        self._built: PlanBuilder | None = None  # the builder expected by `freeze`
        self._blocked = False  # True: nothing can run until a pinned block is released
        self._blocked_until: dict[int, float] = {}  # blocked sequence -> deadline
        self._pins = self._state.pins
        role = transfer or TransferSection()
        self._transfers = SchedulerTransfers(
            self._state, role, vocab_size, lambda: self.planner.starved, self.planner.promised
        )
        self.adapters = self._state.adapters
        """LoRA adapters: loaded and dropped by the engine."""
        self.loads: Loads | None = None
        """Loads from a KV tier; None without a tier."""
        self.embeddings: MediaTransfers | None = None
        """The receiver of embedding transfers; None if the group receives no embeddings."""
        if kv.media is not None and kv.media.takes:
            self.embeddings = MediaTransfers(self._state, self._unblock)

    # ---- sequences

    def add(
        self, submit: Submit, now: float, blocked: bool = False, until: float | None = None
    ) -> list[TokenEvent]:
        """Accept a sequence. Return [] and queue or block the sequence. If the emitted ids are already
        complete, return the terminal event and queue nothing.

        ``blocked``: the sequence is blocked until ``arrived`` is called. The sequence fails at ``until``
        (default: ``now`` + ``BLOCKED_S``). A sequence with a grammar is blocked in the same way until
        ``constrain`` is called. Raises InvalidRequest, ContextLength or Overloaded before any change.
        """
        state = self._state
        tokens, num_prompt = check_submit(
            submit,
            self._vocab_size,
            state.kv.max_model_len,
            state.kv.media,
            generates=self._generates,
            classifies=self._classifies,
            routes=self._routes,
        )
        if submit.sequence in state.live:
            raise InvalidRequest("a sequence with this id is running", param="sequence")
        if not state.adapters.accepts(submit.adapter):
            raise InvalidRequest("the LoRA adapter of the request is not loaded", param="model")
        self._transfers.check(submit)
        if self.embeddings is not None:
            self.embeddings.check(submit)
        # The limit does not count sequences for which the next step has a slot: a burst on an idle engine
        # fills the slots first.
        unused = self._section.max_num_seqs - len(state.running)
        if self._num_waiting >= self._section.max_queued_requests + unused:
            raise Overloaded(f"{self._section.max_queued_requests} sequences wait already; try again later")
        most = 0 if submit.pooling else submit.params.max_tokens
        limit = min(num_prompt + most, state.kv.max_model_len)
        sequence = Sequence(submit, tokens, num_prompt, limit, self._arrivals)
        self._count_cost(sequence)
        sequence.blocked = blocked = blocked or submit.grammar is not None
        self._arrivals += 1
        if sequence.transfer is not None:
            state.transfers.open(sequence)
        state.images.open(sequence, now)
        ending = sequence.ending() if sequence.num_output else None
        if ending is not None:
            state.images.ended(sequence, ending[0])
            state.transfers.ended(sequence, ending[0], None)
            position = sequence.position
            finish, stop_id = ending
            return [TokenEvent(sequence=sequence.id, finish=finish, stop_id=stop_id, position=position)]
        state.arrive(sequence)
        if blocked:
            self._blocked_until[sequence.id] = now + BLOCKED_S if until is None else until
        self._blocked = False
        return []

    def _count_cost(self, sequence: Sequence) -> None:
        """Set ``logit_cost`` and ``side_bytes`` of a new sequence."""
        if sequence.params.prompt_logprobs == ALL_LOGPROBS:
            sequence.logit_cost = max(1, MAX_PROMPT_LOGITS * 4 * self._vocab_size // ALL_LOGPROBS_BYTES)
        if sequence.params.logprobs == ALL_LOGPROBS:
            sequence.side_bytes = 4 * (1 + self._vocab_size) * (1 + self._state.kv.drafts)
        if sequence.forced is not None:
            sequence.side_bytes += len(sequence.forced.ids)

    def arrived(self, sequence: int) -> None:
        """Unblock a sequence and drop the deadline: the external input is there. Images or KV still on the
        way keep the sequence blocked. Unknown ids are ignored."""
        found = self._state.live.get(sequence)
        self._blocked_until.pop(sequence, None)
        if found is not None:
            self._state.arrived(found)
            self._blocked = False

    def constrain(self, sequence: int, matcher: TokenMatcher, end_ids: Iterable[int]) -> list[TokenEvent]:
        """Attach the compiled grammar to a sequence and unblock the sequence. Unknown ids are ignored.

        ``matcher`` must be at the start of the grammar; the output so far is fed into ``matcher``.
        ``end_ids``: see ``Constraint``. If the output is complete or violates the grammar, end the sequence
        and return the terminal event; else return [].
        """
        found = self._state.live.get(sequence)
        if found is None:
            return []
        constraint = Constraint(matcher, end_ids, found.params, self._vocab_size)
        constraint.walk(found.tokens[found.num_prompt :])
        if constraint.failure is not None:
            return self.fail(sequence, constraint.failure)
        found.constraint = constraint
        if constraint.finished:
            self._blocked_until.pop(sequence, None)
            self._state.end(found, "stop")
            return [TokenEvent(sequence=sequence, finish="stop", position=found.position)]
        self.arrived(sequence)
        return []

    def fail(self, sequence: int, error: ErrorInfo) -> list[TokenEvent]:
        """End a sequence with ``error`` because the grammar is unusable, and count a grammar error. Return
        the terminal event; [] for an unknown id."""
        found = self._state.live.get(sequence)
        if found is None:
            return []
        self._blocked_until.pop(sequence, None)
        self._state.counts.grammar_errors += 1
        self._state.end(found, "error", error)
        self._blocked = False
        return [TokenEvent(sequence=sequence, finish="error", error=error, position=found.position)]

    def expire(self, now: float) -> list[TokenEvent]:
        """End all sequences blocked past the deadline. Return the terminal events, and all events of
        transfers not returned yet.

        Also expire session retention, KV transfers and image transfers: sequences with late transfers are
        returned to the router. Call ``expire`` often, also when there is no work.
        """
        self._state.retention.expire(now)
        if self.loads is not None:
            self.loads.expire(now)
        self._blocked = self._blocked and self._state.excuse(now)
        late = [sequence for sequence, until in self._blocked_until.items() if now >= until]
        events: list[TokenEvent] = []
        for number in late:
            del self._blocked_until[number]
            if (sequence := self._state.live.get(number)) is None:
                continue
            error = DeadlineExceeded(
                "the KV cache, the grammar or the images of the request did not arrive in time"
            ).info()
            self._state.end(sequence, "error")
            events.append(TokenEvent(sequence=number, finish="error", error=error))
        self._transfers.expire(now)
        if self.embeddings is not None:
            self.embeddings.expire(now)
        events += self._state.transfers.take_events()
        if events:
            self._blocked = False
        return events

    @property
    def blocked(self) -> bool:
        """True if the scheduler can do nothing before external input arrives or a pinned block is
        released."""
        state = self._state
        any_blocked = (
            self._blocked_until or self._blocked or state.transfers.any_blocked or state.images.any_blocked
        ) or (self.loads is not None and self.loads.any_blocked)
        return bool(any_blocked) and not self.has_work()

    def fail_adapter(self, digest: str, error: ErrorInfo) -> list[TokenEvent]:
        """End every live sequence of an adapter with ``error``. Return the terminal events."""
        state = self._state
        lost = [sequence for sequence in state.live.values() if sequence.adapter == digest]
        for sequence in lost:
            self._blocked_until.pop(sequence.id, None)
            state.end(sequence, "error", error)
        return [
            TokenEvent(sequence=one.id, finish="error", error=error, position=one.position) for one in lost
        ]

    def finish(self, sequence: int) -> list[TokenEvent]:
        """Abort a sequence and return the terminal event. Unknown ids are ignored: return [].

        For an ended sequence, return the events of transfers that no call has returned yet.
        """
        found = self._state.live.get(sequence)
        if found is None:
            # a late event would end a later attempt with the same id
            return self._state.transfers.take_events_of(sequence)
        self._blocked_until.pop(sequence, None)
        self._state.end(found, "abort")
        self._blocked = False
        num_cached = max(found.num_cached, 0)
        return [TokenEvent(sequence=sequence, num_cached=num_cached, finish="abort", position=found.position)]

    def begin_again(self) -> None:
        """Preempt all running sequences. Prompts and outputs are recomputed. No step may be in flight."""
        for sequence in self._state.running.snapshot():
            run = sequence.state
            assert isinstance(run, Running)
            self._state.preempt(sequence, run)

    def lose(self) -> None:
        """Return running sequences with KV or images from transfers to the router, after ranks were lost.

        No step may run until ``requeue_all``. Call ``lose`` before the transfers are notified: the reported
        error is then the loss, not a failed transfer.
        """
        self._transfers.lose()

    def requeue_all(self) -> list[TokenEvent]:
        """Requeue all running sequences after the group was lost; prompt and committed output are recomputed.

        Call only when the ranks have empty slot tables. Steps in flight are forgotten: the results must not
        be committed. Afterwards the prefix cache is empty, and the pools have only pinned blocks in use. Step
        numbers continue. Return the terminal events of sequences lost too often and of sequences returned to
        the router.
        """
        self._blocked = self.planner.lacked = False
        self._empty_plans = 0
        self._built = None
        self.lose()
        often = [sequence for sequence in self._state.requeue() if sequence.lost()]
        for sequence in often:
            self._state.end(sequence, "error")
        error = EngineDead(f"the engine was lost {MOST_LOSSES} times while it worked on this request").info()
        events = [
            TokenEvent(sequence=s.id, num_cached=max(s.num_cached, 0), finish="error", error=error)
            for s in often
        ]
        return events + self._state.transfers.take_events()

    @property
    def adapter_updates(self) -> list[AdapterUpdate]:
        """Updates of adapters in the next plan."""
        return [op for op in self._state.ops if isinstance(op, AdapterUpdate)]

    def enqueue(self, op: SlotUpdate) -> None:
        """Add a slot update to the next plan. The plan is made for the update alone if there are no rows.

        If ``op`` names a slot, earlier plans must have assigned the slot. The update is dropped if the
        sequence in the slot ends first.
        """
        self._state.ops.append(op)

    def pin(self, kind: int, block: int, until: float) -> None:
        """Pin ``block`` of KV cache group ``kind``: a transfer outside the group may read or write the block.

        The pin outlives the sequence, ``requeue_all`` and ``until``. After ``until`` the pin no longer
        excuses missing blocks: lack of progress then ends the group within milliseconds. So ``until`` must be
        later than any time at which the transfer, with its fence, can end. Raises EngineDead for a block not
        in use.
        """
        self._pins.pin(kind, block, until)

    def unpin(self, kind: int, block: int) -> None:
        """Release one pin of ``pin``. Raises EngineDead if the block has no pin."""
        self._pins.unpin(kind, block)
        self._blocked = False

    # ---- transfers

    def transfer(self, event: TransferEvent, now: float) -> list[TokenEvent]:
        """Apply a transfer event. Return new client events: the first token of a sequence with received KV,
        and terminal events of sequences returned to the router."""
        self._state.transfers.now = now
        self._transfers.on(event)
        self._blocked = False
        return self._state.transfers.take_events()

    def transfer_requests(self) -> list[TransferRequest]:
        """Answer open offers, which may reserve blocks. Return and clear all requests to transfers, in order.

        Call after every change to the scheduler, but not between ``build`` and ``freeze``.
        """
        return self._transfers.requests()

    def transfer_blocks(self, key: TransferKey) -> tuple[Blocks, ...]:
        """Return the blocks to send in the transfer ``key``, for each KV cache group, as far as allocated.

        For a recurrent state: the snapshot, once a plan with the snapshot was frozen. Return () before the
        sequence has a slot and for unknown transfers.
        """
        return self._state.transfers.tables(key)

    def has_work(self) -> bool:
        """Return True if there is a step to plan or to commit. Blocked sequences are no work."""
        state = self._state
        wanting = (state.waiting or len(state.running)) and not self._blocked
        return bool(wanting or state.asks or state.in_flight)

    @property
    def in_flight(self) -> int:
        """Number of plans without a commit."""
        return len(self._state.in_flight)

    # ---- steps

    def plan(self, now: float) -> StepPlan | None:
        """Run ``build`` and ``freeze``. Return the plan, or None if ``build`` returns None. For callers
        without further fields to set."""
        builder = self.build(now)
        return None if builder is None else self.freeze(builder)

    def build(self, now: float) -> PlanBuilder | None:
        """Return the next step for ``freeze``, or None when nothing can run before a commit or an arrival.

        Admission and preemption take effect at once, also when the result is None. Also expires session
        retention. Call no other method between ``build`` and ``freeze``. Raises EngineDead when two steps are
        in flight, when the last builder was not frozen, and when ``MAX_EMPTY_PLANS`` plans in a row had no
        rows although work waits and no row is in flight.
        """
        self._state.transfers.now = now
        self._state.retention.expire(now)
        while True:
            builder = self._begin(self._section.max_num_batched_tokens)
            self.planner.fill(builder)
            if builder.rows or not (builder.preempted or self._retry_for_images()):
                break  # after a preemption the released blocks may be free at once: try again
        self._state.media.evict_slotless = False
        self.planner.lacked = builder.lacking is not None
        if builder.rows:
            self._empty_plans = 0
        else:
            self._watch_progress(now)
            if not self._state.asks:
                return None
        self._built = builder.close()
        return builder

    def idle(self) -> PlanBuilder:
        """Return a step without rows, for a step of other replicas of the expert-parallel group.

        Raises EngineDead like ``build``.
        """
        self._built = self._begin(0)
        return self._built

    def freeze(self, builder: PlanBuilder) -> StepPlan:
        """Freeze ``builder`` into a plan. The plan is in flight from now on and carries all waiting slot
        updates.

        Raises EngineDead if ``builder`` is not the last builder.
        """
        if builder is not self._built:
            raise EngineDead("only the step that was built last can be frozen")
        state = self._state
        step = builder.step
        # Order matters: snapshots copy states before rows of the plan overwrite the states.
        first = [*state.slots.announce(), *state.take_ops(step), *state.save(step), *state.snapshots(step)]
        plan = builder.freeze(first)
        state.launched(plan)
        self._step += 1
        self._built = None
        return plan

    def admitted(self, plan: StepPlan) -> list[int]:
        """Return the ids of sequences with a new slot in ``plan``, which must be the plan frozen last."""
        column = self._state.columns.sequence
        return [int(column[op.slot]) for op in plan.ops if isinstance(op, AllocSlot)]

    def masks(self, plan: StepPlan) -> TokenMasks:
        """Return the token masks for the rows of ``plan``, which must be ``constrained``. A failing matcher
        ends the sequence at the commit.

        Raises EngineDead if an earlier plan has not committed.
        """
        state = self._state
        if not state.in_flight or state.in_flight[0] is not plan:
            raise EngineDead("the masks of a step need the commits of all earlier steps")
        columns = state.columns
        return masks_of(plan, self._vocab_size, columns.gen, columns.constrained, state.in_slot)

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Apply the result of the oldest plan in flight. Return the client events of the plan, then the
        events of sequences returned to the router.

        Raises EngineDead for another plan or a wrong result. See ``weft.scheduler.commit``.
        """
        events = commit(self._state, plan, result, self.planner.drafts)
        return events + self._state.transfers.take_events() if self._state.transfers.events else events

    def observe(self, plan: StepPlan, seconds: float, uncaptured: bool = False) -> None:
        """Report the device time of ``plan`` to the loads, the chunk policy and the draft policy. Does
        nothing for a plan without rows.

        ``seconds``: from the start of the step, or from the end of the step before if that end is later.

        ``uncaptured``: the step ran without capture and took longer than replayed steps will take. Such a
        time is not used to fit the cost model.
        """
        if not plan.rows:
            return
        if self.loads is not None and not uncaptured:
            self.loads.observe(plan, seconds)
        chunks = self.planner.chunks
        drafts = self.planner.drafts
        if chunks is not None and not uncaptured:
            chunks.observe(plan, seconds)
        if drafts is not None:
            drafts.observe(plan, seconds, uncaptured=uncaptured)

    @property
    def steps(self) -> int:
        """Number of committed steps."""
        return self._state.counts.steps

    def follow_prefixes(self) -> tuple[PrefixLog, int] | None:
        """Return ``Caches.follow()``, or None without prefix caching."""
        return self._state.caches.follow() if self._state.kv.enable_prefix_caching else None

    def forget_prefixes(self) -> None:
        """Empty the prefix cache. Running sequences go on."""
        self._state.counts.prefix_resets += 1
        self._state.counts.forgotten_blocks += self._state.caches.forget_prefixes()

    def use_weights(self, name: bytes) -> None:
        """Use ``name``, the name of the weights, in the prefix hashes of all sequences that are admitted from
        now on. No step may be in flight. See ``SchedulerState.use_weights``."""
        self._state.use_weights(name)

    def stats(self) -> EngineStats:
        """Return all counters and gauges."""
        stats = engine_stats(self._state, self._num_waiting, self._transfers.stats())
        return stats if self.loads is None else msgspec.structs.replace(stats, tier=self.loads.stats())

    def use_tier(self, dtype: str, mode: StoreMode, write_rate: float = 0.0) -> Loads:
        """Attach a KV tier. Call before the first ``add``. Return the loads: the engine carries out their
        requests. ``dtype``: name of the model's dtype. ``mode``, ``write_rate``: see ``TierBook``."""
        state, chunks = self._state, self.planner.chunks
        book = TierBook(state.caches, self._pins, state.kv, dtype, mode, write_rate)
        self.loads = state.loads = Loads(
            state,
            book,
            self._section.max_num_batched_tokens,
            self.planner.promised,
            lambda: self.planner.starved,
            self._unblock,
            None if chunks is None else lambda: chunks.cost,
        )
        return self.loads

    # ----

    def _begin(self, budget: int) -> PlanBuilder:
        """Return an empty builder with a budget of ``budget`` tokens. Raises EngineDead if two steps are in
        flight, or if the last builder was not frozen."""
        if len(self._state.in_flight) >= MAX_IN_FLIGHT:
            raise EngineDead(f"{MAX_IN_FLIGHT} steps are in flight already")
        if self._built is not None:
            raise EngineDead("a step was built and never frozen")
        return PlanBuilder(self._step, budget, self._state.columns)

    @property
    def _num_waiting(self) -> int:
        return len(self._state.live) - len(self._state.running)

    def _retry_for_images(self) -> bool:
        """Set ``media.evict_slotless`` and return True if a step without rows must be filled again. Return
        True at most once per build.

        The case: no row is in flight and an image lacks memory. In the second try the image may take memory
        from sequences without a slot.
        """
        state = self._state
        if not state.media.short or state.media.evict_slotless or any(plan.rows for plan in state.in_flight):
            return False
        state.media.evict_slotless = True
        return True

    def _unblock(self) -> None:
        self._blocked = False

    def _watch_progress(self, now: float) -> None:
        """Count consecutive plans without rows and without an excuse. Raises EngineDead at
        ``MAX_EMPTY_PLANS``.

        Rows in flight are progress. Missing blocks or image memory are an excuse while a pin or an image
        transfer is before its deadline. With an excuse and no plan in flight, set ``_blocked``: there is no
        work until a change.
        """
        # Blocks lacked by admission, by rows, by senders with states to save, or memory lacked by images.
        state = self._state
        waits = state.waiting or len(state.running)
        lacking = self.planner.lacked or self.planner.starved or state.transfers.unsaved or state.media.short
        excused = lacking and state.excuse(now)
        self._blocked = bool(excused and not state.in_flight)
        if not waits or excused or any(plan.rows for plan in state.in_flight):
            self._empty_plans = 0
            return
        self._empty_plans += 1
        if self._empty_plans >= MAX_EMPTY_PLANS:
            counts = (
                f"running {len(state.running)}, waiting {len(state.waiting)} of {self._num_waiting}, "
                f"free slots {state.slots.available()}, free blocks {state.caches.free_blocks()}, "
                f"preemptions {state.counts.preemptions}, step {self._step}"
            )
            _log.error("no progress in %d plans while work waits: %s", self._empty_plans, counts)
            raise EngineDead(f"the scheduler made no progress while work waited ({counts})")


def engine_stats(state: SchedulerState, waiting: int, transfers: TransferStats | None) -> EngineStats:
    """Return counters and gauges. ``waiting``: number of sequences without a slot."""
    counts, embeddings, media = state.counts, state.media.cache, state.kv.media
    return EngineStats(
        steps=counts.steps,
        mixed_steps=counts.mixed_steps,
        idle_steps=counts.idle_steps,
        running=len(state.running),
        waiting=waiting,
        kv_usage=state.caches.usage(),
        prefix_queries=counts.prefix_queries,
        prefix_hits=counts.prefix_hits,
        preemptions=counts.preemptions,
        prompt_tokens=counts.prompt_tokens,
        generation_tokens=counts.generation_tokens,
        drafts=tuple(counts.drafts),
        drafts_accepted=tuple(counts.drafts_accepted),
        row_errors=counts.row_errors,
        recoveries=counts.recoveries,
        requeued=counts.requeued,
        prefix_resets=counts.prefix_resets,
        forgotten_blocks=counts.forgotten_blocks,
        constrained_steps=counts.constrained_steps,
        routed_tokens=counts.routed_tokens,
        prefill_rows=counts.prefill_rows,
        prefill_tokens=counts.prefill_tokens,
        decode_rows=counts.decode_rows,
        grammar_errors=counts.grammar_errors,
        free_blocks=state.caches.free_blocks(),
        free_slots=state.slots.available(),
        transfers=transfers,
        embedding_transfers=state.images.stats() if media is not None and media.takes else None,
        images_encoded=embeddings.encoded,
        image_hits=embeddings.hits,
        embedding_bytes=embeddings.nbytes,
        embedding_host_bytes=embeddings.host_nbytes,
    )
