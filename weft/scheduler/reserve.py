"""Reserve blocks for the rows of a plan, preempting sequences if necessary."""

from __future__ import annotations

import numpy as np

from weft.common.errors import EngineDead
from weft.scheduler.plan_builder import DecodeRows, PlanBuilder
from weft.scheduler.sequence import Running, Sequence
from weft.scheduler.state import SchedulerState
from weft.types.plan import SlotUpdate


class Reserver:
    """Extends block tables to the lengths needed by the rows of the next plan."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def grow(self, rows: DecodeRows, short: np.ndarray, builder: PlanBuilder) -> DecodeRows:
        """Extend the tables of the decode rows ``short`` (bool [rows]) to the lengths needed. Return the
        runnable rows.

        Try three ways in order: all rows; all rows without drafts; row by row in scheduling order, with
        preemption. Slot updates go into ``builder``. ``short`` is changed in place.
        """
        state = self._state
        columns = self._state.columns
        # If an older sequence lacks blocks, younger rows must not take blocks: no attempt for all rows.
        nobody_lacks = builder.lacking is None
        if nobody_lacks and self._grow_all(rows, short, builder):
            return rows
        if state.kv.drafts:
            rows = rows.without_drafts(short)
            short &= columns.num_scheduled[rows.slots] + 1 > columns.reserved[rows.slots]
            if nobody_lacks and self._grow_all(rows, short, builder):
                return rows
        # Row by row: a row may preempt later sequences, and the plan then loses their rows.
        left_out = np.zeros(len(columns.gen), bool)  # [slots]
        for slot in rows.slots[short].tolist():
            sequence = state.in_slot[slot]
            if sequence is None:  # preempted by an earlier row
                continue
            reserved = self.reserve(sequence, sequence.state, int(columns.num_scheduled[slot]) + 1, builder)
            left_out[slot] = reserved is None
            builder.grow(reserved or [])
        # gen is 0 in a freed slot, so preempted rows are dropped too.
        return rows.where((columns.gen[rows.slots] > 0) & ~left_out[rows.slots])

    def _grow_all(self, rows: DecodeRows, short: np.ndarray, builder: PlanBuilder) -> bool:
        """Extend the tables of all rows ``short`` and add the slot updates to ``builder``. Return False,
        without any change, if blocks are missing."""
        columns = self._state.columns
        slots = rows.slots[short]
        ends = columns.num_scheduled[slots] + rows.counts[short] + rows.next_k[short]
        grown = self._state.caches.grow(slots, ends)
        if grown is None:
            return False
        ops, columns.reserved[slots] = grown
        builder.grow(ops)
        return True

    def reserve(
        self, sequence: Sequence, run: Running, end: int, builder: PlanBuilder
    ) -> list[SlotUpdate] | None:
        """Extend the tables of a sequence to ``end``. Return the slot updates; None if the sequence gets no
        row.

        May preempt other sequences, or ``sequence``. A sequence without a row is recorded in
        ``builder.lacking``, unless preempted.
        """
        reserved = self._state.columns.reserved
        if end <= reserved[run.slot]:
            return []
        # Older sequences first: a younger sequence must not take blocks from an older sequence without a row.
        if builder.lacking is not None and sequence.key > builder.lacking:
            builder.lack(sequence)
            return None
        if not self._make_room(sequence, run, end, builder):
            if sequence.state is run:
                builder.lack(sequence)
            return None
        reserved[run.slot] = self._state.caches.reserved(end)
        return self._state.caches.reserve(run.slot, end)

    def _make_room(self, sequence: Sequence, run: Running, end: int, builder: PlanBuilder) -> bool:
        """Preempt sequences until the blocks up to ``end`` are free. Return False if the plan cannot get the
        blocks.

        The victim is the last unprotected sequence by key, possibly ``sequence``. Not a victim: a sequence
        without a frozen plan, because the ranks do not know the slot yet. Without a victim, waiting sequences
        with received KV are returned to the router, even if older in the order than ``sequence``.
        """
        state, caches = self._state, self._state.caches
        while True:
            needed = caches.needed(run.slot, end)
            if caches.fits(needed):
                return True
            # Steps in flight will release enough blocks: wait instead of preempting.
            if caches.will_fit(needed):
                return False
            movable = (s for s in reversed(state.running) if state.planned(s) and not s.protected)
            victim = next(movable, None)
            if victim is None and self._return_last():
                continue
            # A sequence never preempts itself while its last step is in flight: the step may free blocks, and
            # the tokens of the step would be computed twice.
            in_flight = state.columns.last_step[run.slot] > state.last_commit
            if victim is None or (victim is sequence and in_flight):
                return False
            self.preempt(victim, builder)
            if victim is sequence:
                return False

    def _return_last(self) -> bool:
        """Return the last waiting sequence with received KV to the router. Return False if there is none.

        The blocks are free at once, because no plan names the blocks.
        """
        received = (sequence for sequence in self._state.waiting if sequence.tables is not None)
        last = max(received, key=lambda sequence: sequence.key, default=None)
        if last is not None:
            self._state.return_to_router(last, "the sequence was evicted for other sequences")
        return last is not None

    def preempt(self, victim: Sequence, builder: PlanBuilder, *, yields: bool = False) -> None:
        """Preempt ``victim``, remove the row from ``builder`` and set ``builder.preempted``. Raises
        EngineDead if ``victim`` does not run."""
        run = victim.state
        if not isinstance(run, Running):
            raise EngineDead("the running queue has a sequence that does not run")
        builder.drop(victim, run)
        builder.preempted = True
        self._state.preempt(victim, run, yields=yields)
