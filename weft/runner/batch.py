"""From a plan to what a model and the sampler see, without asking the device anything.

The host knows which slots run, how many tokens each and which rows want logits; ids, positions and cache
indices are gathered on the device from ``SlotState``. All host columns of a step go up in one copy, and rows
of both segments, prefill first, are derived together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from weft.attention.base import Backends, SegmentInput, StepInput
from weft.config.resolved import KVConfig
from weft.ops.upload import upload
from weft.runner.media import MediaStore
from weft.runner.plan_columns import logits_columns, ragged, row_columns, verify_columns
from weft.runner.sampler import SampleRows
from weft.runner.slot_state import SlotState
from weft.runner.staging import StagingBuffer
from weft.types.exchange import Exchange
from weft.types.plan import EMPTY_SEGMENT, Segment, StepPlan

Tensor = torch.Tensor

_NONE = np.empty(0, np.int64)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """Columns of a plan about its logits, on the device."""

    logits_index: Tensor
    sampled: tuple[np.ndarray, Tensor, Tensor]
    """Of sampled entries: slot on the host, slot, row of the logits."""
    prompt: tuple[np.ndarray, Tensor, Tensor]
    """The same of prompt entries."""
    entries: Tensor | None
    """int64 [decode rows, most drafts], as in ``Verify``; None where no row has drafts."""
    merged: Tensor | None
    """Likewise: merged rows of the drafts."""


def _agreed(plan: StepPlan, step: StepInput) -> StepInput:
    """The step with what replicas agreed on, if they did."""
    if plan.agreed is None:
        return step
    return replace(step, exchange=Exchange(rows=plan.agreed.padded_tokens))


class BatchBuilder:
    """Stages plans over one ``SlotState``."""

    def __init__(
        self,
        state: SlotState,
        kv: KVConfig,
        backends: Backends,
        dtype: torch.dtype,
        media: MediaStore | None = None,
    ) -> None:
        """``media``: what rows that stand for images read; None: there are none."""
        self._state = state
        self._media = media
        self._pools = kv.pools
        self._backends = backends
        self._dtype = dtype
        # Columns of steps that never change, and the segment of no rows.
        most = state.history.shape[0] * kv.copies
        device = state.history.device
        self._order = torch.arange(most + 1, device=device)
        self._offsets = self._order.int()
        self._ones = torch.ones(most, dtype=torch.int64, device=device)
        none = self._order[:0]
        self._empty = self._segment(EMPTY_SEGMENT, 0, none, none, self._offsets[:1], none)

    def build(self, plan: StepPlan, buffer: StagingBuffer) -> Batch:
        """Uploads the plan's columns through ``buffer`` and derives the rest on the device."""
        rows, staged = self._stage(plan, buffer)
        starts = self._state.num_computed[rows[0]]
        step = _agreed(plan, self._step(plan.prefill, plan.decode, rows, starts, staged.logits_index))
        return Batch(step=step, **self._sampling(rows, starts, staged, step.ids, step.positions))

    def rows(self, plan: StepPlan, buffer: StagingBuffer) -> tuple[StepRows, Tensor]:
        """``build`` without the step: of a plan that is computed in micro-batches. And int64 [L], the merged
        rows with logits."""
        rows, staged = self._stage(plan, buffer)
        starts = self._state.num_computed[rows[0]]
        slots = rows[0][rows[2]]
        row = rows[2]
        positions = starts[row] + rows[3]
        ids = self._state.history[slots, positions].long() if staged.merged is not None else positions
        return StepRows(**self._sampling(rows, starts, staged, ids, positions)), staged.logits_index

    def micro_batch(self, plan: StepPlan, cut: int, exchange: Exchange, buffer: StagingBuffer) -> StepInput:
        """The step of a micro-batch. ``cut``: tokens of the first prompt row that the other micro-batch
        computes before it; the state that they leave is in copy 0. ``exchange``: the same for both
        micro-batches."""
        prefill = plan.prefill
        decode = plan.decode
        index, _ = logits_columns(plan)
        columns = [*row_columns(prefill, decode), index]
        if cut:
            ahead = np.zeros(plan.rows, np.int64)
            ahead[0] = cut
            columns.append(ahead)
        buffer.begin(sum(len(c) for c in columns))
        where = [buffer.add(c) for c in columns]
        buffer.upload()
        staged = [buffer.tensor(w) for w in where]
        starts = self._state.num_computed[staged[0]]
        if not cut:
            return replace(self._step(prefill, decode, staged[:6], starts, staged[6]), exchange=exchange)
        live = self._state.live[staged[0]].masked_fill(staged[7] > 0, 0)
        starts = starts + staged[7]
        step = self._step(prefill, decode, staged[:6], starts, staged[6], live=live)
        return replace(step, exchange=exchange)

    def _stage(self, plan: StepPlan, buffer: StagingBuffer) -> tuple[list[Tensor], _Staged]:
        """The columns of ``row_columns``, and those of logits and samples, on the device."""
        index, entry_columns = logits_columns(plan)
        entries, merged = verify_columns(plan)
        columns = [*row_columns(plan.prefill, plan.decode), index, *entry_columns]
        columns += [entries.ravel(), merged.ravel()]
        buffer.begin(sum(len(c) for c in columns))
        where = [buffer.add(c) for c in columns]
        buffer.upload()
        logits_index, s_slot, s_row, p_slot, p_row = (buffer.tensor(w) for w in where[6:11])
        drafted = bool(entries.shape[1])
        return [buffer.tensor(w) for w in where[:6]], _Staged(
            logits_index=logits_index,
            sampled=(entry_columns[0], s_slot, s_row),
            prompt=(entry_columns[2], p_slot, p_row),
            entries=buffer.tensor(where[11]).view(entries.shape) if drafted else None,
            merged=buffer.tensor(where[12]).view(merged.shape) if drafted else None,
        )

    def _sampling(
        self, rows: Sequence[Tensor], starts: Tensor, staged: _Staged, ids: Tensor, positions: Tensor
    ) -> dict[str, Any]:
        """The fields of ``StepRows``. ids, positions: int64 [T]; ids are read only where there are drafts."""
        verify = None
        if staged.entries is not None and staged.merged is not None:
            at = staged.merged
            verify = Verify(entries=staged.entries, drafts=torch.where(at < 0, at, ids[at]))
        predicted = positions[staged.logits_index] + 1
        s_host, s_slot, s_row = staged.sampled
        p_host, p_slot, p_row = staged.prompt
        return {
            "slots": rows[0],
            "counts": rows[1],
            "starts": starts,
            "verify": verify,
            "sample_rows": SampleRows(
                slot_host=s_host,
                slot=s_slot,
                logits_row=s_row,
                position=predicted[s_row],
                prompt_slot_host=p_host,
                prompt_slot=p_slot,
                prompt_logits_row=p_row,
                prompt_position=predicted[p_row],
            ),
        }

    def follow(
        self, prefill: Segment, decode: Segment, starts: Tensor, logits_index: np.ndarray, shift: int
    ) -> StepInput:
        """A step over rows of which neither plan nor ``num_computed`` knows, as a drafter makes them.

        starts: int64 [rows], true, where the segments' are upper bounds. The id of a token at position p is
        the one in history at ``p + shift``, or the row of an image there. ``logits_index``: merged rows.
        """
        columns = [*row_columns(prefill, decode), logits_index]
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
        live: Tensor | None = None,
    ) -> StepInput:
        """``rows``: the columns of ``row_columns``. ``live``: int64 [rows], instead of the slots' own."""
        slots, _, row, within, prefill_offsets, decode_offsets = rows
        positions = starts[row] + within
        token_slots = slots[row]
        first = prefill.rows
        if live is None:
            live = self._state.live[slots]
        p = slice(None, first)
        d = slice(first, None)
        segments = (
            self._segment(prefill, 0, slots[p], starts[p], prefill_offsets.int(), live[p]),
            self._segment(decode, prefill.tokens, slots[d], starts[d], decode_offsets.int(), live[d]),
        )
        return StepInput(
            ids=self._state.history[token_slots, positions + shift].long(),
            positions=positions,
            writes=self._writes(token_slots, positions),
            segments=segments,
            prepared=(self._prepare(segments[0]), self._prepare(segments[1])),
            logits_index=logits_index,
            rope_positions=self._state.rope_positions(token_slots, positions),
            media=None if self._media is None else self._media.rows(prefill, shift),
        )

    def build_even(self, plan: StepPlan, buffer: StagingBuffer) -> Batch:
        """``build`` of a plan that is ``even``: the same step, from the slots alone."""
        staged = self.stage_decode(plan, 0, buffer)
        step = _agreed(plan, self.decode(staged[0], plan.decode))
        rows = self.decode_rows(plan, staged, step.ids, step.positions)
        return Batch(step=step, **rows)

    def stage_decode(self, plan: StepPlan, each: int, buffer: StagingBuffer) -> list[Tensor]:
        """What ``decode_rows`` needs: the slots and, if rows are filled up to ``each``, what is theirs."""
        columns = [plan.decode.slot]
        if each:
            count = plan.decode.count
            slot = np.repeat(plan.decode.slot, count)
            mine = ragged(np.arange(len(count)) * each, count)
            columns += [count, slot, mine, *(column.ravel() for column in verify_columns(plan, each))]
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
        slots = staged[0]
        rows = len(staged[0])
        each = len(positions) // rows if rows else 1
        row = self._order[: rows * each]
        verify = None
        if len(staged) > 1:
            counts, slot, row = staged[1:4]
            entries, merged = (column.view(rows, -1) for column in staged[4:])
            verify = Verify(entries=entries, drafts=torch.where(merged < 0, merged, ids[merged]))
            at = positions[row]
            slot_host = np.repeat(plan.decode.slot, plan.decode.count)
        else:
            counts = self._ones[:rows]
            slot = slots
            at = positions
            slot_host = plan.decode.slot
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
        rows = len(slots)
        each = int(bound.count.max(initial=1))
        if starts is None:
            starts = self._state.num_computed[slots]
        positions = starts
        token_slots = slots
        offsets = self._offsets[: rows + 1]
        if each > 1:
            most = self._state.history.shape[1] - 1 - shift
            positions = (starts.unsqueeze(1) + self._order[:each]).clamp(max=most).view(-1)
            token_slots = slots.repeat_interleave(each, output_size=rows * each)
            offsets = self._offsets[: rows * each + 1 : each].contiguous()
        live = self._state.live[slots]
        segments = (self._empty, self._segment(bound, 0, slots, starts, offsets, live))
        return StepInput(
            ids=self._state.history[token_slots, positions + shift if shift else positions].long(),
            positions=positions,
            writes=self._writes(token_slots, positions),
            segments=segments,
            prepared=(self._prepare(segments[0]), self._prepare(segments[1])),
            logits_index=self._order[: rows * each],
            rope_positions=self._state.rope_positions(token_slots, positions),
        )

    def _writes(self, token_slots: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """For each cache kind where each token's cache entry goes."""
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
        self, segment: Segment, begin: int, slots: Tensor, starts: Tensor, q_offsets: Tensor, live: Tensor
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
            live=live,
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
