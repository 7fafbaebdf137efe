"""A step in the making: rows can still be taken out of it, and nothing in it has been promised to anyone.

scheduler             rows, and the ops that they need; ``close`` fixes them and makes their columns
balance, overlap,     their share: ``rebalance``, ``micro_batches``, ``agreed``. They read the rows as they
domain                would a plan's (``weft.types.plan.PlannedRows``)
scheduler             ``seal``: the one immutable plan, which is launched, kept in flight and committed
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from weft.scheduler.sequence import Running, Sequence
from weft.scheduler.slot_columns import SlotColumns
from weft.scheduler.step_cost import StepShape, decode_shape
from weft.types.plan import (
    EMPTY,
    EMPTY_SEGMENT,
    MAX_PROMPT_LOGITS,
    Agreement,
    AppendBlocks,
    AppendEach,
    Op,
    Rebalance,
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
    next_k: int
    ops: list[Op]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Decode rows, in FCFS order: integer columns [rows], never written."""

    slots: np.ndarray
    counts: np.ndarray
    """1 + drafts to verify."""
    next_k: np.ndarray
    """Drafts to propose."""

    @classmethod
    def plain(cls, slots: np.ndarray) -> DecodeRows:
        """One token each, no drafts."""
        return cls(slots, np.ones(len(slots), np.int32), np.zeros(len(slots), np.int32))

    def where(self, keep: np.ndarray) -> DecodeRows:
        """The rows ``keep`` (bool [rows])."""
        return DecodeRows(self.slots[keep], self.counts[keep], self.next_k[keep])

    def without_drafts(self, rows: np.ndarray) -> DecodeRows:
        """These rows, those of ``rows`` (bool [rows]) with one token and no drafts."""
        return DecodeRows(self.slots, np.where(rows, 1, self.counts), np.where(rows, 0, self.next_k))

    def within(self, tokens: int) -> DecodeRows:
        """These rows with fewer drafts to verify, so that all take at most ``tokens``, or one each."""
        counts = self.counts
        while len(counts) and int(counts.sum()) > tokens and (longest := int(counts.max())) > 1:
            counts = np.minimum(counts, longest - 1)
        return DecodeRows(self.slots, counts, self.next_k)


NO_ROWS = DecodeRows.plain(EMPTY)


class PlanBuilder:
    """Rows of step ``step``, ``budget`` tokens of which are left to give. One row a sequence at most.

    A prefill row is an object. Decode rows are columns; what else is known of them is in the scheduler's
    ``columns``, which do not advance before the plan is sealed.
    """

    def __init__(self, step: int, budget: int, columns: SlotColumns) -> None:
        self.step = step
        self.budget = budget
        self.prompt_logits = min(MAX_PROMPT_LOGITS, max(1, budget // 2))  # they cost as much as the rest
        """Positions that may still ask for prompt logprobs."""
        self.chunks: dict[int, Row] = {}
        """Prefill rows by sequence, in the order of the plan."""
        self.decodes = NO_ROWS
        self.lacking: tuple[int, int, int] | None = None
        """Key of the oldest sequence that sits out for lack of blocks: younger sequences may not take any."""
        self.preempted = False
        self.prefill = self.decode = EMPTY_SEGMENT
        """The rows as they will be in the plan, from ``close`` on."""
        self.rebalance = False
        """Whether experts move before the step."""
        self.micro_batches = 1
        """2: to be computed as two micro-batches."""
        self.agreed: Agreement | None = None
        """What the replicas of a domain agreed on for the step."""
        self._columns = columns
        self._growth: list[Op] = []

    @property
    def rows(self) -> int:
        """Rows so far."""
        return len(self.chunks) + len(self.decodes.slots)

    @property
    def tokens(self) -> int:
        """Tokens of all rows, from ``close`` on."""
        return self.prefill.tokens + self.decode.tokens

    @property
    def decode_shape(self) -> StepShape:
        """What the cost of the step depends on, of its decode rows."""
        rows = self.decodes
        shape = decode_shape(self.decode_starts, rows.counts)
        return shape._replace(draft_passes=int(rows.next_k.max(initial=0)), drafts=int(rows.next_k.sum()))

    @property
    def decode_starts(self) -> np.ndarray:
        """Positions that the decode rows start at."""
        starts: np.ndarray = self._columns.num_scheduled[self.decodes.slots]
        return starts

    def add_prefill(self, row: Row) -> None:
        self.chunks[row.sequence.id] = row
        self.budget -= row.count
        self.prompt_logits -= row.logits - row.sample

    def grow(self, ops: Iterable[Op]) -> None:
        """Ops that decode rows need before them; for slots that have their rows, or will."""
        self._growth += ops

    def add_decode(self, rows: DecodeRows) -> None:
        """The decode rows, all at once."""
        self.decodes = rows
        self.budget -= int(rows.counts.sum())

    def drop(self, sequence: Sequence, run: Running) -> None:
        """Takes the row of a sequence, and its ops, out again; its budget is free to give."""
        row = self.chunks.pop(sequence.id, None)
        if row is not None:
            self.budget += row.count
            self.prompt_logits += row.logits - row.sample
            return
        keep = self.decodes.slots != run.slot
        self.budget += int(self.decodes.counts[~keep].sum())
        self.decodes = self.decodes.where(keep)
        self._growth = [kept for op in self._growth if (kept := _without(op, run.slot)) is not None]

    def lack(self, sequence: Sequence) -> None:
        """Notes that ``sequence`` sits out for want of blocks."""
        self.lacking = sequence.key if self.lacking is None else min(self.lacking, sequence.key)

    def close(self) -> PlanBuilder:
        """No row comes or goes any more. Returns itself."""
        self.prefill = _prefill_segment(list(self.chunks.values()))
        self.decode = self._decode_segment()
        return self

    def seal(self, first_ops: Iterable[Op]) -> StepPlan:
        """The plan. ``first_ops`` come before those of the rows."""
        ops = list(first_ops)
        for row in self.chunks.values():
            ops += row.ops
        ops += self._growth
        if self.rebalance:
            ops.append(Rebalance())
        return StepPlan(
            step=self.step,
            ops=tuple(ops),
            prefill=self.prefill,
            decode=self.decode,
            constrained=self._columns.constrains(self.prefill, self.decode),
            agreed=self.agreed,
            micro_batches=self.micro_batches,
        )

    def _decode_segment(self) -> Segment:
        rows = self.decodes
        if not len(rows.slots):
            return EMPTY_SEGMENT
        counts = column(rows.counts)
        return Segment(
            slot=column(rows.slots),
            gen=column(self._columns.gen[rows.slots]),
            start=column(self.decode_starts),
            count=counts,
            logits=counts,
            sample=counts,
            next_k=column(rows.next_k),
        )


def _prefill_segment(rows: list[Row]) -> Segment:
    if not rows:
        return EMPTY_SEGMENT
    each = [
        (row.run.slot, row.run.gen, row.start, row.count, row.logits, row.sample, row.next_k) for row in rows
    ]
    slot, gen, start, count, logits, sample, next_k = column(list(zip(*each, strict=True)))
    return Segment(slot=slot, gen=gen, start=start, count=count, logits=logits, sample=sample, next_k=next_k)


def _without(op: Op, slot: int) -> Op | None:
    """``op`` without what it does to ``slot``; None when nothing is left of it."""
    if isinstance(op, AppendEach):
        return op.without(slot)
    if isinstance(op, AppendBlocks) and op.slot == slot:
        return None
    return op
