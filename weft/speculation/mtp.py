"""Drafts from the model's own module that predicts further tokens.

It is one more layer, with a cache of its own. Its entry at position p is made from the model's hidden state
there and from the token at p + 1, so it can be made when that is sampled:

    position        p - 1          p            p + 1        p + 2
    token                          t            sampled      draft 1      draft 2
    entry of     hidden, t    hidden, sampled    | own output, draft 1 ...
                             └─ draft 1         └─ draft 2

The entry of the last accepted position gives the first draft. For each further one the module runs on its own
output and the last draft; those entries are guesses, and made again when their positions have been computed.

A row that wants no drafts needs no entries yet: its hidden states wait until drafts are made from the
entries, or until other sequences may share its block. With other ranks that is when the block is full. Where
a pass of the module concerns no other ranks, it is when a sequence with a prefix hit is admitted, and when
the sequence ends; there the states of prompts wait, too, as long as they are few. So where nothing is
drafted, the module costs little. Made at once are the entries of exported rows (``Export``), as the sequence
takes all of its entries to another group, and those of a chunk with (a part of) an image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.attention.base import Backends, LayerCache, StepInput
from weft.models.base import Model
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
    Op,
    Segment,
    StepPlan,
    column,
)

Tensor = torch.Tensor

PASS_TOKENS = 2048
"""Most tokens of a pass over entries that waited: it comes on top of a step. Nor do more states wait, of all
slots, as a step that drafts anew makes the entries of all its rows."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a step whose entries are made now, in the order of the drafter's step: chunks first."""

    rows: np.ndarray
    """Of the plan, int64."""
    waiting: np.ndarray
    """int64: how many positions before the plan's each begins."""
    counts: np.ndarray
    """int64: tokens, with those."""
    chunks: int
    """How many of them are chunks."""

    def begins(self) -> np.ndarray:
        """The first token of each in the drafter's step."""
        result: np.ndarray = np.cumsum(self.counts) - self.counts
        return result


class MtpDrafter(Drafter):
    """Greedy drafts, whatever the temperature; ties go to the lowest id."""

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
        """history: int32 [slots + 1, longest]. ``block_size``: positions of a block, which others may find
        once it is full: with prefix caching anybody, without it the sequences of the same prompt.

        ``defers``: entries of full blocks may wait, for ``prepare``. Not where other ranks have a part in a
        pass, nor where blocks are given up while their sequence goes on.
        """
        self._chain = Chain(model, cache, backends, steps, history, vocab_size)
        self._steps = steps
        self._block = block_size
        self._defers = defers
        slots = history.shape[0]
        hidden, dtype, device = self._chain.sizes
        most = most_waiting(block_size, slots * hidden * dtype.itemsize, defers)
        self.waiting = PendingHidden(slots, most, hidden, dtype, device)
        """Hidden states whose entries are still to be made."""
        self._verified = np.zeros(slots, bool)
        """Whether the slot's last row had drafts: then the host does not know where the next one starts."""
        self._any_verified = False
        """Whether one of ``_verified`` may be."""
        self._computed: Tensor | None = None
        """``Sampled.num_computed``."""
        self.captured = None if capturing is None else CapturedChains(self._chain, capturing)
        """Drafting that is replayed."""

    def enter(self, slot: int) -> None:
        self.waiting.forget(slot)
        self._verified[slot] = False

    def hidden_sink(self) -> Callable[[Tensor, Tensor, Tensor], None]:
        self.waiting.make()
        return self.waiting.keep

    def prepare(self, ops: Sequence[Op]) -> None:
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
        """Makes all entries of ``slots`` (int64 [rows]) that wait."""
        assert self._computed is not None
        counts = self.waiting.counts[slots]
        ends = self.waiting.ends[slots]
        segment = Segment(slot=column(slots), start=column(ends - counts), count=column(counts))
        device = self._computed.device
        at, behind = upload(np.stack([slots, counts]), device)
        owner = upload(np.repeat(slots, counts), device)
        none = np.zeros(0, np.int64)
        step = self._steps.follow(segment, EMPTY_SEGMENT, self._computed[at] - behind, none, 1)
        self._chain.ahead(step, self.waiting.take(owner, step.positions), at[:0])
        self.waiting.set(slots, np.zeros(len(slots), np.int64), ends)

    def reset(self) -> None:
        self.waiting.clear()
        self._verified.fill(False)
        if self.captured is not None:
            self.captured.reset()

    def propose(self, step: Sampled) -> Tensor | None:
        """Where replicas agreed on the step, the module runs as often in each of them: it may communicate."""
        agreed = step.plan.agreed
        begun = self._chain.passes
        drafts = self._propose(step) if step.plan.rows else None
        if agreed is not None:
            for _ in range(begun + max(agreed.drafts, 1) - self._chain.passes):
                self._chain.run_empty()
        return drafts

    def _propose(self, step: Sampled) -> Tensor | None:
        assert step.hidden is not None, "the step kept no hidden states"
        self.uncaptured = False
        self._computed = step.num_computed
        if len(step.hidden) == step.plan.rows and self._is_idle(step.plan):
            if not step.kept:
                self.waiting.keep(step.slots, step.starts, step.hidden)
            return None
        wanted = step.wanted()
        made = self._due(step, len(wanted) > 0)
        if not len(made.rows):
            return None
        captured = self.captured if step.plan.agreed is None else None
        if len(wanted) and captured is not None and not step.plan.prefill.rows and not made.chunks:
            drafts = captured.propose(step)
            self.uncaptured = captured.uncaptured
            if drafts is not None:
                return drafts if len(wanted) == len(drafts) else drafts[upload(wanted, drafts.device)]
        hidden = self._first(step, made, wanted)
        if not len(wanted):
            return None
        ends = step.ends
        slots = step.slots
        if len(wanted) < len(step.next_k):
            at = upload(wanted, slots.device)
            ends = ends[at]
            slots = slots[at]
        rest = hidden, slots, ends, step.bounds()[wanted], int(step.next_k.max())
        drafts = None if captured is None else captured.go_on(*rest)
        return self._chain.go_on(*rest) if drafts is None else drafts

    def is_idle(self, plan: StepPlan) -> bool:
        return plan.agreed is None and self._is_idle(plan)

    def _is_idle(self, plan: StepPlan) -> bool:
        """Whether only the hidden states of all rows, of one token each, are to be kept; if so, notes that
        they wait."""
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
        """Whether entries of decode rows must be made, not as a slot is full, but because of all of them."""
        if self._defers:
            return self.waiting.total + decode.rows > PASS_TOKENS
        return bool(((decode.start + 1) % self._block == 0).any())

    def _due(self, step: Sampled, drafting: bool) -> _Rows:
        """The rows whose entries are made now: all, if any drafts. Of others the hidden states are kept."""
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
            # Images that rows read are at hand in the plans that bind them alone.
            now = [op.slot for op in step.plan.ops if isinstance(op, Export | BindMedia)]
            keep &= ~np.isin(slots, now)
        keep[first:] &= decode.count == 1
        keep &= self._can_wait(waiting, counts, ends, first)
        self._verified[decode.slot] = decode.count != 1
        self._any_verified = bool(self._verified.any())
        self.waiting.set(slots, np.where(keep, waiting + counts, 0), ends)
        if keep.any():
            self._keep(step, np.flatnonzero(keep), counts)
        chunk = ~keep & (waiting > 0)
        chunk[:first] = ~keep[:first]
        rows = np.concatenate([np.flatnonzero(chunk), np.flatnonzero(~keep & ~chunk)])
        return _Rows(rows, waiting[rows], counts[rows] + waiting[rows], int(chunk.sum()))

    def _can_wait(self, waiting: np.ndarray, counts: np.ndarray, ends: np.ndarray, chunks: int) -> np.ndarray:
        """bool [rows]: whose entries need not be made now. Of rows, the first ``chunks`` of them of prompts:
        states that wait, tokens of the step, and where they end."""
        most = self.waiting.most
        after = waiting + counts
        fits: np.ndarray = after < most
        if not self._defers:
            fits &= ends % self._block != 0
            fits[:chunks] = False
            return fits
        if not fits[chunks:].all():  # one pass for all of which many wait
            fits &= after < most // 2
        total = self.waiting.total + int(counts.sum())
        if total > PASS_TOKENS:  # those with the most, until half is left
            order = np.argsort(-after, kind="stable")
            left = total - np.cumsum(after[order])
            fits[order[: 1 + int(np.searchsorted(-left, -(PASS_TOKENS // 2)))]] = False
        return fits

    def _keep(self, step: Sampled, rows: np.ndarray, counts: np.ndarray) -> None:
        """Keeps the hidden states of ``rows`` of the plan, each of ``counts`` (int64 [all rows]) tokens."""
        assert step.hidden is not None
        device = step.slots.device
        counts = counts[rows]
        within, source = _ranges(np.zeros(len(rows), np.int64), step.begins()[rows], counts)
        owner, place, source_ = upload(np.stack([np.repeat(rows, counts), within, source]), device)
        hidden = step.hidden if len(source) == len(step.hidden) else step.hidden[source_]
        self.waiting.keep(step.slots[owner], step.starts[owner] + place, hidden)

    def _first(self, step: Sampled, made: _Rows, wanted: np.ndarray) -> Tensor:
        """Makes the entries of ``made``: [wanted rows, hidden] at their last accepted positions."""
        device = step.slots.device
        parts = _segments(step, made)
        rows, behind = upload(np.stack([made.rows, made.waiting]), device)
        starts = step.starts[rows] - behind
        # Nothing but its entry is wanted of any other token; of a step where nobody wants drafts, of none.
        first = np.zeros(step.plan.rows, np.int64)
        first[made.rows] = made.begins() + made.waiting
        at = upload(np.stack([wanted, first[wanted]]), device)
        keep = at[1] + (step.ends - step.starts - 1)[at[0]]
        own = self._steps.follow(*parts, starts, np.zeros(0, np.int64), 1)
        hidden = self._gather(step, made, own)
        return self._chain.ahead(own, hidden, keep)

    def _gather(self, step: Sampled, made: _Rows, own: StepInput) -> Tensor:
        """[tokens of ``made``, hidden]: what waited, and what this step made. ``own``: the drafter's step."""
        assert step.hidden is not None
        whole = len(made.rows) == step.plan.rows and not made.waiting.any()
        if whole and len(step.hidden) == int(made.counts.sum()):
            return step.hidden
        count = made.counts - made.waiting
        source, to = _ranges(step.begins()[made.rows], made.begins() + made.waiting, count)
        if not made.waiting.any():
            return step.hidden[upload(source, step.hidden.device)]
        slot = np.concatenate([step.plan.prefill.slot, step.plan.decode.slot])[made.rows]
        kept, _ = _ranges(made.begins(), made.begins(), made.waiting)
        owner = np.repeat(slot.astype(np.int64), made.waiting)
        token, slots = upload(np.stack([kept, owner]), step.hidden.device)
        from_, into = upload(np.stack([source, to]), step.hidden.device)
        hidden = step.hidden.new_empty(len(source) + len(kept), step.hidden.shape[1])
        hidden[into] = step.hidden[from_]
        hidden[token] = self.waiting.take(slots, own.positions[token])
        return hidden


def _segments(step: Sampled, made: _Rows) -> tuple[Segment, Segment]:
    """The drafter's rows as two segments; starts are upper bounds, as the plan's are."""
    both = (step.plan.prefill, step.plan.decode)
    slot, start = (np.concatenate([getattr(s, name) for s in both])[made.rows] for name in ("slot", "start"))
    parts = (slice(0, made.chunks), slice(made.chunks, None))
    return tuple(  # type: ignore[return-value]
        Segment(
            slot=column(slot[part]),
            start=column((start - made.waiting)[part]),
            count=column(made.counts[part]),
        )
        for part in parts
    )


def _ranges(first: np.ndarray, other: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``first[i] + j`` and ``other[i] + j`` for j below ``counts[i]``, for each i in turn."""
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(first, counts) + within, np.repeat(other, counts) + within
