"""From a plan to what a model and the sampler see, without asking the device anything.

The host knows which slots run, how many tokens each and which rows want logits; ids, positions and cache
indices are gathered on the device from ``SlotState``. All host columns of a step go up in one copy, and rows
of both segments, prefill first, are derived together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from weft.attention.base import Backends, SegmentInput, StepInput
from weft.config.resolved import KVConfig
from weft.ops.upload import upload
from weft.runner.sampler import SampleRows
from weft.runner.slot_state import SlotState
from weft.runner.staging import StagingBuffer
from weft.types.plan import EMPTY_SEGMENT, Segment, StepPlan

Tensor = torch.Tensor

_NONE = np.empty(0, np.int64)


def most_each(plan: StepPlan) -> int:
    """Most tokens of a row, in a plan of decode rows alone, all of which draw behind each; 0 of any other."""
    rows = plan.decode
    if plan.prefill.rows or not rows.rows:
        return 0
    alike = (rows.logits == rows.count).all() and (rows.sample == rows.count).all()
    return int(rows.count.max()) if alike else 0


def even(plan: StepPlan, each: int) -> bool:
    """Whether all of the plan's rows are decode rows of ``each`` tokens, the most that one has."""
    return each == 1 or (each > 1 and int(plan.decode.count.min()) == each)


def ragged(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``starts[0] .. starts[0] + lengths[0] - 1, starts[1] ..``: consecutive ranges, one array."""
    lengths = lengths.astype(np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    shift = starts.astype(np.int64) - (ends - lengths)
    result: np.ndarray = np.repeat(shift, lengths) + np.arange(total)
    return result


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """int64 [n + 1]: 0 and the running sums of ``lengths``."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _row_columns(prefill: Segment, decode: Segment) -> list[np.ndarray]:
    """Slot and count of each row; each token's row and place in it; the offsets of each segment's rows."""
    count = np.concatenate([prefill.count, decode.count])
    return [
        np.concatenate([prefill.slot, decode.slot]),
        count,
        np.repeat(np.arange(len(count)), count),
        ragged(np.zeros(len(count)), count),
        offsets_of(prefill.count),
        offsets_of(decode.count),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Where the drafts of decode rows are, and the samples that they must equal. One line a decode row."""

    entries: Tensor
    """int64 [decode rows, most drafts]: the sample at draft j's position; of a row with fewer, any."""
    drafts: Tensor
    """int64 [decode rows, most drafts]: draft j's id; -1 where a row has fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """What is left to do for a step's rows once its logits are there."""

    slots: Tensor
    """int64 [rows]."""
    counts: Tensor
    """int64 [rows]."""
    starts: Tensor
    """int64 [rows]: positions computed before the step."""
    sample_rows: SampleRows
    verify: Verify | None = None
    """None where no row has drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(StepRows):
    """One step, staged."""

    step: StepInput


def _logits_columns(plan: StepPlan) -> tuple[np.ndarray, list[np.ndarray]]:
    """(merged rows with logits; for sampled and for prompt entries: slot, row of the logits)."""
    both = (plan.prefill, plan.decode)
    ends = np.cumsum(np.concatenate([s.count for s in both]).astype(np.int64))
    slot = np.concatenate([s.slot for s in both])
    logits = np.concatenate([s.logits for s in both]).astype(np.int64)
    sample = np.concatenate([s.sample for s in both]).astype(np.int64)
    index = ragged(ends - logits, logits)
    last = np.cumsum(logits)
    return index, [
        np.repeat(slot, sample),
        ragged(last - sample, sample),
        np.repeat(slot, logits - sample),
        ragged(last - logits, logits - sample),
    ]


def _verify_columns(plan: StepPlan, each: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """int64 [decode rows, most drafts]: (number of the sample, merged row) of each draft; -1 pads the latter.

    A draft is the id of its merged row; the sample at the same position comes from the row before. ``each``:
    tokens that every row takes up, where rows of fewer are filled up.
    """
    count = plan.decode.count.astype(np.int64)
    place = np.arange(int(count.max(initial=1)) - 1)
    there = place < count[:, None] - 1
    before = np.cumsum(count) - count
    begins = np.arange(len(count)) * each if each else plan.prefill.tokens + before
    entries = int(plan.prefill.sample.sum()) + before[:, None] + np.where(there, place, 0)
    return entries, np.where(there, begins[:, None] + 1 + place, -1)


class BatchBuilder:
    """Stages plans over one ``SlotState``."""

    def __init__(self, state: SlotState, kv: KVConfig, backends: Backends, dtype: torch.dtype) -> None:
        self._state = state
        self._pools = kv.pools
        self._backends = backends
        self._dtype = dtype
        # Columns of steps that never change, and the segment of no rows.
        most, device = state.history.shape[0] * kv.copies, state.history.device
        self._order = torch.arange(most + 1, device=device)
        self._offsets = self._order.int()
        self._ones = torch.ones(most, dtype=torch.int64, device=device)
        none = self._order[:0]
        self._empty = self._segment(EMPTY_SEGMENT, 0, none, none, self._offsets[:1])

    def build(self, plan: StepPlan, buffer: StagingBuffer) -> Batch:
        """Uploads the plan's columns through ``buffer`` and derives the rest on the device."""
        prefill, decode = plan.prefill, plan.decode
        index, entry_columns = _logits_columns(plan)
        entries, merged = _verify_columns(plan)
        columns = [*_row_columns(prefill, decode), index, *entry_columns, entries.ravel(), merged.ravel()]
        buffer.begin(sum(len(c) for c in columns))
        where = [buffer.add(c) for c in columns]
        buffer.upload()
        rows = [buffer.tensor(w) for w in where[:6]]
        logits_index, s_slot, s_row, p_slot, p_row = (buffer.tensor(w) for w in where[6:11])
        starts = self._state.num_computed[rows[0]]
        step = self._step(prefill, decode, rows, starts, logits_index)
        verify = None
        if entries.shape[1]:
            at = buffer.tensor(where[12]).view(merged.shape)
            verify = Verify(
                entries=buffer.tensor(where[11]).view(entries.shape),
                drafts=torch.where(at < 0, at, step.ids[at]),
            )
        predicted = step.positions[logits_index] + 1
        return Batch(
            step=step,
            slots=rows[0],
            counts=rows[1],
            starts=starts,
            verify=verify,
            sample_rows=SampleRows(
                slot_host=entry_columns[0],
                slot=s_slot,
                logits_row=s_row,
                position=predicted[s_row],
                prompt_slot_host=entry_columns[2],
                prompt_slot=p_slot,
                prompt_logits_row=p_row,
                prompt_position=predicted[p_row],
            ),
        )

    def follow(
        self, prefill: Segment, decode: Segment, starts: Tensor, logits_index: np.ndarray, shift: int
    ) -> StepInput:
        """A step over rows of which neither plan nor ``num_computed`` knows, as a drafter makes them.

        starts: int64 [rows], true, where the segments' are upper bounds. The id of a token at position p is
        the one in history at ``p + shift``. ``logits_index``: merged rows.
        """
        columns = [*_row_columns(prefill, decode), logits_index]
        lengths = [len(c) for c in columns]
        staged = upload(np.concatenate(columns).astype(np.int64), self._state.history.device)
        *rows, index = staged.split(lengths)
        return self._step(prefill, decode, rows, starts, index, shift)

    def _step(
        self,
        prefill: Segment,
        decode: Segment,
        rows: Sequence[Tensor],
        starts: Tensor,
        logits_index: Tensor,
        shift: int = 0,
    ) -> StepInput:
        """``rows``: the columns of ``_row_columns``."""
        slots, _, row, within, prefill_offsets, decode_offsets = rows
        positions = starts[row] + within
        token_slots = slots[row]
        first = prefill.rows
        segments = (
            self._segment(prefill, 0, slots[:first], starts[:first], prefill_offsets.int()),
            self._segment(decode, prefill.tokens, slots[first:], starts[first:], decode_offsets.int()),
        )
        return StepInput(
            ids=self._state.history[token_slots, positions + shift].long(),
            positions=positions,
            writes=self._writes(token_slots, positions),
            segments=segments,
            prepared=(self._prepare(segments[0]), self._prepare(segments[1])),
            logits_index=logits_index,
        )

    def build_even(self, plan: StepPlan, buffer: StagingBuffer) -> Batch:
        """``build`` of a plan that is ``even``: the same step, from the slots alone."""
        staged = self.stage_decode(plan, 0, buffer)
        step = self.decode(staged[0], plan.decode)
        rows = self.decode_rows(plan, staged, step.ids, step.positions)
        return Batch(step=step, **rows)

    def stage_decode(self, plan: StepPlan, each: int, buffer: StagingBuffer) -> list[Tensor]:
        """What ``decode_rows`` needs: the slots and, if rows are filled up to ``each``, what is theirs."""
        columns = [plan.decode.slot]
        if each:
            count = plan.decode.count
            slot = np.repeat(plan.decode.slot, count)
            mine = ragged(np.arange(len(count)) * each, count)
            columns += [count, slot, mine, *(column.ravel() for column in _verify_columns(plan, each))]
        buffer.begin(sum(map(len, columns)))
        where = [buffer.add(column) for column in columns]
        buffer.upload()
        return [buffer.tensor(w) for w in where]

    def decode_rows(
        self, plan: StepPlan, staged: Sequence[Tensor], ids: Tensor, positions: Tensor
    ) -> dict[str, Any]:
        """The fields of ``StepRows`` of a plan of decode rows: their ids and positions, int64 [R * each].

        ``staged``: see ``stage_decode``.
        """
        slots, rows = staged[0], len(staged[0])
        each = len(positions) // rows
        row = self._order[: rows * each]
        verify = None
        if len(staged) > 1:
            counts, slot, row = staged[1:4]
            entries, merged = (column.view(rows, -1) for column in staged[4:])
            verify = Verify(entries=entries, drafts=torch.where(merged < 0, merged, ids[merged]))
            at, slot_host = positions[row], np.repeat(plan.decode.slot, plan.decode.count)
        else:
            counts, slot, at, slot_host = self._ones[:rows], slots, positions, plan.decode.slot
            if each > 1:
                counts = counts * each
                slot = slots.repeat_interleave(each, output_size=rows * each)
                slot_host = np.repeat(slot_host, each)
                verify = Verify(entries=row.view(rows, each)[:, :-1], drafts=ids.view(rows, each)[:, 1:])
        none = row[:0]
        return {
            "slots": slots,
            "counts": counts,
            "starts": positions if each == 1 else positions.view(rows, each)[:, 0],
            "verify": verify,
            "sample_rows": SampleRows(
                slot_host=slot_host,
                slot=slot,
                logits_row=row,
                position=at + 1,
                prompt_slot_host=_NONE,
                prompt_slot=none,
                prompt_logits_row=none,
                prompt_position=none,
            ),
        }

    def decode(
        self, slots: Tensor, bound: Segment, starts: Tensor | None = None, shift: int = 0
    ) -> StepInput:
        """A step of as many tokens of each of ``slots`` (int64 [R]), all of whose logits are wanted.

        It is derived on the device from the slots alone, so it can be captured; ``bound`` has as many rows,
        all of one count, and its largest start bounds the context of all. ``starts``, ``shift``: as for
        ``follow``. A position beyond the longest sequence stands for the last one.
        """
        rows, each = len(slots), int(bound.count[0])
        if starts is None:
            starts = self._state.num_computed[slots]
        positions, token_slots, offsets = starts, slots, self._offsets[: rows + 1]
        if each > 1:
            most = self._state.history.shape[1] - 1 - shift
            positions = (starts.unsqueeze(1) + self._order[:each]).clamp(max=most).view(-1)
            token_slots = slots.repeat_interleave(each, output_size=rows * each)
            offsets = self._offsets[: rows * each + 1 : each].contiguous()
        segments = (self._empty, self._segment(bound, 0, slots, starts, offsets))
        return StepInput(
            ids=self._state.history[token_slots, positions + shift if shift else positions].long(),
            positions=positions,
            writes=self._writes(token_slots, positions),
            segments=segments,
            prepared=(self._prepare(segments[0]), self._prepare(segments[1])),
            logits_index=self._order[: rows * each],
        )

    def _writes(self, token_slots: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """For each cache kind where each token's line goes."""
        writes = []
        for table, pool in zip(self._state.tables, self._pools, strict=True):
            if not table.shape[1]:
                writes.append(positions[:0])
                continue
            size = pool.block_size
            block = table[token_slots, positions // size].long()
            writes.append(block * size + positions % size)
        return tuple(writes)

    def _segment(
        self, segment: Segment, begin: int, slots: Tensor, starts: Tensor, q_offsets: Tensor
    ) -> SegmentInput:
        longest = int((segment.start + segment.count).max()) if segment.rows else 0
        return SegmentInput(
            begin=begin,
            rows=segment.rows,
            tokens=segment.tokens,
            host_counts=segment.count,
            host_starts=segment.start,
            q_offsets=q_offsets,
            starts=starts,
            slots=slots,
            live=self._state.live[slots],
            tables=tuple(
                table[slots, : -(-longest // pool.block_size)].long()
                for table, pool in zip(self._state.tables, self._pools, strict=True)
            ),
        )

    def _prepare(self, segment: SegmentInput) -> tuple[object, ...]:
        return tuple(
            self._backends.prepare(segment, kind, pool.cache, pool.block_size, self._dtype)
            for kind, pool in enumerate(self._pools)
        )
