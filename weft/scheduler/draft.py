"""A plan in the making: rows can still be taken out of it, and nothing in it has been promised to anyone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from weft.scheduler.sequence import Running, Sequence
from weft.types.plan import EMPTY_SEGMENT, MAX_PROMPT_LOGITS, Op, Segment, StepPlan, column


@dataclass(slots=True, eq=False)
class Row:
    """One row of a plan, and the ops it needs before it."""

    sequence: Sequence
    run: Running
    start: int
    count: int
    logits: int
    sample: int
    ops: list[Op]


class Draft:
    """Rows of step ``step``, ``budget`` tokens of which are left to give. One row a sequence at most."""

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        self.prompt_logits = MAX_PROMPT_LOGITS
        """Positions that may still ask for prompt logprobs."""
        self.prefill: dict[int, Row] = {}
        self.decode: dict[int, Row] = {}
        self.lacking: tuple[int, int] | None = None
        """Key of the oldest sequence that sits out for want of blocks: nobody younger may take any."""
        self.preempted = False

    def add_prefill(self, row: Row) -> None:
        self.prefill[row.sequence.id] = row
        self.budget -= row.count
        self.prompt_logits -= row.logits - row.sample

    def add_decode(self, row: Row) -> None:
        self.decode[row.sequence.id] = row
        self.budget -= row.count

    def drop(self, sequence: Sequence) -> None:
        """Takes the row of a sequence out again, if it has one; its budget is free to give."""
        for segment in (self.prefill, self.decode):
            row = segment.pop(sequence.id, None)
            if row is not None:
                self.budget += row.count
                self.prompt_logits += row.logits - row.sample

    def lack(self, sequence: Sequence) -> None:
        """Notes that ``sequence`` sits out for want of blocks."""
        self.lacking = sequence.key if self.lacking is None else min(self.lacking, sequence.key)

    def rows(self) -> list[Row]:
        """In plan order."""
        return [*self.prefill.values(), *self.decode.values()]

    def seal(self, first_ops: Iterable[Op]) -> StepPlan:
        """The plan. ``first_ops`` come before those of the rows."""
        ops = list(first_ops)
        for row in self.rows():
            ops += row.ops
        return StepPlan(
            step=self.step,
            ops=tuple(ops),
            prefill=_segment(list(self.prefill.values())),
            decode=_segment(list(self.decode.values())),
        )


def _segment(rows: list[Row]) -> Segment:
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
