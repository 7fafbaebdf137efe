"""Drafts from the model's own multi-token prediction (MTP) module.

The module is one more layer with a separate cache. The cache entry at position p is made from the model's
hidden state at p and from the token at p + 1, so the entry can be made once the token at p + 1 is sampled:

    position        p - 1          p            p + 1        p + 2
    token                          t            sampled      draft 1      draft 2
    entry of     hidden, t    hidden, sampled    | own output, draft 1 ...
                             └─ draft 1         └─ draft 2

The entry of the last accepted position gives the first draft. For each further draft the module runs on the
module's own output and the last draft. The entries of further drafts are provisional: they are overwritten
when the model has computed the positions.

A row without wanted drafts needs no entries yet. The hidden states stay pending until drafts are wanted, or
until other sequences may share the block. So the module costs little while nothing is drafted.

* If other ranks take part in a pass, the entries of a block are made once the block is full.
* Otherwise (``defers``) the states stay pending until a sequence with a prefix hit is admitted or the
  sequence ends. A small number of prompt states stays pending, too.
* Two types of entries are made at once: entries of exported rows (``Export``), because the transfer sends all
  entries of the sequence, and entries of a chunk with an image or a part of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.attention.base import Backends, LayerCache, StepInput
from weft.models.decoder import Model
from weft.ops.upload import upload
from weft.speculation.base import Drafter, Sampled
from weft.speculation.chain import CapturedChains, CaptureOptions, Chain, DraftSteps
from weft.speculation.pending_hidden import PendingHidden, most_waiting
from weft.types.plan import (
    EMPTY_SEGMENT,
    AllocSlot,
    BindMedia,
    Export,
    FreeSlot,
    Segment,
    SlotUpdate,
    StepPlan,
    column,
)

Tensor = torch.Tensor

PASS_TOKENS = 2048
"""Maximum tokens of a pass over pending entries, because the pass delays a step. Also the maximum of pending
states of all slots, because the first step with drafts makes the entries of all rows."""


@dataclass(frozen=True, slots=True)
class _DraftRows:
    """Rows of a step with entries to make now, in the order of the drafter's step: chunks first."""

    rows: np.ndarray
    """int64 [n]: row numbers in the plan."""
    waiting: np.ndarray
    """int64 [n]: number of pending states before the row's own tokens."""
    counts: np.ndarray
    """int64 [n]: tokens, pending states included."""
    chunks: int
    """Number of leading chunks among the rows."""

    def begins(self) -> np.ndarray:
        """Return the index of each row's first token in the drafter's step."""
        result: np.ndarray = np.cumsum(self.counts) - self.counts
        return result


class MtpDrafter(Drafter):
    """Drafts greedily at any temperature; ties go to the lowest id."""

    reads_hidden = True

    def __init__(
        self,
        model: Model,
        cache: Sequence[LayerCache],
        backends: Backends,
        steps: DraftSteps,
        history: Tensor,
        vocab_size: int,
        block_size: int,
        capturing: CaptureOptions | None = None,
        *,
        defers: bool = False,
    ) -> None:
        """history: int32 [slots + 1, longest]. ``block_size``: positions of a block. Other sequences may find
        a full block: with prefix caching any sequence, otherwise the sequences of the same prompt.

        ``defers``: entries of full blocks may stay pending until ``prepare``. Must be False if other ranks
        take part in a pass, or if blocks are released before the end of a sequence.
        """
        self._chain = Chain(model, cache, backends, steps, history, vocab_size)
        self._steps = steps
        self._block = block_size
        self._defers = defers
        slots = history.shape[0]
        hidden, dtype, device = self._chain.sizes
        most = most_waiting(block_size, slots * hidden * dtype.itemsize, defers)
        self.waiting = PendingHidden(slots, most, hidden, dtype, device)
        """Hidden states without entries yet."""
        self._verified = np.zeros(slots, bool)
        """True if the last row of the slot had drafts: the host then does not know the next start."""
        self._any_verified = False
        """False only if all of ``_verified`` is False."""
        self._computed: Tensor | None = None
        """``Sampled.num_computed`` of the last step."""
        self.captured = None if capturing is None else CapturedChains(self._chain, capturing)
        """Replayed drafting; None without captures."""

    def enter(self, slot: int) -> None:
        self.waiting.forget(slot)
        self._verified[slot] = False

    def hidden_sink(self) -> Callable[[Tensor, Tensor, Tensor], None]:
        self.waiting.make()
        return self.waiting.keep

    def prepare(self, ops: Sequence[SlotUpdate]) -> None:
        """Make pending entries of full blocks that other sequences may find, and drop the states of freed
        slots."""
        # A hit may read any full block, so all overdue entries are made. Without a hit, only entries of freed
        # slots.
        freed = [op.slot for op in ops if isinstance(op, FreeSlot)]
        shown = any(isinstance(op, AllocSlot) and op.num_cached for op in ops)
        if not freed and not shown:
            return
        slots = self.waiting.overdue(self._block)
        if not shown:
            slots = slots[np.isin(slots, freed)]
        each = max(PASS_TOKENS // self.waiting.most, 1)
        for first in range(0, len(slots), each):
            self._settle(slots[first : first + each])
        for slot in freed:
            self.waiting.forget(slot)

    def _settle(self, slots: np.ndarray) -> None:
        """Make all pending entries of ``slots`` (int64 [rows])."""
        assert self._computed is not None
        counts = self.waiting.counts[slots]
        ends = self.waiting.ends[slots]
        segment = Segment(slot=column(slots), start=column(ends - counts), count=column(counts))
        device = self._computed.device
        # [total pending]: `owner` repeats each slot, one per pending state.
        at, behind = upload(np.stack([slots, counts]), device)
        owner = upload(np.repeat(slots, counts), device)
        none = np.zeros(0, np.int64)
        step = self._steps.follow(segment, EMPTY_SEGMENT, self._computed[at] - behind, none, 1)
        self._chain.lookahead(step, self.waiting.take(owner, step.positions), at[:0])
        self.waiting.set(slots, np.zeros(len(slots), np.int64), ends)

    def reset(self) -> None:
        self.waiting.clear()
        self._verified.fill(False)
        if self.captured is not None:
            self.captured.reset()

    def propose(self, step: Sampled) -> Tensor | None:
        """Return drafts, see ``Drafter.propose``. May run empty passes.

        Where replicas agreed on the step, the module runs equally often in each replica, because a pass may
        communicate.
        """
        agreed = step.plan.agreed
        begun = self._chain.passes
        drafts = self._propose(step) if step.plan.rows else None
        if agreed is not None:
            for _ in range(begun + max(agreed.drafts, 1) - self._chain.passes):
                self._chain.run_empty()
        return drafts

    def _propose(self, step: Sampled) -> Tensor | None:
        """Store or process the hidden states of the step. Return the drafts of the wanted rows; None if no
        row wants drafts."""
        assert step.hidden is not None, "the step kept no hidden states"
        self.uncaptured = False
        self._computed = step.num_computed
        # One token per row and nothing to draft: only store the states.
        if len(step.hidden) == step.plan.rows and self._is_idle(step.plan):
            if not step.stored:
                self.waiting.keep(step.slots, step.starts, step.hidden)
            return None
        wanted = step.wanted()
        # `_due` also updates `waiting` to the state after the step.
        due = self._due(step, len(wanted) > 0)
        if not len(due.rows):
            return None
        # With an agreement, passes are counted and matched by the other replicas: no replay.
        captured = self.captured if step.plan.agreed is None else None
        if len(wanted) and captured is not None and not step.plan.prefill.rows and not due.chunks:
            drafts = captured.propose(step)
            self.uncaptured = captured.uncaptured
            if drafts is not None:
                return drafts if len(wanted) == len(drafts) else drafts[upload(wanted, drafts.device)]
        hidden = self._first(step, due, wanted)
        if not len(wanted):
            return None
        ends = step.ends
        slots = step.slots
        if len(wanted) < len(step.next_k):
            at = upload(wanted, slots.device)
            ends = ends[at]
            slots = slots[at]
        most = int(step.next_k.max())
        inputs = hidden, slots, ends, step.bounds()[wanted], most
        # The first draft follows from ``hidden`` without a pass, so one draft needs no capture.
        drafts = None if captured is None or most == 1 else captured.propose_after(*inputs)
        return self._chain.propose_after(*inputs) if drafts is None else drafts

    def is_idle(self, plan: StepPlan) -> bool:
        return plan.agreed is None and self._is_idle(plan)

    def _is_idle(self, plan: StepPlan) -> bool:
        """Return True if the only work is to store the hidden states of all rows, one token each.

        If True, the states are counted as pending.
        """
        decode = plan.decode
        slots = decode.slot
        if plan.prefill.rows or decode.next_k.any():
            return False
        if self._any_verified and self._verified[slots].any():
            return False
        if self.waiting.full(slots) or self._is_late(decode):
            return False
        self.waiting.add(slots, decode.start)
        return True

    def _is_late(self, decode: Segment) -> bool:
        """Return True if entries of decode rows are due for a reason other than a full slot.

        With ``defers``: too many pending states of all slots. Else: a full block.
        """
        if self._defers:
            return self.waiting.total + decode.rows > PASS_TOKENS
        return bool(((decode.start + 1) % self._block == 0).any())

    def _due(self, step: Sampled, drafting: bool) -> _DraftRows:
        """Return the rows with entries to make now: all rows if any row drafts. Store the states of the other
        rows."""
        prefill = step.plan.prefill
        decode = step.plan.decode
        both = (prefill, decode)
        first = prefill.rows
        slots = np.concatenate([s.slot for s in both])
        counts = np.concatenate([s.count for s in both]).astype(np.int64)
        ends = np.concatenate([s.start for s in both]) + counts
        waiting = self.waiting.counts[slots]
        keep = ~self._verified[slots] & (not drafting)
        if first:
            # Images of rows are only available in plans with a ``BindMedia`` of the image.
            now = [op.slot for op in step.plan.ops if isinstance(op, Export | BindMedia)]
            keep &= ~np.isin(slots, now)
        # After verified drafts the host does not know how many positions were accepted.
        keep[first:] &= decode.count == 1
        keep &= self._can_wait(waiting, counts, ends, first)
        self._verified[decode.slot] = decode.count != 1
        self._any_verified = bool(self._verified.any())
        self.waiting.set(slots, np.where(keep, waiting + counts, 0), ends)
        if keep.any():
            self._store_hidden(step, np.flatnonzero(keep), counts)
        # A row with pending states has several tokens, so the row counts as a chunk.
        chunk = ~keep & (waiting > 0)
        chunk[:first] = ~keep[:first]
        rows = np.concatenate([np.flatnonzero(chunk), np.flatnonzero(~keep & ~chunk)])
        return _DraftRows(rows, waiting[rows], counts[rows] + waiting[rows], int(chunk.sum()))

    def _can_wait(self, waiting: np.ndarray, counts: np.ndarray, ends: np.ndarray, chunks: int) -> np.ndarray:
        """Return bool [rows]: True for rows whose entries may stay pending. The first ``chunks`` rows are
        prompts.

        waiting: pending states; counts: tokens of the step; ends: positions after the rows.
        """
        most = self.waiting.most
        after = waiting + counts
        fits: np.ndarray = after < most
        if not self._defers:
            fits &= ends % self._block != 0
            fits[:chunks] = False
            return fits
        if not fits[chunks:].all():  # a slot is full: one pass for all slots with many states
            fits &= after < most // 2
        total = self.waiting.total + int(counts.sum())
        if total > PASS_TOKENS:  # rows with the most states, until half the limit is left
            order = np.argsort(-after, kind="stable")
            left = total - np.cumsum(after[order])
            fits[order[: 1 + int(np.searchsorted(-left, -(PASS_TOKENS // 2)))]] = False
        return fits

    def _store_hidden(self, step: Sampled, rows: np.ndarray, counts: np.ndarray) -> None:
        """Store the hidden states of ``rows`` of the plan. counts: int64 [all rows], tokens of each row."""
        assert step.hidden is not None
        device = step.slots.device
        counts = counts[rows]
        within, source = _ranges(np.zeros(len(rows), np.int64), step.begins()[rows], counts)
        owner, place, source_ = upload(np.stack([np.repeat(rows, counts), within, source]), device)
        hidden = step.hidden if len(source) == len(step.hidden) else step.hidden[source_]
        self.waiting.keep(step.slots[owner], step.starts[owner] + place, hidden)

    def _first(self, step: Sampled, due: _DraftRows, wanted: np.ndarray) -> Tensor:
        """Make the entries of ``due``. Return the module output at the last accepted positions, [wanted
        rows, hidden]."""
        device = step.slots.device
        parts = _segments(step, due)
        rows, behind = upload(np.stack([due.rows, due.waiting]), device)
        starts = step.starts[rows] - behind
        # Only the output at the last accepted positions of wanted rows is needed; without drafts, none.
        first = np.zeros(step.plan.rows, np.int64)
        first[due.rows] = due.begins() + due.waiting
        at = upload(np.stack([wanted, first[wanted]]), device)
        keep = at[1] + (step.ends - step.starts - 1)[at[0]]
        draft_step = self._steps.follow(*parts, starts, np.zeros(0, np.int64), 1)
        hidden = self._gather(step, due, draft_step)
        return self._chain.lookahead(draft_step, hidden, keep)

    def _gather(self, step: Sampled, due: _DraftRows, draft_step: StepInput) -> Tensor:
        """Return the hidden states of ``due``, [tokens of ``due``, hidden]: pending states and states of
        the step.

        ``draft_step``: the drafter's step.
        """
        assert step.hidden is not None
        # All rows in plan order and nothing pending: no copy.
        whole = len(due.rows) == step.plan.rows and not due.waiting.any()
        if whole and len(step.hidden) == int(due.counts.sum()):
            return step.hidden
        count = due.counts - due.waiting
        source, to = _ranges(step.begins()[due.rows], due.begins() + due.waiting, count)
        if not due.waiting.any():
            return step.hidden[upload(source, step.hidden.device)]
        slot = np.concatenate([step.plan.prefill.slot, step.plan.decode.slot])[due.rows]
        kept, _ = _ranges(due.begins(), due.begins(), due.waiting)
        owner = np.repeat(slot.astype(np.int64), due.waiting)
        token, slots = upload(np.stack([kept, owner]), step.hidden.device)
        from_, into = upload(np.stack([source, to]), step.hidden.device)
        # [pending + new tokens, hidden], in the order of the drafter's rows
        hidden = step.hidden.new_empty(len(source) + len(kept), step.hidden.shape[1])
        hidden[into] = step.hidden[from_]
        hidden[token] = self.waiting.take(slots, draft_step.positions[token])
        return hidden


def _segments(step: Sampled, due: _DraftRows) -> tuple[Segment, Segment]:
    """Return the drafter's rows as (prefill, decode) segments. Starts are upper bounds, as in the plan."""
    both = (step.plan.prefill, step.plan.decode)
    slot, start = (np.concatenate([getattr(s, name) for s in both])[due.rows] for name in ("slot", "start"))
    parts = (slice(0, due.chunks), slice(due.chunks, None))
    return tuple(  # type: ignore[return-value]
        Segment(
            slot=column(slot[part]),
            start=column((start - due.waiting)[part]),
            count=column(due.counts[part]),
        )
        for part in parts
    )


def _ranges(first: np.ndarray, other: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``first[i] + j`` and ``other[i] + j`` for all j < ``counts[i]``, for each i in order."""
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(first, counts) + within, np.repeat(other, counts) + within
