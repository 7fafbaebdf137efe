"""Batch building: turns a plan into model and sampler inputs without waiting for the device.

The host knows the running slots, the token count of each row and the rows with logits. Ids, positions and
cache indices are gathered on the device from ``SlotState``. Host columns of a step go to the device in one
copy. Rows of both segments are derived together, prefill rows first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from weft.attention.base import Backends, SegmentInput, StepInput
from weft.config.resolved import KVConfig
from weft.ops.low_rank import AdapterRows
from weft.ops.upload import upload
from weft.runner.batch.staging import (
    LogitsColumns,
    RowColumns,
    StagingBuffer,
    logits_columns,
    ragged,
    row_columns,
    verify_columns,
)
from weft.runner.batch.step_adapters import agreed, with_adapters
from weft.runner.images.image_store import MediaStore
from weft.runner.sampling.sampler import SampleRows
from weft.runner.slot_state import SlotState
from weft.types.exchange import Exchange
from weft.types.plan import EMPTY_SEGMENT, Segment, StepPlan

Tensor = torch.Tensor

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Positions of drafts of decode rows, and the samples to compare with. One line per decode row."""

    entries: Tensor
    """int64 [decode rows, most drafts]: index of the sample at draft j's position. Padding: any index."""
    drafts: Tensor
    """int64 [decode rows, most drafts]: id of draft j; -1 as padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """Row columns for sampling, verification and slot advance after the logits of a step exist."""

    slots: Tensor
    """int64 [rows]."""
    counts: Tensor
    """int64 [rows]."""
    starts: Tensor
    """int64 [rows]: positions computed before the step."""
    sample_rows: SampleRows
    verify: Verify | None = None
    """None if no row has drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(StepRows):
    """A staged step: the model input and the row columns for sampling."""

    step: StepInput


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """Columns of a plan about logits, on the device."""

    host: LogitsColumns[np.ndarray]
    logits: LogitsColumns[Tensor]
    entries: Tensor | None
    """int64 [decode rows, most drafts], as in ``Verify``; None if no row has drafts."""
    merged: Tensor | None
    """int64 [decode rows, most drafts]: merged row of each draft, -1 as padding; None without drafts."""


class BatchBuilder:
    """Builds batches from plans over one ``SlotState``."""

    def __init__(
        self,
        state: SlotState,
        kv: KVConfig,
        backends: Backends,
        dtype: torch.dtype,
        media: MediaStore | None = None,
    ) -> None:
        """``media``: image embeddings for prompt rows; None without images."""
        self._state, self._media, self._pools = state, media, kv.pools
        self._backends, self._dtype = backends, dtype
        # Constant columns of all steps, and the empty segment.
        most, device = state.history.shape[0] * kv.copies, state.history.device
        self._order = torch.arange(most + 1, device=device)
        self._offsets = self._order.int()
        self._ones = torch.ones(most, dtype=torch.int64, device=device)
        none = self._order[:0]
        self._empty = self._segment(EMPTY_SEGMENT, 0, none, none, self._offsets[:1], none)

    def _upload(
        self, buffer: StagingBuffer, *groups: Sequence[np.ndarray], to: Tensor | None = None
    ) -> list[list[Tensor]]:
        """Copy groups of columns to the device in one copy. Return the same groups as tensors.

        The copy also carries the blocks that the slot updates of the step append. ``to``: see
        ``StagingBuffer.upload``.
        """
        every = (*groups, self._state.appended())
        total = sum(len(column) for group in every for column in group)
        if to is not None and total > len(to):  # many blocks at once
            self._state.flush()
            every = (*groups, [])
        buffer.begin(total)
        places = [[buffer.add(column) for column in group] for group in every]
        buffer.upload(to)
        *uploaded, blocks = [[buffer.tensor(place) for place in group] for group in places]
        self._state.write_appended(blocks)
        return uploaded

    def build(self, plan: StepPlan, buffer: StagingBuffer) -> Batch:
        """Upload the columns of ``plan`` through ``buffer`` and derive the rest of the batch on the
        device. The tensors are valid until ``buffer`` is released."""
        rows, staged = self._stage(plan, buffer)
        starts = self._state.num_computed[rows.slot]
        step = agreed(plan, self._step(plan.prefill, plan.decode, rows, starts, staged.logits.merged_row))
        return Batch(step=step, **self._sampling(rows, starts, staged, step.ids, step.positions))

    def rows(self, plan: StepPlan, buffer: StagingBuffer) -> tuple[StepRows, Tensor, AdapterRows | None]:
        """Upload the columns of ``plan`` for sampling after micro-batches; ``micro_batch`` builds the steps.

        Return (rows, int64 [L]: indices of the L merged rows with logits, adapters of the L rows), on the
        device. The tensors are valid until ``buffer`` is released.
        """
        rows, staged = self._stage(plan, buffer)
        starts, slots = self._state.num_computed[rows.slot], rows.slot[rows.row]
        positions = starts[rows.row] + rows.within
        ids = self._state.history[slots, positions].long() if staged.merged is not None else positions
        index = staged.logits.merged_row
        present = self._state.adapters(plan.prefill.slot, plan.decode.slot)
        adapters = AdapterRows(self._state.places[slots[index]], present) if present else None
        return StepRows(**self._sampling(rows, starts, staged, ids, positions)), index, adapters

    def micro_batch(self, plan: StepPlan, cut: int, exchange: Exchange, buffer: StagingBuffer) -> StepInput:
        """Build the step of one micro-batch.

        ``cut``: tokens of the first prompt row that the other micro-batch computes earlier; the recurrent
        state after these tokens is in copy 0. ``exchange``: shared by both micro-batches.
        """
        prefill, decode = plan.prefill, plan.decode
        index = logits_columns(plan).merged_row
        ahead = np.zeros(plan.rows if cut else 0, np.int64)
        ahead[:1] = cut
        columns, (index_there, ahead_there) = self._upload(
            buffer, row_columns(prefill, decode), (index, ahead)
        )
        rows = RowColumns(*columns)
        starts = self._state.num_computed[rows.slot]
        live = None
        if cut:
            # [rows]: the row with a cut starts behind ``cut`` and reads its state from copy 0.
            live = self._state.live[rows.slot].masked_fill(ahead_there > 0, 0)
            starts = starts + ahead_there
        return replace(self._step(prefill, decode, rows, starts, index_there, live=live), exchange=exchange)

    def _stage(self, plan: StepPlan, buffer: StagingBuffer) -> tuple[RowColumns[Tensor], _Staged]:
        """Upload all columns of ``plan`` in one copy. Return the row columns, and the columns for logits and
        drafts, on the device. ``entries`` and ``merged`` are None if no row has drafts."""
        logits, drafts = logits_columns(plan), verify_columns(plan)
        rows, there, drafts_there = self._upload(
            buffer, row_columns(plan.prefill, plan.decode), logits, [column.ravel() for column in drafts]
        )
        entries, merged = (
            column.view(host.shape) if host.shape[1] else None
            for column, host in zip(drafts_there, drafts, strict=True)
        )
        staged = _Staged(host=logits, logits=LogitsColumns(*there), entries=entries, merged=merged)
        return RowColumns(*rows), staged

    def _sampling(
        self, rows: RowColumns[Tensor], starts: Tensor, staged: _Staged, ids: Tensor, positions: Tensor
    ) -> dict[str, Any]:
        """Return the fields of ``StepRows``; ``verify`` is None if no row has drafts. starts: int64 [rows].
        ids, positions: int64 [T]; ids are read only if rows have drafts."""
        verify = None
        if staged.entries is not None and staged.merged is not None:
            # [decode rows, most drafts]; -1 stays as padding
            at = staged.merged
            verify = Verify(entries=staged.entries, drafts=torch.where(at < 0, at, ids[at]))
        logits = staged.logits
        predicted = positions[logits.merged_row] + 1
        return {
            "slots": rows.slot,
            "counts": rows.tokens,
            "starts": starts,
            "verify": verify,
            "sample_rows": SampleRows(
                slot_host=staged.host.sampled_slot,
                slot=logits.sampled_slot,
                logits_row=logits.sampled_row,
                position=predicted[logits.sampled_row],
                prompt_slot_host=staged.host.prompt_slot,
                prompt_slot=logits.prompt_slot,
                prompt_logits_row=logits.prompt_row,
                prompt_position=predicted[logits.prompt_row],
            ),
        }

    def follow(
        self, prefill: Segment, decode: Segment, starts: Tensor, logits_index: np.ndarray, shift: int
    ) -> StepInput:
        """Build a step over drafter rows, which neither the plan nor ``num_computed`` contains.

        starts: int64 [rows], exact; the segments hold upper bounds. A token at position p has the id in
        history at ``p + shift``, or the image row there. ``logits_index``: merged rows with logits.
        """
        columns = [*row_columns(prefill, decode), logits_index]
        lengths = [len(c) for c in columns]
        staged = upload(np.concatenate(columns).astype(np.int64), self._state.history.device)
        *rows, index = staged.split(lengths)
        return self._step(prefill, decode, RowColumns(*rows), starts, index, shift)

    def _step(
        self,
        prefill: Segment,
        decode: Segment,
        rows: RowColumns[Tensor],
        starts: Tensor,
        logits_index: Tensor,
        shift: int = 0,
        live: Tensor | None = None,
    ) -> StepInput:
        """Build the model input: prefill rows first, then decode rows. starts: int64 [rows].
        ``logits_index``: merged rows with logits. ``shift``: see ``follow``. ``live``: int64 [rows], replaces
        the live state copies of the slots."""
        slots = rows.slot
        # [T]: position and slot of each token
        positions = starts[rows.row] + rows.within
        token_slots = slots[rows.row]
        first = prefill.rows
        if live is None:
            live = self._state.live[slots]
        p = slice(None, first)
        d = slice(first, None)
        prompts = self._segment(prefill, 0, slots[p], starts[p], rows.prefill_offsets.int(), live[p])
        if self._media is not None and (ends := self._media.ends(prefill, len(self._pools))):
            prompts = replace(prompts, ends=ends)
        segments = (
            prompts,
            self._segment(decode, prefill.tokens, slots[d], starts[d], rows.decode_offsets.int(), live[d]),
        )
        step = StepInput(
            ids=self._state.history[token_slots, positions + shift].long(),
            positions=positions,
            writes=self._writes(token_slots, positions),
            segments=segments,
            prepared=(self._prepare(segments[0]), self._prepare(segments[1])),
            logits_index=logits_index,
            rope_positions=self._state.rope_positions(token_slots, positions),
            media=None if self._media is None else self._media.rows(prefill, shift),
        )
        return with_adapters(step, self._state, token_slots, prefill.slot, decode.slot)

    def build_even(self, plan: StepPlan, buffer: StagingBuffer) -> Batch:
        """Build a plan with ``even`` rows from the slots alone. The batch equals the batch of ``build``."""
        staged = self.stage_decode(plan, 0, buffer)
        step = agreed(plan, self.decode(staged[0], plan.decode))
        step = with_adapters(step, self._state, staged[0], plan.decode.slot)
        rows = self.decode_rows(plan, staged, step.ids, step.positions)
        return Batch(step=step, **rows)

    def stage_decode(
        self,
        plan: StepPlan,
        each: int,
        buffer: StagingBuffer,
        rows: int = 0,
        flag: int | None = None,
        to: Tensor | None = None,
    ) -> list[Tensor]:
        """Upload the columns for ``decode_rows`` through ``buffer`` and return them on the device. The
        columns are the slots and, if ``each`` > 0 (rows padded to ``each`` tokens), counts, slot and padded
        row of each real token, and drafts.

        ``rows``: the slots are padded with the spare slot to this number of rows. ``flag``: one more number
        behind the padded slots; None for no number. ``to``: see ``StagingBuffer.upload``.
        """
        columns = [plan.decode.slot]
        if each:
            count = plan.decode.count
            slot = np.repeat(plan.decode.slot, count)
            # Padded rows begin at multiples of ``each``. ``real_tokens`` excludes the padding.
            real_tokens = ragged(np.arange(len(count)) * each, count)
            columns += [count, slot, real_tokens, *(column.ravel() for column in verify_columns(plan, each))]
        behind = [self._state.spare] * (rows - plan.decode.rows) + ([] if flag is None else [flag])
        spare = np.array(behind, dtype=np.int64)
        staged, _, further = self._upload(buffer, columns[:1], [spare], columns[1:], to=to)
        return [*staged, *further]

    def decode_rows(
        self, plan: StepPlan, staged: Sequence[Tensor], ids: Tensor, positions: Tensor
    ) -> dict[str, Any]:
        """Return the fields of ``StepRows`` for a plan of decode rows.

        ids, positions: int64 [R * each], of the computed step. ``staged``: result of ``stage_decode``.
        """
        slots = staged[0]
        rows = len(staged[0])
        each = len(positions) // rows if rows else 1
        row = self._order[: rows * each]
        verify = None
        if len(staged) > 1:
            # Padded rows: only real tokens are sampled and verified.
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
        self,
        slots: Tensor,
        bound: Segment,
        starts: Tensor | None = None,
        shift: int = 0,
        adapts: bool = False,
    ) -> StepInput:
        """Build a step with equally many tokens per slot (slots: int64 [R]) and logits for every token.

        The device derives all columns from the slots, so the step can be captured. ``bound`` has R rows of
        one count; its largest start bounds the context of every row. ``starts`` and ``shift``: see
        ``follow``. ``adapts``: rows may have adapters. Positions beyond the longest sequence are clamped to
        the last position.
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
            # [R * each]; clamped, because padding may run past the end of the history
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
            adapters=AdapterRows(self._state.places[token_slots], ()) if adapts else None,
        )

    def mixed(self, slots: Tensor, offsets: Tensor, prompts: Segment, decodes: Segment) -> StepInput:
        """Build a step of ``prompts.rows`` prompt rows and then decode rows with one token each.

        slots: int64 [all rows]. offsets: int64 [prompt rows + 1], first token of each prompt row and the
        number of tokens T of all of them; rows may be empty. The device derives all columns from these two,
        so the step can be captured. ``prompts``: each row has T tokens, and its end bounds the context.
        ``decodes``: as ``bound`` of ``decode``. The last tokens of all rows have logits.
        """
        first, tokens = prompts.rows, int(prompts.count[0])
        starts, live = self._state.num_computed[slots], self._state.live[slots]
        place = torch.arange(tokens, device=slots.device)
        row = torch.searchsorted(offsets[1:], place, right=True)  # [T]
        positions = torch.cat([starts[row] + place - offsets[row], starts[first:]])
        token_slots = torch.cat([slots[row], slots[first:]])
        # An empty row behind the last token repeats that token.
        ends = offsets[1:] - 1
        behind = self._segment(
            decodes, tokens, slots[first:], starts[first:], self._offsets[: decodes.rows + 1], live[first:]
        )
        segments = (
            replace(
                self._segment(prompts, 0, slots[:first], starts[:first], offsets.int(), live[:first]),
                tokens=tokens,
                ragged=True,
            ),
            behind,
        )
        return StepInput(
            ids=self._state.history[token_slots, positions].long(),
            positions=positions,
            writes=self._writes(token_slots, positions),
            segments=segments,
            prepared=(self._prepare(segments[0]), self._prepare(segments[1])),
            logits_index=torch.cat([ends, torch.arange(tokens, tokens + decodes.rows, device=ends.device)]),
            rope_positions=self._state.rope_positions(token_slots, positions),
        )

    def stage_mixed(self, columns: Sequence[np.ndarray], buffer: StagingBuffer, to: Tensor) -> None:
        """Upload ``columns``, one behind the other, through ``buffer`` to the first places of ``to``."""
        self._upload(buffer, columns, to=to)

    def _writes(self, token_slots: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Return, for each KV cache group, int64 [T]: flat index of the cache entry of each token; empty for
        states."""
        writes = []
        # Block and offset of each position, by block size: most groups share one block size.
        places = dict[int, tuple[Tensor, Tensor]]()
        for table, pool in zip(self._state.tables, self._pools, strict=True):
            if not table.shape[1]:
                writes.append(positions[:0])
                continue
            size = pool.block_size
            # [T] -> block id from the table row of the token's slot
            if size not in places:
                places[size] = positions // size, positions % size
            block = table[token_slots, places[size][0]].long()
            writes.append(block * size + places[size][1])
        return tuple(writes)

    def _segment(
        self, segment: Segment, begin: int, slots: Tensor, starts: Tensor, q_offsets: Tensor, live: Tensor
    ) -> SegmentInput:
        """Build the device input of one segment.

        ``begin``: merged row of the first token. slots, starts, live: int64 [rows]. q_offsets: int32 [rows +
        1]. Block tables are cut behind the longest row.
        """
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
                # [rows, blocks]: table entries up to the longest row
                table[slots, : -(-longest // pool.block_size)].long()
                for table, pool in zip(self._state.tables, self._pools, strict=True)
            ),
        )

    def _prepare(self, segment: SegmentInput) -> tuple[object, ...]:
        return tuple(
            self._backends.prepare(segment, kind, pool.cache, pool.block_size, self._dtype)
            for kind, pool in enumerate(self._pools)
        )
