"""The scheduler: takes sequences in, plans steps, commits their results. Pure: no I/O, no clock, no torch.

A plan is made in phases, each a function below: decode rows are reserved first, then prefills under way go
on, then new sequences are admitted, in the order of ``weft.scheduler.queue``. ``plan`` may run one step
ahead of ``commit``.
"""

from __future__ import annotations

import numpy as np

from weft.common.errors import EngineDead, InvalidRequest, Overloaded
from weft.common.log import get_logger
from weft.common.restarts import MOST_LOSSES
from weft.config.budget import check_budget
from weft.config.resolved import KVConfig
from weft.config.sections import SchedulerSection, SpeculationSection
from weft.scheduler.book import Book
from weft.scheduler.chunk import ChunkPolicy
from weft.scheduler.commit import commit
from weft.scheduler.draft import DecodeRows, Draft, Row
from weft.scheduler.drafting import DraftPolicy
from weft.scheduler.fit import CostFitter
from weft.scheduler.reserve import Reserver
from weft.scheduler.sequence import Running, Sequence
from weft.scheduler.validate import check_submit
from weft.types.messages import HeadStats, Submit, TokenEvent
from weft.types.plan import Op, StepPlan, StepResult

MAX_IN_FLIGHT = 2
NO_SLOT = -1
"""Where tables are asked what a sequence needs that has none yet."""
MAX_EMPTY_PLANS = 64
"""Plans in a row that may be empty while work waits and nothing is in flight, before the group gives up."""

_log = get_logger(__name__)


class Scheduler:
    """The control core of one group.

    Raises ConfigError, naming the flags, when the caches cannot hold one sequence of ``max_model_len``, or
    when the decode rows of a step could leave prefill less than one block of tokens.
    """

    def __init__(
        self,
        kv: KVConfig,
        section: SchedulerSection,
        vocab_size: int,
        speculation: SpeculationSection | None = None,
    ) -> None:
        """``kv`` says how many drafts there may be, ``speculation`` whether their number adapts."""
        check_budget(section, kv.block_size, kv.drafts)
        self._section = section
        self._vocab_size = vocab_size
        self._threshold = section.long_prefill_token_threshold or section.max_num_batched_tokens
        # The drafts that a row verifies are like a chunk, and those that it leaves are reserved with it.
        longest = max(min(self._threshold, section.max_num_batched_tokens), 1 + kv.drafts) + kv.drafts
        self._book = Book(kv, longest)
        self._reserver = Reserver(self._book)
        self._most_running = min(section.max_num_seqs, kv.num_slots)
        self._exclusive = section.step_policy == "exclusive"
        self._fitter = CostFitter()
        self.chunks = (
            ChunkPolicy(section.itl_target_ms / 1e3, self._fitter) if section.itl_target_ms else None
        )
        """Sizes prompt chunks by time; None without ``--itl-target-ms``."""
        self.drafts: DraftPolicy | None = None
        """Chooses the number of drafts; None without speculation."""
        if kv.drafts:
            adaptive = speculation is None or speculation.speculative_adaptive
            self.drafts = DraftPolicy(kv.drafts, adaptive, self._book.columns, self._fitter)
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

    def requeue_all(self) -> list[TokenEvent]:
        """The group was lost: everything that ran waits again, as prompt + what was told of its output.

        To be called when the ranks have empty slot tables. Steps in flight are forgotten (their results must
        not be committed), pools are at their idle counts and the prefix cache is empty. Step numbers go on.
        Returns the ends of those with which the group was lost too often.
        """
        self._lacked, self._empty_plans = False, 0
        often = [sequence for sequence in self._book.requeue() if sequence.lost()]
        for sequence in often:
            self._book.end(sequence, "error")
        error = EngineDead(f"the engine was lost {MOST_LOSSES} times while it worked on this request").info()
        return [
            TokenEvent(sequence=s.id, num_cached=max(s.num_cached, 0), finish="error", error=error)
            for s in often
        ]

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

    def idle(self) -> StepPlan:
        """The next step without rows, since nothing can run here while other replicas of the domain step.

        Raises EngineDead when two steps are in flight already.
        """
        if len(self._book.in_flight) >= MAX_IN_FLIGHT:
            raise EngineDead(f"{MAX_IN_FLIGHT} steps are in flight already")
        return self._launch(Draft(self._step, 0, self._book.columns))

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Applies the result of the oldest plan in flight. See ``weft.scheduler.commit``."""
        return commit(self._book, plan, result, self.drafts)

    def observe(self, plan: StepPlan, seconds: float, cold: bool = False) -> None:
        """``plan`` took the device ``seconds``, from the end of the step before it if that was later.

        ``cold``: longer than others like it will, which are replayed; so nothing is learned from it.
        """
        if not plan.rows:
            return
        if self.chunks is not None and not cold:
            self.chunks.observe(plan, seconds)
        if self.drafts is not None:
            self.drafts.observe(plan, seconds, fit=self.chunks is None, cold=cold)

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
            idle_steps=counts.idle_steps,
            running=len(book.running),
            waiting=len(book.waiting) + book.num_held,
            kv_usage=book.caches.usage(),
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
            free_blocks=book.caches.free_blocks(),
            free_slots=book.slots.available(),
        )

    # ---- the phases of a plan

    def _fill_mixed(self, draft: Draft) -> None:
        self._decode(draft)
        if self.chunks is not None:
            self.chunks.begin(draft.decode_shape)
        self._resume(draft)
        self._admit(draft)

    def _fill_exclusive(self, draft: Draft) -> None:
        """Prefill first, one segment. After a plan that lacked blocks, who lacked them is asked first."""
        if not self._lacked:
            self._resume(draft)
            self._admit(draft)
        if not draft.prefill:
            self._decode(draft)
        if self._lacked and not len(draft.decode.slots):
            self._resume(draft)
            self._admit(draft)

    def _decode(self, draft: Draft) -> None:
        """One row for every sequence past its known ids. One that may have reached its limit sits out."""
        book, columns = self._book, self._book.columns
        slots = book.order()
        ready = ~columns.prefilling(slots) & (columns.num_scheduled[slots] + 1 < columns.limit[slots])
        rows = DecodeRows.plain(slots[ready][: max(draft.budget, 0)])
        if self.drafts is not None and not self.drafts.resting():
            rows = self._with_drafts(self.drafts, rows, draft.budget)
        ends = columns.num_scheduled[rows.slots] + rows.counts + rows.next_k
        short = ends > columns.reserved[rows.slots]
        if short.any():
            rows = self._reserver.grow(rows, short, draft)
        draft.add_decode(rows)

    def _with_drafts(self, policy: DraftPolicy, rows: DecodeRows, budget: int) -> DecodeRows:
        """The rows with the drafts that lie ready for them, and those to propose, all within their limits.

        Drafts are shortened so that prompts get a block of the ``budget``, if there are any.
        """
        book, columns, slots = self._book, self._book.columns, rows.slots
        starts = columns.num_scheduled[slots]
        room = columns.limit[slots] - 1 - starts
        waits = len(book.waiting) or len(slots) < len(book.running)
        counts = 1 + np.minimum(columns.drafts[slots], room - 1)
        rows = DecodeRows(slots, counts, rows.next_k).within(budget - (book.kv.block_size if waits else 0))
        next_k = policy.choose(slots, starts, np.maximum(room - rows.counts - 1, 0))
        return DecodeRows(slots, rows.counts, next_k)

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
            next_k = self._first_drafts(draft, sequence, run.slot, start, end, [])
            ops = self._reserver.reserve(sequence, run, end + next_k, draft)
            if ops is not None:
                self._add_chunk(draft, sequence, run, end, next_k, ops)

    def _admit(self, draft: Draft) -> None:
        """Waiting sequences in their order, while a slot, budget and blocks for all known ids are there.

        Where a slot alone is missing, a sequence of a larger share gives its own up; while steps in flight
        still name that, nobody else does.
        """
        book = self._book
        if draft.lacking is not None or draft.preempted or not book.waiting:
            return
        promised = self._promised()
        while book.waiting and draft.budget >= 1:
            sequence, yielding = book.waiting.first(), None
            if len(book.running) >= self._most_running:
                yielding = book.crowding(sequence)
                if yielding is None:
                    return
            elif not book.slots.available():
                return
            if sequence.protected and not book.guaranteed(sequence):
                return
            hashes, num_hit = book.lookup(sequence)
            known = len(sequence.tokens)
            needed = book.caches.needed(NO_SLOT, known + 1, num_hit, hashes)
            if not book.caches.fits([n + p for n, p in zip(needed, promised, strict=True)]):
                return
            if yielding is not None:
                book.waiting.invite(sequence)
                self._reserver.preempt(yielding, draft, yields=True)
                promised = self._promised()
                continue
            end = self._chunk_end(sequence, num_hit, known, draft)
            if end <= num_hit:
                return
            marks = book.marks(sequence, hashes, num_hit)
            if marks is not None:
                end = marks.cut(num_hit, end, num_hit)
            next_k = self._first_drafts(draft, sequence, book.slots.peek(), num_hit, end, hashes)
            run, ops = book.admit(sequence, hashes, num_hit, end + next_k, marks)
            if self.drafts is not None:
                self.drafts.enter(run.slot)
            self._add_chunk(draft, sequence, run, end, next_k, ops)
            rest = book.caches.needed(run.slot, known + 1)
            promised = [p + n for p, n in zip(promised, rest, strict=True)]

    def _seal(self, draft: Draft) -> StepPlan | None:
        if not draft.rows:
            self._watch_progress()
            return None
        self._empty_plans = 0
        return self._launch(draft)

    def _launch(self, draft: Draft) -> StepPlan:
        book = self._book
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

    def _first_drafts(
        self, draft: Draft, sequence: Sequence, slot: int, start: int, end: int, hashes: list[bytes]
    ) -> int:
        """Drafts to propose after a prompt's last chunk; none after others, or where blocks are short.

        ``hashes``: of a sequence that is admitted from the cache with ``start`` tokens; else empty.
        """
        known = len(sequence.tokens)
        room = sequence.limit - 2 - known
        if self.drafts is None or end < known or room < 1 or draft.lacking is not None:
            return 0
        next_k, caches = self.drafts.first(room), self._book.caches
        upto = end + next_k
        fits = caches.cut(start, upto) == upto and caches.fits(caches.needed(slot, upto, start, hashes))
        return next_k if fits else 0

    def _add_chunk(
        self, draft: Draft, sequence: Sequence, run: Running, end: int, next_k: int, ops: list[Op]
    ) -> None:
        start = run.num_scheduled
        if self.chunks is not None:
            self.chunks.took(start, end - start)
        logits, sample = sequence.prefill_logits(start, end)
        draft.add_prefill(Row(sequence, run, start, end - start, logits, sample, next_k, ops))

    def _promised(self) -> list[int]:
        """Blocks of each kind that the prefills under way will still take: not there for admission."""
        book = self._book
        total = [0] * len(book.caches.kinds)
        slots = book.order()
        for slot in slots[book.columns.prefilling(slots)].tolist():
            needed = book.caches.needed(slot, int(book.columns.known[slot]) + 1)
            total = [t + n for t, n in zip(total, needed, strict=True)]
        return total

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
