"""A plan in the making: rows can still be taken out of it, and nothing in it has been promised to anyone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from weft.scheduler.columns import Columns
from weft.scheduler.sequence import Running, Sequence
from weft.types.plan import (
    EMPTY,
    EMPTY_SEGMENT,
    MAX_PROMPT_LOGITS,
    AppendBlocks,
    AppendEach,
    Op,
    Segment,
    StepPlan,
    column,
)


@dataclass(slots=True, eq=False)
class Row:
    """One prefill row of a plan, and the ops it needs before it."""

    sequence: Sequence
    run: Running
    start: int
    count: int
    logits: int
    sample: int
    ops: list[Op]


class Draft:
    """Rows of step ``step``, ``budget`` tokens of which are left to give. One row a sequence at most.

    A prefill row is an object. Decode rows are columns: their slots in FCFS order and their counts; the rest
    of them is in the scheduler's ``columns``, which nobody advances before the plan is sealed.
    """

    def __init__(self, step: int, budget: int, columns: Columns) -> None:
        self.step = step
        self.budget = budget
        self.prompt_logits = MAX_PROMPT_LOGITS
        """Positions that may still ask for prompt logprobs."""
        self.prefill: dict[int, Row] = {}
        self.decode = EMPTY
        """Slots of the decode rows."""
        self.lacking: tuple[int, int] | None = None
        """Key of the oldest sequence that sits out for want of blocks: nobody younger may take any."""
        self.preempted = False
        self._columns = columns
        self._counts = EMPTY
        self._growth: list[Op] = []

    @property
    def rows(self) -> int:
        """Rows so far."""
        return len(self.prefill) + len(self.decode)

    @property
    def decode_starts(self) -> np.ndarray:
        """Positions that the decode rows start at."""
        starts: np.ndarray = self._columns.num_scheduled[self.decode]
        return starts

    def add_prefill(self, row: Row) -> None:
        self.prefill[row.sequence.id] = row
        self.budget -= row.count
        self.prompt_logits -= row.logits - row.sample

    def grow(self, ops: Iterable[Op]) -> None:
        """Ops that decode rows need before them; for slots that have their rows, or will."""
        self._growth += ops

    def add_decode(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """The decode rows, all at once."""
        self.decode, self._counts = slots, counts
        self.budget -= int(counts.sum())

    def drop(self, sequence: Sequence, run: Running) -> None:
        """Takes the row of a sequence, and its ops, out again; its budget is free to give."""
        row = self.prefill.pop(sequence.id, None)
        if row is not None:
            self.budget += row.count
            self.prompt_logits += row.logits - row.sample
            return
        keep = self.decode != run.slot
        self.budget += int(self._counts[~keep].sum())
        self.decode, self._counts = self.decode[keep], self._counts[keep]
        self._growth = [kept for op in self._growth if (kept := _without(op, run.slot)) is not None]

    def lack(self, sequence: Sequence) -> None:
        """Notes that ``sequence`` sits out for want of blocks."""
        self.lacking = sequence.key if self.lacking is None else min(self.lacking, sequence.key)

    def seal(self, first_ops: Iterable[Op]) -> StepPlan:
        """The plan. ``first_ops`` come before those of the rows."""
        rows = list(self.prefill.values())
        ops = list(first_ops)
        for row in rows:
            ops += row.ops
        return StepPlan(
            step=self.step,
            ops=(*ops, *self._growth),
            prefill=_prefill_segment(rows),
            decode=self._decode_segment(),
        )

    def _decode_segment(self) -> Segment:
        if not len(self.decode):
            return EMPTY_SEGMENT
        counts = column(self._counts)
        return Segment(
            slot=column(self.decode),
            gen=column(self._columns.gen[self.decode]),
            start=column(self.decode_starts),
            count=counts,
            logits=counts,
            sample=counts,
            next_k=column(np.zeros(len(counts), np.int32)),
        )


def _prefill_segment(rows: list[Row]) -> Segment:
    if not rows:
        return EMPTY_SEGMENT
    return Segment(
        slot=column([row.run.slot for row in rows]),
        gen=column([row.run.gen for row in rows]),
        start=column([row.start for row in rows]),
        count=column([row.count for row in rows]),
        logits=column([row.logits for row in rows]),
        sample=column([row.sample for row in rows]),
        next_k=column(np.zeros(len(rows), np.int32)),
    )


def _without(op: Op, slot: int) -> Op | None:
    """``op`` without what it does to ``slot``; None when nothing is left of it."""
    if isinstance(op, AppendEach):
        return op.without(slot)
    if isinstance(op, AppendBlocks) and op.slot == slot:
        return None
    return op
