"""The scheduler: takes sequences in, plans steps, commits their results. Pure: no I/O, no clock, no torch.

``build`` returns the next step as a ``PlanBuilder`` (``weft.scheduler.planner`` chooses its rows). Expert
balance, overlap and the domain set their fields on it. ``seal`` makes the immutable plan, which is in flight
until ``commit`` takes it. A step may be built while another one awaits its commit.

What a sequence lacks that comes from outside the group is awaited, until a deadline: it is no work meanwhile.
Whoever waits for anything else must get on. Sequences that wait without a row in flight are excused by one
thing alone: that they lack blocks, and some are on hold whose deadline has not passed.

A sequence whose Submit has a room is prefilled by one group and decoded by another. It never comes back to
the queue: when it cannot go on, it is given back to its front, with the end "evicted". See
``weft.scheduler.rooms``.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.common.errors import DeadlineExceeded, EngineDead, ErrorInfo, InvalidRequest, Overloaded
from weft.common.log import get_logger
from weft.common.restarts import MOST_LOSSES
from weft.config.budget import check_budget
from weft.config.resolved import KVConfig
from weft.config.sections import SchedulerSection, SpeculationSection, TransferSection
from weft.kv.prefix_log import PrefixLog
from weft.scheduler.commit import commit
from weft.scheduler.constraints import Constraint, TokenMatcher, masks_of
from weft.scheduler.gauges import head_stats
from weft.scheduler.media_rooms import MediaRooms
from weft.scheduler.plan_builder import PlanBuilder
from weft.scheduler.planner import Planner
from weft.scheduler.rooms import SchedulerRooms
from weft.scheduler.sequence import Sequence
from weft.scheduler.state import SchedulerState
from weft.scheduler.validate import check_submit
from weft.types.messages import HeadStats, Submit, TokenEvent
from weft.types.plan import AllocSlot, Op, StepPlan, StepResult, TokenMasks
from weft.types.rooms import Blocks, RoomEvent, RoomKey, RoomRequest

MAX_IN_FLIGHT = 2
MAX_EMPTY_PLANS = 64
"""Plans without rows in a row, while work waits and no row is in flight, before the group gives up."""
AWAIT_S = 600.0
"""Seconds that a sequence awaits what it lacks, unless whoever adds it says until when."""

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
        transfer: TransferSection | None = None,
        remembered_bytes: int = 0,
        retention: float = 0.0,
        *,
        generates: bool = True,
    ) -> None:
        """``kv`` says how many drafts there may be, ``speculation`` whether their number adapts, ``transfer``
        the group's role. ``remembered_bytes``: of earlier prompts, to explain why one was not cached.
        ``retention``: seconds that what a session has cached is kept before others' blocks. ``generates``:
        see ``check_submit``."""
        check_budget(section, kv.block_size, kv.drafts)
        self._section = section
        self._vocab_size = vocab_size
        self._generates = generates
        threshold = section.long_prefill_token_threshold or section.max_num_batched_tokens
        # The drafts that a row verifies are like a chunk, and those that it leaves are reserved with it.
        longest = max(min(threshold, section.max_num_batched_tokens), 1 + kv.drafts) + kv.drafts
        self._state = SchedulerState(kv, longest, remembered_bytes, retention)
        self.planner = Planner(self._state, section, speculation)
        """Chooses the rows."""
        self._step = 0
        self._arrivals = 0
        self._empty_plans = 0
        self._built: PlanBuilder | None = None  # what is to be sealed next
        self._blocked = False  # whether nothing can run until a block on hold is given back
        self._awaited: dict[int, float] = {}  # sequence -> until when it awaits what it lacks
        self._holds = self._state.holds
        role = transfer or TransferSection()
        self._rooms = SchedulerRooms(
            self._state, role, vocab_size, lambda: self.planner.starved, self.planner.promised
        )
        self.embeddings: MediaRooms | None = None
        """Takes part in rooms of embeddings, where these are taken."""
        if kv.media is not None and kv.media.takes:
            self.embeddings = MediaRooms(self._state, self._unblock)

    # ---- sequences

    def add(
        self, submit: Submit, now: float, awaits: bool = False, until: float | None = None
    ) -> list[TokenEvent]:
        """Takes in a sequence. The returned event, if any, is its end: the emitted ids were complete already.

        ``awaits``: it cannot be admitted before ``arrived``, and fails if that does not come ``until`` then
        (``AWAIT_S`` from ``now`` on by default). One with a grammar awaits ``constrain`` in the same way.
        Raises InvalidRequest, ContextLength or Overloaded before anything is changed.
        """
        state = self._state
        tokens, num_prompt = check_submit(
            submit, self._vocab_size, state.kv.max_model_len, state.kv.media, generates=self._generates
        )
        if submit.sequence in state.live:
            raise InvalidRequest("a sequence of this id is live", param="sequence")
        self._rooms.check(submit)
        if self.embeddings is not None:
            self.embeddings.check(submit)
        # A sequence that the next step can admit does not queue: a burst on an idle engine fills its slots
        # first.
        unused = self._section.max_num_seqs - len(state.running)
        if self._num_waiting >= self._section.max_queued_requests + unused:
            raise Overloaded(f"{self._section.max_queued_requests} sequences wait already; try again later")
        most = 0 if submit.pooling else submit.params.max_tokens
        limit = min(num_prompt + most, state.kv.max_model_len)
        sequence = Sequence(submit, tokens, num_prompt, limit, self._arrivals)
        sequence.awaits = awaits = awaits or submit.grammar is not None
        self._arrivals += 1
        if sequence.room is not None:
            state.rooms.open(sequence)
        state.images.open(sequence, now)
        ending = sequence.ending() if sequence.num_output else None
        if ending is not None:
            state.images.ended(sequence, ending[0])
            state.rooms.ended(sequence, ending[0], None)
            position = sequence.position
            finish, stop_id = ending
            return [TokenEvent(sequence=sequence.id, finish=finish, stop_id=stop_id, position=position)]
        state.arrive(sequence)
        if awaits:
            self._awaited[sequence.id] = now + AWAIT_S if until is None else until
        self._blocked = False
        return []

    def arrived(self, sequence: int) -> None:
        """What a sequence awaited is there: it waits for its turn like any other. Unknown ids are fine."""
        found = self._state.live.get(sequence)
        self._awaited.pop(sequence, None)
        if found is not None:
            self._state.arrived(found)
            self._blocked = False

    def constrain(self, sequence: int, matcher: TokenMatcher, end_ids: Iterable[int]) -> list[TokenEvent]:
        """The grammar that a sequence awaited is there; its output so far goes into ``matcher``, which stands
        at the start. ``end_ids``: see ``Constraint``. Returns the sequence's end, if it cannot go on, or is
        complete. Unknown ids are fine.
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
            self._awaited.pop(sequence, None)
            self._state.end(found, "stop")
            return [TokenEvent(sequence=sequence, finish="stop", position=found.position)]
        self.arrived(sequence)
        return []

    def fail(self, sequence: int, error: ErrorInfo) -> list[TokenEvent]:
        """Ends a sequence whose grammar is of no use. Unknown ids are fine."""
        found = self._state.live.get(sequence)
        if found is None:
            return []
        self._awaited.pop(sequence, None)
        self._state.counts.grammar_errors += 1
        self._state.end(found, "error", error)
        self._blocked = False
        return [TokenEvent(sequence=sequence, finish="error", error=error, position=found.position)]

    def expire(self, now: float) -> list[TokenEvent]:
        """Ends sequences that have awaited what they lack for too long. Call it often, work or none."""
        self._state.retention.expire(now)
        self._blocked = self._blocked and self._state.excuse(now)
        late = [sequence for sequence, until in self._awaited.items() if now >= until]
        events: list[TokenEvent] = []
        for number in late:
            del self._awaited[number]
            if (sequence := self._state.live.get(number)) is None:
                continue
            error = DeadlineExceeded("what the request awaited did not come in time").info()
            self._state.end(sequence, "error")
            events.append(TokenEvent(sequence=number, finish="error", error=error))
        self._rooms.expire(now)
        if self.embeddings is not None:
            self.embeddings.expire(now)
        events += self._state.rooms.given_back()
        if events:
            self._blocked = False
        return events

    @property
    def awaiting(self) -> bool:
        """Whether nothing can be done before something comes from outside: what is awaited, or a block."""
        state = self._state
        awaited = self._awaited or self._blocked or state.rooms.awaited or state.images.awaited
        return bool(awaited) and not self.has_work()

    def finish(self, sequence: int) -> list[TokenEvent]:
        """Ends a sequence from outside. Unknown and ended ones are fine: then there is no event, unless
        that of the end was not told yet."""
        found = self._state.live.get(sequence)
        if found is None:
            return self._state.rooms.untold(sequence)  # else they would end a later attempt of that id
        self._awaited.pop(sequence, None)
        self._state.end(found, "abort")
        self._blocked = False
        num_cached = max(found.num_cached, 0)
        return [TokenEvent(sequence=sequence, num_cached=num_cached, finish="abort", position=found.position)]

    def lose(self) -> None:
        """Ranks are lost, and no step is made until ``requeue_all``: sequences of rooms that run are given
        back at once. To be called before rooms are told, so that each has its own end."""
        self._rooms.lose()

    def requeue_all(self) -> list[TokenEvent]:
        """The group was lost: everything that ran waits again, as prompt + what was told of its output.

        To be called when the ranks have empty slot tables. Steps in flight are forgotten (their results must
        not be committed), pools are at their idle counts and the prefix cache is empty. Step numbers go on.
        Returns the ends of those with which the group was lost too often, and of those that are given back.
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
        return events + self._state.rooms.given_back()

    def enqueue(self, op: Op) -> None:
        """``op`` goes out with the next plan, which is made for it alone if there are no rows. A slot that it
        names has its sequence by the plans before; if that ends first, the op is dropped."""
        self._state.ops.append(op)

    def hold(self, kind: int, block: int, until: float) -> None:
        """Keeps ``block`` of cache kind ``kind`` out of use until ``unhold``: a transfer outside the group
        may read or write it. Outlives the block's sequence, ``requeue_all``, and ``until``: from then on it
        no longer excuses that others lack blocks, and lack of progress ends the group within milliseconds.
        So ``until`` is later than any time at which the transfer, its fence included, can end."""
        self._holds.hold(kind, block, until)

    def unhold(self, kind: int, block: int) -> None:
        """The other side of one ``hold``."""
        self._holds.unhold(kind, block)
        self._blocked = False

    # ---- rooms

    def room(self, event: RoomEvent, now: float) -> list[TokenEvent]:
        """Hears what happened to a room: the first token of a sequence whose cache has come, or ends."""
        self._state.rooms.now = now
        self._rooms.on(event)
        self._blocked = False
        return self._state.rooms.given_back()

    def room_requests(self) -> list[RoomRequest]:
        """What is asked of rooms since the last call, in order. To be called after whatever changes anything
        here, and not between ``build`` and ``seal``."""
        return self._rooms.requests()

    def room_blocks(self, key: RoomKey) -> tuple[Blocks, ...]:
        """A sender's own block tables as far as they are made, for each kind what the room reads; of a state
        its snapshot, once a plan that saves it was sealed. () before it has a slot, and of unknown rooms."""
        return self._state.rooms.tables(key)

    def has_work(self) -> bool:
        """Whether there is something to plan or to commit. What is awaited is none."""
        state = self._state
        wanting = (state.waiting or len(state.running)) and not self._blocked
        return bool(wanting or state.asks or state.in_flight)

    @property
    def in_flight(self) -> int:
        """Plans that await their commit."""
        return len(self._state.in_flight)

    # ---- steps

    def plan(self, now: float) -> StepPlan | None:
        """``build`` and ``seal`` at once, where no other component sets fields of the plan."""
        builder = self.build(now)
        return None if builder is None else self.seal(builder)

    def build(self, now: float) -> PlanBuilder | None:
        """The next step, for ``seal``, or None when nothing can run before a commit or an arrival.

        Nothing else may be asked of the scheduler between the two. Raises EngineDead when two steps are in
        flight already, when the last builder was not sealed, and when nothing could be planned for long
        though work waits and no step is in flight.
        """
        self._state.rooms.now = now
        self._state.retention.expire(now)
        while True:
            builder = self._begin(self._section.max_num_batched_tokens)
            self.planner.fill(builder)
            if builder.rows or not (builder.preempted or self._despairs()):
                break  # else the blocks of preempted sequences may be free at once: try again
        self._state.media.desperate = False
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
        """The next step without rows, since nothing can run here while other replicas of the domain step.

        Raises as ``build``.
        """
        self._built = self._begin(0)
        return self._built

    def seal(self, builder: PlanBuilder) -> StepPlan:
        """Makes the plan of ``builder``, which is in flight from now on. Raises EngineDead for any but the
        last builder.
        """
        if builder is not self._built:
            raise EngineDead("a step is to be launched that is not the one that was built last")
        state = self._state
        step = builder.step
        first = [*state.slots.announce(), *state.take_ops(step), *state.save(step), *state.snapshots(step)]
        plan = builder.seal(first)
        state.launched(plan)
        self._step += 1
        self._built = None
        return plan

    def admitted(self, plan: StepPlan) -> list[int]:
        """Sequences that get their slots by ``plan``, the one that was sealed last."""
        column = self._state.columns.sequence
        return [int(column[op.slot]) for op in plan.ops if isinstance(op, AllocSlot)]

    def masks(self, plan: StepPlan) -> TokenMasks:
        """What the rows of ``plan`` may sample, which is ``constrained``. All plans before it have
        committed. Raises EngineDead if not."""
        state = self._state
        if not state.in_flight or state.in_flight[0] is not plan:
            raise EngineDead("masks are made once all steps before have committed")
        columns = state.columns
        return masks_of(plan, self._vocab_size, columns.gen, columns.constrained, state.in_slot)

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Applies the result of the oldest plan in flight. See ``weft.scheduler.commit``."""
        events = commit(self._state, plan, result, self.planner.drafts)
        return events + self._state.rooms.given_back() if self._state.rooms.events else events

    def observe(self, plan: StepPlan, seconds: float, uncaptured: bool = False) -> None:
        """``plan`` took the device ``seconds``, from the end of the step before it if that was later.

        ``uncaptured``: longer than others like it will, which are replayed; so nothing is learned from it.
        """
        if not plan.rows:
            return
        chunks = self.planner.chunks
        drafts = self.planner.drafts
        if chunks is not None and not uncaptured:
            chunks.observe(plan, seconds)
        if drafts is not None:
            drafts.observe(plan, seconds, fit=chunks is None, uncaptured=uncaptured)

    @property
    def steps(self) -> int:
        """Steps committed."""
        return self._state.counts.steps

    def follow_prefixes(self) -> tuple[PrefixLog, int] | None:
        """``Caches.follow``; None as well where prefixes are not shared."""
        return self._state.caches.follow() if self._state.kv.enable_prefix_caching else None

    def stats(self) -> HeadStats:
        """Counters and gauges."""
        return head_stats(self._state, self._num_waiting, self._rooms.stats())

    # ----

    def _begin(self, budget: int) -> PlanBuilder:
        if len(self._state.in_flight) >= MAX_IN_FLIGHT:
            raise EngineDead(f"{MAX_IN_FLIGHT} steps are in flight already")
        if self._built is not None:
            raise EngineDead("a step was built and never sealed")
        return PlanBuilder(self._step, budget, self._state.columns)

    @property
    def _num_waiting(self) -> int:
        return len(self._state.live) - len(self._state.running)

    def _despairs(self) -> bool:
        """Whether a step without rows is tried once more, as nothing runs and what lacks room for an image
        may take it from sequences without a slot."""
        state = self._state
        if not state.media.short or state.media.desperate or any(plan.rows for plan in state.in_flight):
            return False
        state.media.desperate = True
        return True

    def _unblock(self) -> None:
        self._blocked = False

    def _watch_progress(self, now: float) -> None:
        """Counts plans without rows in a row that nothing explains; too many end the group.

        Rows in flight are progress. A hold explains it until its deadline, where blocks are what is lacking.
        """
        state = self._state
        waits = state.waiting or len(state.running)
        lacking = self.planner.lacked or self.planner.starved or state.rooms.parting or state.media.short
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
