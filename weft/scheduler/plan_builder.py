"""A step before the freeze. Rows can still be removed, because no other component depends on the rows yet.

scheduler               adds rows and their slot updates; ``close`` fixes the rows and makes their columns
balance, overlap,       set ``rebalance``, ``micro_batches``, ``agreed``. All read the rows as
expert-parallel group   rows of a plan (``weft.types.plan.PlannedRows``)
scheduler               ``freeze``: freezes the builder into the plan, which is launched and committed
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weft.scheduler.policy.step_cost import StepShape, decode_shape
from weft.scheduler.sequence import Running, Sequence
from weft.scheduler.slot_columns import SlotColumns
from weft.types.plan import (
    EMPTY,
    EMPTY_SEGMENT,
    MAX_PROMPT_LOGITS,
    Agreement,
    AppendBlocks,
    AppendEach,
    BindMedia,
    Rebalance,
    ReplicaUpdate,
    Segment,
    SlotUpdate,
    StepPlan,
    column,
)

if TYPE_CHECKING:
    from weft.scheduler.steady import SteadyRows


@dataclass(slots=True, eq=False)
class Row:
    """A prefill row of a plan, and the slot updates before the row. See ``weft.types.plan.Segment``."""

    sequence: Sequence
    run: Running
    start: int
    """First position of the chunk."""
    count: int
    """Number of tokens of the chunk."""
    logits: int
    """Number of trailing positions with logits."""
    sample: int
    """1 if the last position samples a token, else 0."""
    next_k: int
    """Number of drafts to propose after the row."""
    ops: list[SlotUpdate]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Decode rows in scheduling order: integer columns [rows]. The arrays are never written."""

    slots: np.ndarray
    counts: np.ndarray
    """[rows], 1 + number of drafts to verify."""
    next_k: np.ndarray
    """[rows], number of drafts to propose."""

    @classmethod
    def plain(cls, slots: np.ndarray) -> DecodeRows:
        """Return rows with one token each and without drafts."""
        return cls(slots, np.ones(len(slots), np.int32), np.zeros(len(slots), np.int32))

    def where(self, keep: np.ndarray) -> DecodeRows:
        """Return the rows ``keep`` (bool [rows])."""
        return DecodeRows(self.slots[keep], self.counts[keep], self.next_k[keep])

    def without_drafts(self, rows: np.ndarray) -> DecodeRows:
        """Return these rows; rows marked in ``rows`` (bool [rows]) have one token and no drafts."""
        return DecodeRows(self.slots, np.where(rows, 1, self.counts), np.where(rows, 0, self.next_k))

    def within(self, tokens: int) -> DecodeRows:
        """Return these rows with fewer drafts to verify: at most ``tokens`` in total, but at least one per
        row.

        The longest rows are shortened first.
        """
        counts = self.counts
        while len(counts) and int(counts.sum()) > tokens and (longest := int(counts.max())) > 1:
            counts = np.minimum(counts, longest - 1)
        return DecodeRows(self.slots, counts, self.next_k)


NO_ROWS = DecodeRows.plain(EMPTY)


class PlanBuilder:
    """Rows of step ``step``; ``budget`` is the number of tokens left. At most one row per sequence.

    A prefill row is an object. Decode rows are columns. Further facts about decode rows are in the
    scheduler's ``columns``, which do not advance before ``freeze``.
    """

    def __init__(self, step: int, budget: int, columns: SlotColumns) -> None:
        self.step = step
        self.budget = budget
        # prompt logits cost as much as the rest of a step
        self.prompt_logits = min(MAX_PROMPT_LOGITS, max(1, budget // 2))
        """Number of positions left for prompt logprobs."""
        self.chunks: dict[int, Row] = {}
        """Prefill rows by sequence id, in plan order."""
        self.decodes = NO_ROWS
        self.steady: SteadyRows | None = None
        """The rows that ``decodes`` repeats; None for rows of this step alone."""
        self.lacking: tuple[int, int, int] | None = None
        """Key of the oldest sequence without a row for lack of blocks. Younger sequences may not take
        blocks."""
        self.preempted = False
        self.prefill = self.decode = EMPTY_SEGMENT
        """The prefill and decode rows of the plan; set by ``close``."""
        self.rebalance = False
        """True if experts move before the step."""
        self.micro_batches = 1
        """2: compute the step as two micro-batches."""
        self.agreed: Agreement | None = None
        """The agreement of the expert-parallel replicas for the step; None without such a group."""
        self.others: list[ReplicaUpdate] = []
        """Updates of the other replicas of the expert-parallel group."""
        self._columns = columns
        self._growth: list[SlotUpdate] = []

    @property
    def rows(self) -> int:
        """Number of rows so far."""
        return len(self.chunks) + len(self.decodes.slots)

    @property
    def tokens(self) -> int:
        """Number of tokens of all rows; valid after ``close``."""
        return self.prefill.tokens + self.decode.tokens

    @property
    def adapted(self) -> bool:
        """True if a row has an adapter that changes experts; valid after ``close``."""
        column = self._columns.adapted
        return bool(column[self.prefill.slot].any() or column[self.decode.slot].any())

    @property
    def whole_images(self) -> list[BindMedia]:
        """Images that no row of a micro-batch may cut."""
        ops = (op for row in self.chunks.values() for op in row.ops)
        return [op for op in ops if isinstance(op, BindMedia) and op.whole]

    @property
    def decode_shape(self) -> StepShape:
        """Shape of the decode rows, as input of the cost model."""
        rows = self.decodes
        shape = decode_shape(self.decode_starts, rows.counts)
        return shape._replace(draft_passes=int(rows.next_k.max(initial=0)), drafts=int(rows.next_k.sum()))

    @property
    def decode_starts(self) -> np.ndarray:
        """First position of each decode row, [rows]."""
        starts: np.ndarray = self._columns.num_scheduled[self.decodes.slots]
        return starts

    def add_prefill(self, row: Row) -> None:
        """Add a prefill row. The tokens and the prompt logprobs of the row use up the budgets."""
        self.chunks[row.sequence.id] = row
        self.budget -= row.count
        self.prompt_logits -= (row.logits - row.sample) * row.sequence.logit_cost

    def grow(self, ops: Iterable[SlotUpdate]) -> None:
        """Add slot updates for decode rows. Each named slot must have a row or get a row."""
        self._growth += ops

    def add_decode(self, rows: DecodeRows) -> None:
        """Set all decode rows at once."""
        self.decodes = rows
        steady = self.steady is not None and rows is self.steady.rows  # such rows have one token each
        self.budget -= len(rows.slots) if steady else int(rows.counts.sum())

    def drop(self, sequence: Sequence, run: Running) -> None:
        """Remove the row of a sequence, if any, with its slot updates. The budget of the row is free
        again."""
        row = self.chunks.pop(sequence.id, None)
        if row is not None:
            self.budget += row.count
            self.prompt_logits += (row.logits - row.sample) * row.sequence.logit_cost
            return
        keep = self.decodes.slots != run.slot
        self.budget += int(self.decodes.counts[~keep].sum())
        self.decodes = self.decodes.where(keep)
        self._growth = [kept for op in self._growth if (kept := _without(op, run.slot)) is not None]

    def lack(self, sequence: Sequence) -> None:
        """Record that ``sequence`` has no row for lack of blocks. ``lacking`` keeps the oldest such key."""
        self.lacking = sequence.key if self.lacking is None else min(self.lacking, sequence.key)

    def close(self) -> PlanBuilder:
        """Fix the rows and make their columns. Return ``self``."""
        self.prefill = _prefill_segment(list(self.chunks.values()))
        self.decode = self._decode_segment()
        return self

    def freeze(self, first_ops: Iterable[SlotUpdate]) -> StepPlan:
        """Return the immutable plan. ``first_ops`` come before the slot updates of the rows; ``Rebalance``
        comes last if set."""
        ops = [*self.others, *first_ops]
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
        """Return the decode rows as a segment of columns [rows], with the present generation and start of
        each slot."""
        rows = self.decodes
        if self.steady is not None and rows is self.steady.rows:
            return self.steady.segment()
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
    # [rows, fields] -> one column [rows] per field
    if not rows:
        return EMPTY_SEGMENT
    each = [
        (row.run.slot, row.run.gen, row.start, row.count, row.logits, row.sample, row.next_k) for row in rows
    ]
    slot, gen, start, count, logits, sample, next_k = column(list(zip(*each, strict=True)))
    return Segment(slot=slot, gen=gen, start=start, count=count, logits=logits, sample=sample, next_k=next_k)


def _without(op: SlotUpdate, slot: int) -> SlotUpdate | None:
    """Return ``op`` without changes to ``slot``; None if nothing is left."""
    if isinstance(op, AppendEach):
        return op.without(slot)
    if isinstance(op, AppendBlocks) and op.slot == slot:
        return None
    return op
