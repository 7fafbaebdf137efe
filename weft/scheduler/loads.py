"""Loads of blocks from a KV tier for waiting sequences: what to load, how long to wait, when to stop.

    arrival, admission ─ pool and store have more than the pool ─> Blocked ─ loaded, cut or late ─> Waiting
                                                                     │ ^
                                                    commands to ranks╰─╯blocks enter the prefix cache

A sequence waits for a load only while loading is predicted to be faster than computing. If other sequences
wait already, the blocks of a new sequence are looked up when the sequence could be admitted: until then, the
other sequences may evict blocks of the pool. Loads are served in order of arrival. Each load requests its
blocks in order of position. Blocks loaded before the wait ends are an ordinary prefix hit. Until the
admission, these blocks are evicted after all other blocks. Pure: no I/O, no clock. ``weft.kv.tiers`` has the
states of the blocks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from weft.kv.tiers import Copied as CopiedBlocks
from weft.kv.tiers import Lost, Resolved, TierAction, TierBook, TierEvent, TierTick, TurnEnded, Wanted
from weft.scheduler.policy.fit import CostFitter
from weft.scheduler.policy.load_speed import LoadSpeeds
from weft.scheduler.policy.step_cost import PRIOR, CostModel, StepShape, decode_shape, shape_of
from weft.scheduler.sequence import Running
from weft.scheduler.sequence import Sequence as Stream
from weft.scheduler.state import SchedulerState
from weft.types.plan import StepPlan
from weft.types.tiers import (
    LEVELS,
    BlockOutcome,
    CopyBlocks,
    Entry,
    LevelStats,
    Owner,
    StoredElsewhere,
    StoreState,
    TierStats,
)

_MOST_PREDICTED = 32
"""Maximum chunks of a prompt whose costs are predicted one by one."""
_MOST_COMPARED = 16
"""Maximum waiting loads that each report compares with computing, in order of the queue."""
_MOST_LOOKED = 256
"""Maximum blocks of a load that one command considers."""
_MISS_REASONS = {"cut": "slower", "late": "loading"}
"""Outcome of a load -> reason in the explanation of a cache miss. Other outcomes are reasons themselves."""
SOONEST_S, LATEST_S = 0.5, 30.0
"""Minimum and maximum seconds that a sequence waits for a load. Between the bounds, the wait equals the
predicted seconds of computing."""


_NO_BYTES = (0,) * len(LEVELS)


@dataclass(slots=True, eq=False)
class _Load:
    """The load of one waiting sequence."""

    sequence: Stream
    hashes: list[bytes]
    """Hashes of the full blocks of the known ids."""
    limit: int
    """Number of leading positions that need not be computed: ``Sequence.may_skip``."""
    reach: int
    """Length of the prefix after the load, in tokens."""
    before: int
    """Length of the prefix in the pool before the load."""
    left: list[Entry]
    """Blocks not yet requested, in reverse order."""
    places: dict[Entry, int]
    """Place in ``LEVELS`` of the level of each block at the arrival."""
    nbytes: list[int]
    """Bytes of ``left`` on one rank, of each level."""
    pending: set[Entry]
    """Blocks that commands under way load."""
    needs: Sequence[int] | None
    """Blocks of each KV cache group that the sequence will take; None for a load at the arrival. A load with
    ``needs`` belongs to a sequence that fits into the pool. So the load does not wait for the admission of
    other sequences."""
    began: float = math.nan
    """Time of the first ``requests`` with the load; NaN before."""
    due: float = math.inf
    """Deadline of the wait; infinite before ``began``."""


class Loads:
    """The loads of one scheduler, and the tier's part in the ends of sequences."""

    def __init__(
        self,
        state: SchedulerState,
        book: TierBook,
        most_tokens: int,
        promised: Callable[[], list[int]],
        starved: Callable[[], bool],
        changed: Callable[[], None],
        cost: Callable[[], CostModel] | None = None,
    ) -> None:
        """``most_tokens``: maximum tokens of a step. ``promised``, ``starved``: see ``Planner``. ``changed``:
        called when blocks may have become free. ``cost``: returns the cost model of steps; by default a model
        fitted here."""
        self._state, self.book = state, book
        self._chunk = most_tokens
        self._promised, self._starved, self._changed = promised, starved, changed
        self._fitter = CostFitter() if cost is None else None
        self._cost = cost or (lambda: self._fitted())
        self._loads: OrderedDict[int, _Load] = OrderedDict()
        self._ended: list[TurnEnded] = []
        """Ends of sequences since the last ``requests``. Handled there, because the blocks and snapshots of
        the last step are in the prefix cache by then."""
        self._actions: list[CopyBlocks] = []
        self.speeds = LoadSpeeds(len(LEVELS))
        self._level_bytes = [0] * len(LEVELS)
        """Bytes requested from each level."""
        self._now = -math.inf
        """Time of the last call."""
        self._notes: dict[int, tuple[str, int]] = {}
        """Sequence not yet admitted -> (why the load ended early, prefix in pool and store)."""
        self._reached: dict[int, tuple[int, int]] = {}
        """Sequence not yet admitted -> (prefix before the load, prefix after the load)."""
        self._kept: dict[int, list[Sequence[bytes]]] = {}
        """Sequence not yet admitted -> the result of ``Caches.retain`` for the prefix of its load."""
        self.store = StoreState()
        self._outcomes: dict[str, int] = {}
        self._seconds = 0.0
        self._saved = 0

    # ---- called by the scheduler's state

    def block(self, sequence: Stream, needs: Sequence[int] | None = None) -> bool:
        """Return True if a sequence that could enter the queue, or could be admitted, must wait for a load.

        ``needs``: blocks of each KV cache group that a sequence at its admission will take; None at the
        arrival. A sequence has at most one load at the arrival, and one load at the admission after an
        arrival, a preemption or a loss of ranks. If other sequences wait, there is no load at the arrival:
        the other sequences would evict the blocks."""
        if sequence.loading or sequence.fetches or self.book.off:
            return sequence.loading
        if sequence.loads_left < (2 if needs is None else 1) or (needs is None and self._state.waiting):
            return False
        limit = sequence.may_skip()
        hashes = self._state.hashes(sequence, len(sequence.tokens)) if limit else []
        if not hashes or not self._state.kv.enable_prefix_caching:
            return False
        before = self._state.caches.hit(hashes, limit)
        reach = self.book.hit(hashes, limit)
        if reach <= before:
            return False
        entries = self.book.missing(hashes, reach)
        places = {entry: self.book.place_of(entry) for entry in entries}
        all_bytes = self._by_level(entries, places)
        bytes_ahead = _sums(load.nbytes for load in self._loads.values())
        if self._load_seconds(_sums((bytes_ahead, all_bytes))) >= self._compute_seconds(before, reach):
            self.speeds.refused(all_bytes)
            self._notes[sequence.id] = ("slower", reach)
            self._count("slower")
            sequence.loads_left = 0
            return False
        self._touch(hashes, reach)
        self._end_retention(sequence)
        self._kept[sequence.id] = self._state.caches.retain(hashes[: reach // self._state.kv.block_size])
        pending = {entry for entry in entries if self.book.is_loading(entry)}
        left = [entry for entry in reversed(entries) if entry not in pending]
        nbytes = self._by_level(left, places)
        load = _Load(sequence, hashes, limit, reach, before, left, places, nbytes, pending, needs)
        self._loads[sequence.id] = load
        sequence.loading, sequence.loads_left = True, 1 if needs is None else 0
        return True

    def leaves(self, sequence: Stream, *, failed: bool = False, preempted: bool = False) -> None:
        """Note that a sequence ended or was preempted. Call before the slot is released."""
        self._loads.pop(sequence.id, None)
        self._notes.pop(sequence.id, None)
        self._reached.pop(sequence.id, None)
        self._end_retention(sequence)
        if preempted:
            sequence.loads_left = 1
        run = sequence.state
        if failed or not isinstance(run, Running) or sequence.chain is None:
            return
        if sequence.weights != self._state.weights:
            return  # the weights have changed since: no other sequence can use the later blocks
        base = self._state.kv.block_size
        computed = int(self._state.columns.num_computed[run.slot]) // base
        owner = Owner(sequence.payer, sequence.salt, sequence.session)
        hashes = sequence.chain.hashes[:computed]
        prompt = min(sequence.num_prompt // base, computed)
        self._ended.append(TurnEnded(hashes, prompt, owner, preempted))

    def explain(self, sequence: Stream, num_hit: int) -> None:
        """Explain a load that ended early, or a block that the tier does not have, at the first admission of
        a sequence with a hit of ``num_hit``."""
        miss, (why, reach) = sequence.miss, self._notes.get(sequence.id, ("", 0))
        if miss is None:
            return
        if not why and miss.reason in ("evicted", "state", "new"):
            why, reach = self._why_absent(sequence, num_hit), num_hit + 1
            if not why and miss.reason == "evicted" and self.book.mode == "sessions":
                why = "not_chosen"
        if why and num_hit < reach:
            sequence.miss = msgspec.structs.replace(miss, reason=why, position=num_hit, theirs=b"")

    def _why_absent(self, sequence: Stream, num_hit: int) -> str:
        """Return why the tier does not have the block after a hit of ``num_hit``; "" if unknown."""
        reach = num_hit + self._state.caches.unit
        hashes = [] if sequence.chain is None else sequence.chain.hashes
        if len(hashes) * self._state.kv.block_size < reach:
            return ""
        return next(filter(None, map(self.book.why, self.book.missing(hashes, reach))), "")

    def admitted(self, sequence: Stream, num_hit: int) -> None:
        """Note an admission of a sequence with a hit of ``num_hit``. Count saved tokens."""
        self._notes.pop(sequence.id, None)
        self._end_retention(sequence)
        before, after = self._reached.pop(sequence.id, (num_hit, num_hit))
        self._saved += max(0, min(num_hit, after) - before)

    def lost(self) -> None:
        """End all loads after the caches were reset. Results of commands under way will be ignored. Requeued
        sequences may load the blocks that are in the store."""
        self._ended.clear()
        self._kept.clear()
        self._apply(self.book.on(Lost(), 0.0))
        # The blocks of unsent commands have other contents now. So the commands end here as lost.
        unsent, self._actions = self._actions, []
        for command in unsent:
            outcomes = bytes([BlockOutcome.LOST]) * command.size
            self._apply(self.book.on(CopiedBlocks(command.job, outcomes, 0, 0.0), self._now))
        for load in list(self._loads.values()):
            self._end_wait(load, "lost", math.nan)

    # ---- called by the scheduler

    @property
    def any_blocked(self) -> bool:
        """True if a sequence waits for a load."""
        return bool(self._loads)

    def reserved(self) -> list[int]:
        """Return the blocks of each KV cache group that sequences with loads at the admission will take. An
        admission of another sequence must leave these blocks free. So the admission evicts no loaded
        block."""
        needs = (load.needs for load in self._loads.values() if load.needs is not None)
        return [sum(each) for each in zip([0] * len(self._state.caches.kinds), *needs, strict=True)]

    def excuse(self, now: float) -> bool:
        """Return True if a load at the admission reserves blocks, and the load's deadline has not passed."""
        return any(load.needs is not None and now < load.due for load in self._loads.values())

    @property
    def next_due(self) -> float | None:
        """Time of the next deadline of a waiting sequence; None without one."""
        return min((load.due for load in self._loads.values() if load.due < math.inf), default=None)

    @property
    def moving(self) -> bool:
        """True while commands are under way or blocks wait to be stored, unless the disk is stuck or off."""
        return bool(self._ended or self.book.busy) and not self.book.off

    def expire(self, now: float) -> None:
        """End the wait of loads past the deadline: the sequences continue with the blocks loaded so far."""
        self._now = now
        for load in [load for load in self._loads.values() if load.due <= now]:
            self._end_wait(load, "late", now)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Fit the cost model with the device ``seconds`` of ``plan``. Ignores plans without prompts."""
        if self._fitter is not None and plan.prefill.rows:
            self._fitter.observe(shape_of(plan), seconds)

    # ---- called by the engine

    def requests(self, now: float) -> list[CopyBlocks]:
        """Return the commands for the ranks. Call after every change to the scheduler, but not between
        ``build`` and ``freeze``. Cheap when there are none."""
        self._now = now
        if self._ended:
            ended, self._ended = self._ended, []
            for turn in ended:
                self._apply(self.book.on(turn, now))
        if self._loads:
            self._serve(now)
        if self.book.busy:
            self._apply(self.book.on(TierTick(), now))
        commands, self._actions = self._actions, []
        return commands

    def on(self, event: TierEvent | StoreState | StoredElsewhere, now: float) -> None:
        """Apply an event of the ranks or of the store."""
        if isinstance(event, StoredElsewhere):
            self.book.elsewhere = event.keys
            return
        if isinstance(event, StoreState):
            self.store = event
            return
        # A command without a loaded block is no measurement of the speed.
        if (
            isinstance(event, CopiedBlocks)
            and event.nbytes * event.seconds > 0
            and self.book.loads(event.job)
        ):
            self.speeds.levels[self.book.loads_from(event.job)].observe(event.nbytes, event.seconds)
        self._apply(self.book.on(event, now))
        bytes_ahead = [0] * len(LEVELS)
        for number, load in enumerate(list(self._loads.values())):
            # Loads far behind in the queue have requested nothing yet: the deadline is enough for them. A
            # load with commands under way is compared, too, because two commands are always under way.
            if (load.left and number < _MOST_COMPARED) or not load.pending:
                self._check(load, bytes_ahead, now)
            if load.sequence.loading:
                bytes_ahead = _sums((bytes_ahead, load.nbytes))
        self._changed()

    def stats(self, now: float = -math.inf) -> TierStats:
        """Return the statistics of the tier at ``now``, or at the last call."""
        levels = {name: self._level(place, name) for place, name in enumerate(LEVELS)}
        known = {name: one for name, one in levels.items() if name in self.store.levels or one.loaded}
        return TierStats(
            nbytes=sum(one.nbytes for one in known.values()),
            blocks=self.book.num_stored,
            waiting=len(self._loads),
            pinned=self.book.num_copying,
            off=int(bool(self.book.off) or self.book.stalled(max(now, self._now))),
            loads=dict(self._outcomes),
            load_bytes=sum(self._level_bytes),
            load_seconds=self._seconds,
            stores=dict(self.book.stored),
            skipped=dict(self.book.skipped),
            evictions=sum(one.evicted + one.expired for one in known.values()),
            saved_tokens=self._saved,
            levels=known,
        )

    def _level(self, place: int, name: str) -> LevelStats:
        """Return the statistics of the level at ``place`` of ``LEVELS``."""
        return msgspec.structs.replace(
            self.store.levels.get(name, LevelStats()),
            blocks=self.book.blocks[place],
            loaded=self.book.loaded[place],
            load_bytes=self._level_bytes[place],
            stores=dict(self.book.stored_in[place]),
        )

    # ----

    def _apply(self, actions: Sequence[TierAction]) -> None:
        """Queue the commands of ``actions``, and remove blocks with a result from the pending blocks of all
        loads."""
        for action in actions:
            if isinstance(action, CopyBlocks):
                self._actions.append(action)
            elif isinstance(action, Resolved):
                for load in self._loads.values():
                    if load.pending:
                        load.pending.difference_update(action.entries)

    def _serve(self, now: float) -> None:
        """Request the next blocks of the waiting sequences, in order of arrival, as far as there is room."""
        for load in list(self._loads.values()):
            if math.isnan(load.began):
                load.began = now
                seconds = self._compute_seconds(load.before, load.reach)
                load.due = now + min(max(seconds, SOONEST_S), LATEST_S)
        if self.book.off or self.book.stalled(now):
            # A stuck disk gets no further commands. So a load without a command under way cannot continue.
            for load in [load for load in self._loads.values() if not load.pending]:
                self._end_wait(load, "off" if self.book.off else "late", now)
            return
        starved = self._starved()  # admission comes first
        for load in [load for load in self._loads.values() if load.needs is not None or not starved]:
            while load.left:
                if not self._request(load, now):
                    return
            if not load.pending:
                self._check(load, _NO_BYTES, now)

    def _request(self, load: _Load, now: float) -> bool:
        """Request the next blocks of a load. Return False if there is no room for further commands."""
        while load.left and (self._in_pool(load.left[-1]) or self.book.is_loading(load.left[-1])):
            entry = load.left.pop()
            self._subtract(load, [entry])
            if self.book.is_loading(entry):
                load.pending.add(entry)
        if not load.left:
            return True
        # One command loads from one level, so that each command measures one level.
        place = load.places[load.left[-1]]
        # The same key twice in one command would load the block twice.
        next_entries = dict.fromkeys(load.left[: -_MOST_LOOKED - 1 : -1])
        leading = [
            entry
            for entry in next_entries
            if load.places[entry] == place and not self._in_pool(entry) and not self.book.is_loading(entry)
        ]
        entries = leading[: self.book.room(leading, self._promised())]
        if not entries:
            return False
        chosen = set(entries)
        taken = [entry for entry in load.left[-_MOST_LOOKED:] if entry in chosen]
        self._subtract(load, taken)
        load.left[-_MOST_LOOKED:] = [entry for entry in load.left[-_MOST_LOOKED:] if entry not in chosen]
        load.pending.update(entries)
        self._level_bytes[place] += self.book.bytes_of(entries)
        self._apply(self.book.on(Wanted(entries), now))
        return True

    def _end_retention(self, sequence: Stream) -> None:
        """Let the prefix of a load be evicted like other blocks."""
        if (names := self._kept.pop(sequence.id, None)) is not None:
            self._state.caches.end_retention(names)

    def _subtract(self, load: _Load, entries: Sequence[Entry]) -> None:
        """Subtract blocks from the bytes that a load still needs."""
        for entry in entries:
            load.nbytes[load.places[entry]] -= self.book.bytes_of([entry])

    def _by_level(self, entries: Sequence[Entry], places: Mapping[Entry, int]) -> list[int]:
        """Return the bytes of blocks on one rank, of each level."""
        nbytes = [0] * len(LEVELS)
        for entry in entries:
            nbytes[places[entry]] += self.book.bytes_of([entry])
        return nbytes

    def _in_pool(self, entry: Entry) -> bool:
        """Return True if the prefix cache has the block ``entry``."""
        return self.book.kinds[entry[0]].has(entry[1])

    def _check(self, load: _Load, bytes_ahead: Sequence[int], now: float) -> None:
        """End the wait of a load that is complete, has failed, or would take longer than computing the
        missing positions. ``bytes_ahead``: bytes of each level that earlier loads have not requested yet."""
        if not load.left or self.book.off:
            if not load.pending:
                self._end_wait(load, "off" if load.left else "done", now)
            return
        reached = self._state.caches.hit(load.hashes, load.limit)
        compute_seconds = self._compute_seconds(max(reached, load.before), load.reach)
        if self._load_seconds(_sums((bytes_ahead, load.nbytes))) > compute_seconds:
            self._end_wait(load, "cut", now)

    def _end_wait(self, load: _Load, outcome: str, now: float) -> None:
        """End the wait: the sequence enters the queue with the blocks loaded so far.

        ``outcome``: "done" (all blocks had a result), "cut" (computing is faster), "late", "lost" or "off".
        ``now``: NaN if unknown.
        """
        sequence = load.sequence
        reached = self._state.caches.hit(load.hashes, load.limit)
        if outcome == "done" and reached < load.reach:
            outcome = self._shortfall(load)
        self._count(outcome)
        if not math.isnan(now) and not math.isnan(load.began):
            self._seconds += now - load.began
        if reached < load.reach:
            self._notes[sequence.id] = (_MISS_REASONS.get(outcome, outcome), load.reach)
        if reached > load.before:
            before, _ = self._reached.get(sequence.id, (load.before, 0))
            self._reached[sequence.id] = (min(before, load.before), reached)
        self._loads.pop(sequence.id, None)
        sequence.loading = False
        if outcome not in ("done", "evicted"):
            sequence.loads_left = int(outcome == "lost")
        self._state.loaded(sequence)
        self._changed()

    def _shortfall(self, load: _Load) -> str:
        """Return why the hit is shorter than the load although all blocks had a result: the outcome of the
        first missing block, or "evicted"."""
        failed = self.book.failed
        for kind, key in self.book.missing(load.hashes, load.reach):
            outcome = failed.get((kind, key))
            if outcome is not None:
                return BlockOutcome(outcome).name.lower()
        return "evicted"

    def _touch(self, hashes: Sequence[bytes], position: int) -> None:
        """Mark all blocks of the first ``position`` positions that are in the pool as recently used, also
        behind a missing block. Otherwise the load of the missing blocks could evict these blocks."""
        for group, kind in zip(self._state.caches.kinds, self.book.kinds, strict=True):
            for key in reversed(kind.needed(hashes, position)):
                if kind.has(key):
                    block = group.pool.find(key)
                    group.pool.share(block)
                    group.pool.release(block, -1)

    def _load_seconds(self, nbytes: Sequence[int]) -> float:
        """Return the predicted seconds until ``nbytes`` are loaded, behind the commands under way."""
        return self.speeds.seconds(_sums((self.book.loading_bytes, nbytes)))

    def _compute_seconds(self, start: int, end: int) -> float:
        """Return the predicted seconds to compute positions ``start`` .. end - 1 beside the running decode
        rows."""
        model = self._cost()
        beside = self._decode_rows()
        room = max(self._chunk - beside.decode_tokens, 1)
        # With many small chunks, predict only one of every `each` consecutive chunks.
        each = max(1, -(-(end - start) // room) // _MOST_PREDICTED)
        seconds = 0.0
        for at in range(start, end, room * each):
            seconds += each * model.predict(beside.with_chunk(at, min(room, end - at)))
        return seconds

    def _fitted(self) -> CostModel:
        return PRIOR if self._fitter is None else self._fitter.model

    def _decode_rows(self) -> StepShape:
        columns, slots = self._state.columns, self._state.order()
        if not len(slots):
            return StepShape()
        slots = slots[~columns.prefilling(slots)]
        return decode_shape(columns.num_computed[slots], np.ones(len(slots), np.int64))

    def _count(self, outcome: str) -> None:
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1


def _sums(counts: Iterable[Sequence[int]]) -> list[int]:
    """Return the sums of numbers of each level."""
    total = [0] * len(LEVELS)
    for one in counts:
        total = [left + right for left, right in zip(total, one, strict=True)]
    return total
