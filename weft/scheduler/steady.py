"""Decode rows that stay the same over several steps: every running sequence has a row, and no slot changes.

Most decode steps repeat the rows of the step before, one position further. So the constant columns are made
once, and each step only advances the positions.

    SteadyRows.of    every sequence is past its known ids and not near its limit
    segment          the decode rows of the next plan
    launched         the plan is in flight: positions advance
    plain            all tokens of the result extend their sequences, and need nothing else

The rows are valid while ``SchedulerState.order`` returns the same array. Speculation changes the number of
tokens per row, so groups with drafts have no steady rows.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from weft.scheduler.plan_builder import DecodeRows
from weft.scheduler.sequence import Sequence
from weft.scheduler.slot_columns import SlotColumns
from weft.types.plan import Segment, StepPlan, StepResult, column


class SteadyRows:
    """The decode rows of all slots in scheduling order. Owned by ``SchedulerState``."""

    @classmethod
    def of(cls, slots: np.ndarray, columns: SlotColumns, in_slot: np.ndarray) -> SteadyRows | None:
        """Return the rows of ``slots``, the running sequences; None if not every sequence has a decode
        row."""
        start = columns.num_scheduled[slots]
        if not len(slots) or (start < columns.known[slots]).any():
            return None
        left = int((columns.limit[slots] - 1 - start).min())
        return cls(slots, columns, in_slot, start, left) if left > 0 else None

    def __init__(
        self, slots: np.ndarray, columns: SlotColumns, in_slot: np.ndarray, start: np.ndarray, left: int
    ) -> None:
        self.slots = slots
        self.rows = DecodeRows.plain(slots)
        self.left = left
        """Number of further steps before a sequence may be at its limit."""
        self._columns, self._in_slot = columns, in_slot
        self._slot = column(slots)
        self._gen = column(columns.gen[slots])
        self._ones = column(self.rows.counts)
        self._none = column(self.rows.next_k)
        self._start = column(start)
        self._limit_start = int(start[0]) + left - 1
        """Start of the first row in the first step that may end a sequence by its limit."""
        self._planned: Segment | None = None
        self._answers: np.ndarray | None = None
        """The rows of the last result that named all rows."""
        self.grown()

    # ---- planning

    @property
    def short(self) -> np.ndarray | None:
        """Bool [rows]: True for rows whose block tables do not cover the next position; None without such
        rows."""
        short: np.ndarray | None = None if self._covered > 0 else self._start >= self._reserved
        return short

    def grown(self) -> None:
        """Note that block tables of the rows have grown."""
        self._reserved = self._columns.reserved[self.slots]
        self._covered = int((self._reserved - self._start).min())  # steps until a row needs more blocks

    def segment(self) -> Segment:
        """Return the decode rows of the next plan."""
        self._planned = Segment(
            slot=self._slot,
            gen=self._gen,
            start=self._start,
            count=self._ones,
            logits=self._ones,
            sample=self._ones,
            next_k=self._none,
        )
        return self._planned

    def launched(self, plan: StepPlan) -> bool:
        """Advance the slots if ``plan`` has these rows. Return False for another plan, which ends the
        rows."""
        if plan.decode is not self._planned:
            return False
        self._start = column(self._start + 1)
        self._columns.num_scheduled[self.slots] = self._start
        self._columns.last_step[self.slots] = plan.step
        self.left -= 1
        self._covered -= 1
        return True

    # ---- the commit

    def plain(self, plan: StepPlan, result: StepResult) -> bool:
        """Return True if ``plan`` has only these rows, and every row of ``result`` is quiet (see
        ``weft.scheduler.commit``).

        Return False for any other result, also for a wrong result: the caller then handles the rows one by
        one.
        """
        if plan.decode.slot is not self._slot or plan.constrained or plan.prefill.rows or result.row_error:
            return False
        if len(result.tokens) != len(self.slots) or not self._quiet:
            return False
        if plan.decode.start[0] >= self._limit_start or not self._all_rows(result.rows):
            return False
        return self._stops is None or not (self._stops == result.tokens).any()

    def _all_rows(self, rows: np.ndarray) -> bool:
        """Return True if a result with ``rows`` has all rows. Most steps have the same array as the step
        before."""
        if rows is not self._answers:
            if not np.array_equal(rows, np.arange(len(self.slots))):
                return False
            self._answers = rows
        return True

    @cached_property
    def sequences(self) -> list[Sequence]:
        """The sequence of each row."""
        found: list[Sequence] = self._in_slot[self.slots].tolist()
        return found

    @cached_property
    def named(self) -> list[tuple[int, int]]:
        """(id, cached prompt tokens) of the sequence of each row."""
        columns = self._columns
        ids, cached = columns.sequence[self.slots].tolist(), columns.num_cached[self.slots].tolist()
        return list(zip(ids, cached, strict=True))

    @cached_property
    def _quiet(self) -> bool:
        return bool(self._columns.quiet[self.slots].all())

    @cached_property
    def _stops(self) -> np.ndarray | None:
        """int32 [stop ids, rows]; None if no row has a stop id."""
        stops = self._columns.stops[self.slots].T
        stops = stops[(stops >= 0).any(axis=1)]
        return np.ascontiguousarray(stops) if len(stops) else None
