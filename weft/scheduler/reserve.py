"""Blocks for the rows of a plan: all at once where they are there, else one by one, which may preempt."""

from __future__ import annotations

import numpy as np

from weft.common.errors import EngineDead
from weft.scheduler.plan_builder import DecodeRows, PlanBuilder
from weft.scheduler.sequence import Running, Sequence
from weft.scheduler.state import SchedulerState
from weft.types.plan import Op


class Reserver:
    """Makes block tables reach as far as the rows of a plan in the making need."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def grow(self, rows: DecodeRows, short: np.ndarray, builder: PlanBuilder) -> DecodeRows:
        """Makes the tables of the decode rows ``short`` (bool) reach as far as these need.

        All at once when blocks are there, else without their drafts; else one by one, in order, which may
        preempt. Returns the rows that can run.
        """
        state = self._state
        columns = self._state.columns
        whole = builder.lacking is None
        if whole and self._grow_all(rows, short, builder):
            return rows
        if state.kv.drafts:
            rows = rows.without_drafts(short)
            short &= columns.num_scheduled[rows.slots] + 1 > columns.reserved[rows.slots]
            if whole and self._grow_all(rows, short, builder):
                return rows
        out = np.zeros(len(columns.gen), bool)
        for slot in rows.slots[short].tolist():
            sequence = state.in_slot[slot]
            if sequence is None:  # preempted just now
                continue
            reserved = self.reserve(sequence, sequence.state, int(columns.num_scheduled[slot]) + 1, builder)
            out[slot] = reserved is None
            builder.grow(reserved or [])
        return rows.where((columns.gen[rows.slots] > 0) & ~out[rows.slots])

    def _grow_all(self, rows: DecodeRows, short: np.ndarray, builder: PlanBuilder) -> bool:
        """Makes the tables of all rows ``short`` reach as far as they need, or changes nothing."""
        columns = self._state.columns
        slots = rows.slots[short]
        ends = columns.num_scheduled[slots] + rows.counts[short] + rows.next_k[short]
        grown = self._state.caches.grow(slots, ends)
        if grown is None:
            return False
        ops, columns.reserved[slots] = grown
        builder.grow(ops)
        return True

    def reserve(self, sequence: Sequence, run: Running, end: int, builder: PlanBuilder) -> list[Op] | None:
        """Makes the tables reach ``end``: the ops, or None when the sequence must sit out."""
        if end <= run.reserved:
            return []
        if builder.lacking is not None and sequence.key > builder.lacking:
            builder.lack(sequence)
            return None
        if not self._make_room(sequence, run, end, builder):
            if sequence.state is run:
                builder.lack(sequence)
            return None
        run.reserved = self._state.caches.reserved(end)
        return self._state.caches.reserve(run.slot, end)

    def _make_room(self, sequence: Sequence, run: Running, end: int, builder: PlanBuilder) -> bool:
        """Preempts until the blocks up to ``end`` are available. False: not in this plan.

        The victim is the last by key that is not protected; it may be the one that asks. No sequence is
        preempted while blocks that steps in flight still name will do, and none preempts itself while its
        own last step is in flight: that may free blocks, and computes tokens that need not be lost. Nor is
        one whose slot ranks do not know of yet, which could not be freed. Where there is no victim, those go
        that have blocks and no slot: they may be behind the one that asks.
        """
        caches = self._state.caches
        while True:
            needed = caches.needed(run.slot, end)
            if caches.fits(needed):
                return True
            if caches.will_fit(needed):
                return False
            victim = next((s for s in reversed(self._state.running) if _can_go(s)), None)
            if victim is None and self._evict_last():
                continue
            if victim is None or (victim is sequence and run.last_step > self._state.last_commit):
                return False
            self.preempt(victim, builder)
            if victim is sequence:
                return False

    def _evict_last(self) -> bool:
        """Gives back the last by key of the queue that has blocks, if any: they are free at once."""
        landed = (sequence for sequence in self._state.waiting if sequence.tables is not None)
        last = max(landed, key=lambda sequence: sequence.key, default=None)
        if last is not None:
            self._state.evict(last, "a group made room for other sequences")
        return last is not None

    def preempt(self, victim: Sequence, builder: PlanBuilder, *, yields: bool = False) -> None:
        """Takes a running sequence out of the plan, and its slot and blocks from it."""
        held = victim.state
        if not isinstance(held, Running):
            raise EngineDead("a sequence is in the running queue that does not run")
        builder.drop(victim, held)
        builder.preempted = True
        self._state.preempt(victim, held, yields=yields)


def _can_go(sequence: Sequence) -> bool:
    known = isinstance(sequence.state, Running) and sequence.state.last_step >= 0
    return known and not sequence.protected
