"""The scheduler: takes sequences in, plans steps, commits their results. Pure: no I/O, no clock, no torch.

A plan is made in phases, each a function below: decode rows are reserved first, then prefills under way go
on, then new sequences are admitted, all in FCFS order. ``plan`` may run one step ahead of ``commit``.
"""

from __future__ import annotations

import numpy as np

from weft.common.errors import EngineDead, ErrorInfo, InvalidRequest, Overloaded
from weft.common.log import get_logger
from weft.config.budget import check_budget
from weft.config.resolved import KVConfig
from weft.config.sections import SchedulerSection
from weft.scheduler.book import Book
from weft.scheduler.chunk import ChunkPolicy
from weft.scheduler.commit import commit
from weft.scheduler.draft import Draft, Row
from weft.scheduler.sequence import Running, Sequence
from weft.scheduler.validate import check_submit
from weft.types.messages import HeadStats, Submit, TokenEvent
from weft.types.plan import Op, StepPlan, StepResult

MAX_IN_FLIGHT = 2
MAX_EMPTY_PLANS = 64
"""Plans in a row that may be empty while work waits and nothing is in flight, before the group gives up."""

_log = get_logger(__name__)


class Scheduler:
    """The control core of one group.

    Raises ConfigError, naming the flags, when the caches cannot hold one sequence of ``max_model_len``, or
    when the decode rows of a step could leave prefill less than one block of tokens.
    """

    def __init__(self, kv: KVConfig, section: SchedulerSection, vocab_size: int) -> None:
        check_budget(section, kv.block_size)
        self._section = section
        self._vocab_size = vocab_size
        self._threshold = section.long_prefill_token_threshold or section.max_num_batched_tokens
        self._book = Book(kv, min(self._threshold, section.max_num_batched_tokens))
        self._exclusive = section.step_policy == "exclusive"
        self.chunks = ChunkPolicy(section.itl_target_ms / 1e3) if section.itl_target_ms else None
        """Sizes prompt chunks by time; None without ``--itl-target-ms``."""
        self._step = 0
        self._arrivals = 0
        self._lacked = False  # whether the last plan left out a row for want of blocks
        self._empty_plans = 0

    # ---- sequences

    def add(self, submit: Submit, now: float) -> list[TokenEvent]:
        """Takes in a sequence. The returned event, if any, is its end: the emitted ids were complete already.

        Raises InvalidRequest, ContextLength or Overloaded before anything is changed.
        """
        book = self._book
        tokens, num_prompt = check_submit(submit, self._vocab_size, book.kv.max_model_len)
        if submit.sequence in book.live:
            raise InvalidRequest("a sequence of this id is live", param="sequence")
        # Whom the next step can admit does not queue: a burst on an idle engine fills its slots first.
        unused = self._section.max_num_seqs - len(book.running)
        if len(book.waiting) + book.num_held >= self._section.max_queued_requests + unused:
            raise Overloaded(f"{self._section.max_queued_requests} sequences wait already; try again later")
        limit = min(num_prompt + submit.params.max_tokens, book.kv.max_model_len)
        sequence = Sequence(submit, tokens, num_prompt, limit, self._arrivals)
        self._arrivals += 1
        ending = sequence.ending() if sequence.num_output else None
        if ending is not None:
            return [TokenEvent(sequence=sequence.id, finish=ending[0], stop_id=ending[1])]
        book.arrive(sequence)
        return []

    def finish(self, sequence: int) -> list[TokenEvent]:
        """Ends a sequence from outside. Unknown and ended ones are fine: then there is no event."""
        found = self._book.live.get(sequence)
        if found is None:
            return []
        self._book.end(found, "abort")
        return [TokenEvent(sequence=sequence, num_cached=max(found.num_cached, 0), finish="abort")]

    def fail_all(self, error: ErrorInfo) -> list[TokenEvent]:
        """Ends every live sequence with ``error``, oldest first."""
        events = []
        for sequence in list(self._book.live.values()):
            self._book.end(sequence, "error")
            cached = max(sequence.num_cached, 0)
            events.append(TokenEvent(sequence=sequence.id, num_cached=cached, finish="error", error=error))
        return events

    def has_work(self) -> bool:
        """Whether a sequence is live or a step awaits its commit."""
        return bool(self._book.live or self._book.in_flight)

    @property
    def in_flight(self) -> int:
        """Plans that await their commit."""
        return len(self._book.in_flight)

    # ---- steps

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run before a commit or an arrival.

        Raises EngineDead when two steps are in flight already, and when nothing could be planned for long
        though work waits and no step is in flight.
        """
        if len(self._book.in_flight) >= MAX_IN_FLIGHT:
            raise EngineDead(f"{MAX_IN_FLIGHT} steps are in flight already")
        while True:
            draft = Draft(self._step, self._section.max_num_batched_tokens, self._book.columns)
            if self._exclusive:
                self._fill_exclusive(draft)
            else:
                self._fill_mixed(draft)
            if draft.rows or not draft.preempted:
                break  # else the blocks of whoever was preempted may be free at once: try again
        self._lacked = draft.lacking is not None
        return self._seal(draft)

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Applies the result of the oldest plan in flight. See ``weft.scheduler.commit``."""
        return commit(self._book, plan, result)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """``plan`` took the device ``seconds``, from the end of the step before it if that was later."""
        if self.chunks is not None:
            self.chunks.observe(plan, seconds)

    @property
    def steps(self) -> int:
        """Steps committed."""
        return self._book.counts.steps

    def stats(self) -> HeadStats:
        """Counters and gauges."""
        book, counts = self._book, self._book.counts
        return HeadStats(
            steps=counts.steps,
            mixed_steps=counts.mixed_steps,
            running=len(book.running),
            waiting=len(book.waiting) + book.num_held,
            kv_usage=book.caches.usage(),
            prefix_queries=counts.prefix_queries,
            prefix_hits=counts.prefix_hits,
            preemptions=counts.preemptions,
            prompt_tokens=counts.prompt_tokens,
            generation_tokens=counts.generation_tokens,
            row_errors=counts.row_errors,
            free_blocks=book.caches.free_blocks(),
            free_slots=book.slots.available(),
        )

    # ---- the phases of a plan

    def _fill_mixed(self, draft: Draft) -> None:
        self._decode(draft)
        if self.chunks is not None:
            self.chunks.begin(draft.decode_starts)
        self._resume(draft)
        self._admit(draft)

    def _fill_exclusive(self, draft: Draft) -> None:
        """Prefill first, one segment. After a plan that lacked blocks, who lacked them is asked first."""
        if not self._lacked:
            self._resume(draft)
            self._admit(draft)
        if not draft.prefill:
            self._decode(draft)
        if self._lacked and not len(draft.decode):
            self._resume(draft)
            self._admit(draft)

    def _decode(self, draft: Draft) -> None:
        """One row for every sequence past its known ids. One that may have reached its limit sits out."""
        book, columns = self._book, self._book.columns
        slots = book.order()
        ready = ~columns.prefilling(slots) & (columns.num_scheduled[slots] + 1 < columns.limit[slots])
        slots = slots[ready][: max(draft.budget, 0)]
        short = slots[columns.num_scheduled[slots] + 1 > columns.reserved[slots]]
        if len(short):
            slots = self._grow(slots, short, draft)
        draft.add_decode(slots, np.ones(len(slots), np.int32))

    def _resume(self, draft: Draft) -> None:
        """The next chunk of every prefill under way."""
        book = self._book
        slots = book.order()
        for sequence in book.tenants[slots[book.columns.prefilling(slots)]].tolist():
            run = sequence.state
            if not isinstance(run, Running):  # preempted just now
                continue
            if draft.budget < 1:
                return
            start = run.num_scheduled
            end = self._chunk_end(sequence, start, run.known, draft)
            if end <= start:
                continue
            if run.marks is not None:
                end = run.marks.cut(start, end, run.snapshot)
            ops = self._reserve(sequence, run, end, draft)
            if ops is not None:
                self._add_chunk(draft, sequence, run, end, ops)

    def _admit(self, draft: Draft) -> None:
        """Waiting sequences, oldest first, while a slot, budget and blocks for all known ids are there."""
        book = self._book
        if draft.lacking is not None or draft.preempted or not book.waiting:
            return
        promised = self._promised()
        while book.waiting and book.slots.available() and len(book.running) < self._section.max_num_seqs:
            sequence = book.waiting.first()
            if draft.budget < 1 or (sequence.protected and not book.guaranteed(sequence)):
                return
            hashes, num_hit = book.lookup(sequence)
            known = len(sequence.tokens)
            needed = book.caches.needed(book.slots.peek(), known + 1, num_hit, hashes)
            if not book.caches.fits([n + p for n, p in zip(needed, promised, strict=True)]):
                return
            end = self._chunk_end(sequence, num_hit, known, draft)
            if end <= num_hit:
                return
            marks = book.marks(sequence, hashes, num_hit)
            if marks is not None:
                end = marks.cut(num_hit, end, num_hit)
            run, ops = book.admit(sequence, hashes, num_hit, end, marks)
            self._add_chunk(draft, sequence, run, end, ops)
            rest = book.caches.needed(run.slot, known + 1)
            promised = [p + n for p, n in zip(promised, rest, strict=True)]

    def _seal(self, draft: Draft) -> StepPlan | None:
        book = self._book
        if not draft.rows:
            self._watch_progress()
            return None
        self._empty_plans = 0
        plan = draft.seal([*book.slots.announce(), *book.snapshots(self._step)])
        book.launched(plan)
        self._step += 1
        return plan

    # ---- parts of the phases

    def _chunk_end(self, sequence: Sequence, start: int, known: int, draft: Draft) -> int:
        """Where the chunk from ``start`` ends; at ``start`` when the step has no room for its logits."""
        most = min(draft.budget, self._threshold, known - start)
        if self.chunks is not None:
            most = self.chunks.room(start, most)
        end = start + most
        logits, sample = sequence.prefill_logits(start, end)
        if logits - sample > draft.prompt_logits:
            end = min(end, max(start, sequence.delivered) + draft.prompt_logits)
        return self._book.caches.cut(start, end) if end > start else start

    def _add_chunk(self, draft: Draft, sequence: Sequence, run: Running, end: int, ops: list[Op]) -> None:
        start = run.num_scheduled
        if self.chunks is not None:
            self.chunks.took(start, end - start)
        logits, sample = sequence.prefill_logits(start, end)
        draft.add_prefill(Row(sequence, run, start, end - start, logits, sample, ops))

    def _promised(self) -> list[int]:
        """Blocks of each kind that the prefills under way will still take: not there for admission."""
        book = self._book
        total = [0] * len(book.caches.kinds)
        slots = book.order()
        for slot in slots[book.columns.prefilling(slots)].tolist():
            needed = book.caches.needed(slot, int(book.columns.known[slot]) + 1)
            total = [t + n for t, n in zip(total, needed, strict=True)]
        return total

    def _grow(self, slots: np.ndarray, short: np.ndarray, draft: Draft) -> np.ndarray:
        """Makes the tables of the decode rows ``short``, of ``slots``, reach one position further.

        All at once when blocks are there; else one by one, in order, which may preempt. Returns the slots
        that can run.
        """
        book, columns = self._book, self._book.columns
        ends = columns.num_scheduled[short] + 1
        grown = book.caches.grow(short, ends) if draft.lacking is None else None
        if grown is not None:
            ops, columns.reserved[short] = grown
            draft.grow(ops)
            return slots
        out = np.zeros(len(columns.gen), bool)
        for slot, end in zip(short.tolist(), ends.tolist(), strict=True):
            sequence = book.tenants[slot]
            if sequence is None:  # preempted just now
                continue
            reserved = self._reserve(sequence, sequence.state, end, draft)
            out[slot] = reserved is None
            draft.grow(reserved or [])
        kept: np.ndarray = slots[(columns.gen[slots] > 0) & ~out[slots]]
        return kept

    def _reserve(self, sequence: Sequence, run: Running, end: int, draft: Draft) -> list[Op] | None:
        """Makes the tables reach ``end``: the ops, or None when the sequence must sit out."""
        if end <= run.reserved:
            return []
        if draft.lacking is not None and sequence.key > draft.lacking:
            draft.lack(sequence)
            return None
        if not self._make_room(sequence, run, end, draft):
            if sequence.state is run:
                draft.lack(sequence)
            return None
        run.reserved = self._book.caches.reserved(end)
        return self._book.caches.reserve(run.slot, end)

    def _make_room(self, sequence: Sequence, run: Running, end: int, draft: Draft) -> bool:
        """Preempts until the blocks up to ``end`` are available. False: not in this plan.

        The victim is the last in FCFS order that is not protected; it may be the one that asks. Nobody is
        preempted while blocks that steps in flight still name will do, and nobody preempts itself while its
        own last step is in flight: that may free blocks, and computes tokens that need not be lost.
        """
        caches = self._book.caches
        while True:
            needed = caches.needed(run.slot, end)
            if caches.fits(needed):
                return True
            if caches.will_fit(needed):
                return False
            victim = next((s for s in reversed(self._book.running) if not s.protected), None)
            if victim is None or (victim is sequence and run.last_step > self._book.last_commit):
                return False
            held = victim.state
            if not isinstance(held, Running):
                raise EngineDead("a sequence is in the running queue that does not run")
            draft.drop(victim, held)
            draft.preempted = True
            self._book.preempt(victim, held)
            if victim is sequence:
                return False

    def _watch_progress(self) -> None:
        """Counts empty plans in a row that nothing explains; too many end the group."""
        book = self._book
        if not book.live or book.in_flight:
            self._empty_plans = 0
            return
        self._empty_plans += 1
        if self._empty_plans >= MAX_EMPTY_PLANS:
            state = (
                f"running {len(book.running)}, waiting {len(book.waiting)}, held {book.num_held}, "
                f"free slots {book.slots.available()}, free blocks {book.caches.free_blocks()}, "
                f"preemptions {book.counts.preemptions}, step {self._step}"
            )
            _log.error("no progress in %d plans while work waits: %s", self._empty_plans, state)
            raise EngineDead(f"the scheduler made no progress while work waited ({state})")
