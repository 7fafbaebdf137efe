"""Drafts from the model's own module that predicts further tokens.

It is one more layer, with a cache of its own. Its line at position p is made from the model's hidden state
there and from the token at p + 1, so it can be made when that is sampled:

    position        p - 1          p            p + 1        p + 2
    token                          t            sampled      draft 1      draft 2
    line of     hidden, t    hidden, sampled    | own output, draft 1 ...
                             └─ draft 1         └─ draft 2

The line of the last accepted position gives the first draft. For each further one the module runs on its own
output and the last draft; those lines are guesses, and made again when their positions have been computed.

A row that wants no drafts needs no lines yet: its hidden states wait until the lines are drafted from, or
others may find its block. That is when the block is full; or, where a pass of the module concerns no other
ranks, when somebody comes who found blocks, and when the sequence ends. So where nothing is drafted, the
module costs little behind the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.attention.base import Backends, LayerCache, StepInput
from weft.models.base import Model
from weft.ops.upload import upload
from weft.speculation.base import Drafter, Sampled
from weft.speculation.chain import Chain, RecordedChains, Recording, Steps
from weft.types.plan import EMPTY_SEGMENT, AllocSlot, FreeSlot, Op, Segment, column

Tensor = torch.Tensor

MOST_WAITING = 64
"""Hidden states of a slot that wait for their lines."""
PASS_TOKENS = 2048
"""Most tokens of a pass over lines that waited: it comes on top of a step."""
WAITING_BYTES = 64 << 20
"""Of those of all slots, but that each slot's fill a block."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a step whose lines are made now, in the order of the drafter's step: chunks first."""

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
        made: np.ndarray = np.cumsum(self.counts) - self.counts
        return made


class MtpDrafter(Drafter):
    """Greedy drafts, whatever the temperature; ties go to the lowest id."""

    reads_hidden = True

    def __init__(
        self,
        model: Model,
        cache: Sequence[LayerCache],
        backends: Backends,
        steps: Steps,
        history: Tensor,
        vocab_size: int,
        block_size: int,
        recording: Recording | None = None,
        *,
        shared: bool = True,
        defers: bool = False,
    ) -> None:
        """history: int32 [slots + 1, longest]. ``block_size``: positions of a block. ``shared``: others may
        find a full one.

        ``defers``: lines of full blocks may wait, for ``prepare``. Not where other ranks have a part in a
        pass, nor where blocks are given up while their sequence goes on.
        """
        self._chain = Chain(model, cache, backends, steps, history, vocab_size)
        self._steps = steps
        self._block = block_size if shared or not defers else history.shape[1]
        self._defers = defers
        slots = history.shape[0]
        self._most = most_waiting(block_size, slots * model.spec.hidden * model.dtype.itemsize, defers)
        self._waiting = np.zeros(slots, np.int64)
        """Of each slot, how many hidden states wait."""
        self._verified = np.zeros(slots, bool)
        """Whether the slot's last row had drafts: then nobody here knows where the next one starts."""
        self._overdue = np.zeros(slots, bool)
        """Whether lines of a full block wait."""
        self._ends = np.zeros(slots, np.int64)
        """Of slots that wait: upper bound of the positions computed."""
        self._computed: Tensor | None = None
        """``Sampled.num_computed``."""
        self._kept: Tensor | None = None
        """[slots, most waiting, hidden], by position modulo the most."""
        self.recorded = None if recording is None else RecordedChains(self._chain, recording)
        """Drafting that is replayed."""

    def enter(self, slot: int) -> None:
        self._waiting[slot] = 0
        self._verified[slot] = self._overdue[slot] = False

    def prepare(self, ops: Sequence[Op]) -> None:
        if not self._overdue.any():
            return
        if any(isinstance(op, AllocSlot) and op.num_cached for op in ops):
            slots = np.flatnonzero(self._overdue)
        else:
            freed = [op.slot for op in ops if isinstance(op, FreeSlot)]
            slots = np.array([slot for slot in freed if self._overdue[slot]], np.int64)
        each = max(PASS_TOKENS // self._most, 1)
        for first in range(0, len(slots), each):
            self._settle(slots[first : first + each])

    def _settle(self, slots: np.ndarray) -> None:
        """Makes all lines of ``slots`` (int64 [rows]) that wait."""
        assert self._kept is not None
        assert self._computed is not None
        waiting = self._waiting[slots]
        segment = Segment(
            slot=column(slots), start=column(self._ends[slots] - waiting), count=column(waiting)
        )
        device = self._kept.device
        at, behind = upload(np.stack([slots, waiting]), device)
        owner = upload(np.repeat(slots, waiting), device)
        none = np.zeros(0, np.int64)
        step = self._steps.follow(segment, EMPTY_SEGMENT, self._computed[at] - behind, none, 1)
        self._chain.ahead(step, self._kept[owner, step.positions % self._most], at[:0])
        self._waiting[slots] = 0
        self._overdue[slots] = False

    def reset(self) -> None:
        for column_ in (self._waiting, self._verified, self._overdue):
            column_.fill(0)
        if self.recorded is not None:
            self.recorded.reset()

    def propose(self, step: Sampled) -> Tensor | None:
        """Where replicas agreed on the step, the module runs as often in each of them: it may communicate."""
        agreed, begun = step.plan.agreed, self._chain.passes
        drafts = self._propose(step) if step.plan.rows else None
        if agreed is not None:
            for _ in range(begun + max(agreed.drafts, 1) - self._chain.passes):
                self._chain.run_empty()
        return drafts

    def _propose(self, step: Sampled) -> Tensor | None:
        assert step.hidden is not None, "hidden states that nobody kept"
        self.cold = False
        self._computed = step.num_computed
        if self._rests(step):
            self._keep(step.slots, step.starts, step.hidden)
            return None
        wanted = step.wanted()
        made = self._due(step, len(wanted) > 0)
        if not len(made.rows):
            return None
        alike = step.plan.agreed is None and not step.plan.prefill.rows and not made.chunks
        if len(wanted) and self.recorded is not None and alike:
            drafts = self.recorded.propose(step)
            self.cold = self.recorded.cold
            if drafts is not None:
                return drafts if len(wanted) == len(drafts) else drafts[upload(wanted, drafts.device)]
        hidden = self._first(step, made, wanted)
        if not len(wanted):
            return None
        ends, slots = step.ends, step.slots
        if len(wanted) < len(step.next_k):
            at = upload(wanted, slots.device)
            ends, slots = ends[at], slots[at]
        return self._chain.go_on(hidden, slots, ends, step.bounds()[wanted], int(step.next_k.max()))

    def _rests(self, step: Sampled) -> bool:
        """Whether only the hidden states of all rows are to be kept; if so, notes that they wait."""
        decode = step.plan.decode
        slots = decode.slot
        if step.plan.prefill.rows or decode.next_k.any() or self._verified[slots].any():
            return False
        waiting = self._waiting[slots] + 1
        assert step.hidden is not None
        if len(step.hidden) != len(slots) or waiting.max() >= self._most:
            return False
        full = (decode.start + 1) % self._block == 0
        if full.any():
            if not self._defers:
                return False
            self._overdue[slots[full]] = True
        self._waiting[slots] = waiting
        self._ends[slots] = decode.start + 1
        return True

    def _due(self, step: Sampled, drafting: bool) -> _Rows:
        """The rows whose lines are made now: all, if any drafts. Of others the hidden states are kept."""
        prefill, decode = step.plan.prefill, step.plan.decode
        slots, plain = decode.slot, decode.count == 1
        waiting = self._waiting[slots]
        full = (decode.start + 1) % self._block == 0
        keep = plain & ~self._verified[slots] & self._can_wait(waiting + 1, full) & (not drafting)
        self._verified[slots] = ~plain
        self._overdue[slots] = keep & (full | self._overdue[slots])
        self._ends[slots] = decode.start + 1
        if keep.any():
            rows = prefill.rows + np.flatnonzero(keep)
            at, source = upload(np.stack([rows, step.begins()[rows]]), step.slots.device)
            assert step.hidden is not None
            self._keep(step.slots[at], step.starts[at], step.hidden[source])
        self._waiting[slots] = np.where(keep, waiting + 1, 0)
        chunk = ~keep & (waiting > 0)
        order = np.concatenate([np.flatnonzero(chunk), np.flatnonzero(~keep & ~chunk)])
        none = np.zeros(prefill.rows, np.int64)
        behind = np.concatenate([none, waiting[order]])
        counts = np.concatenate([prefill.count, decode.count[order] + waiting[order]]).astype(np.int64)
        rows = np.concatenate([np.arange(prefill.rows), prefill.rows + order])
        return _Rows(rows, behind, counts, prefill.rows + int(chunk.sum()))

    def _can_wait(self, waiting: np.ndarray, full: np.ndarray) -> np.ndarray:
        """bool [rows]: whose lines need not be made now. ``waiting``: hidden states, with this step's."""
        fits: np.ndarray = waiting < self._most
        if not self._defers:
            return fits & ~full
        if not fits.all():  # one pass for all of which many wait
            fits = waiting < self._most // 2
        return fits

    def _keep(self, slots: Tensor, positions: Tensor, hidden: Tensor) -> None:
        """Keeps hidden [rows, hidden] of one position (int64 [rows]) of each of ``slots``."""
        if self._kept is None:
            self._kept = hidden.new_empty(len(self._waiting), self._most, hidden.shape[1])
        self._kept[slots, positions % self._most] = hidden

    def _first(self, step: Sampled, made: _Rows, wanted: np.ndarray) -> Tensor:
        """Makes the lines of ``made``: [wanted rows, hidden] at their last accepted positions."""
        device = step.slots.device
        parts = _segments(step, made)
        rows, behind = upload(np.stack([made.rows, made.waiting]), device)
        starts = step.starts[rows] - behind
        # Nothing but its line is wanted of any other token; of a step where nobody wants drafts, of none.
        first = np.zeros(step.plan.rows, np.int64)
        first[made.rows] = made.begins() + made.waiting
        at = upload(np.stack([wanted, first[wanted]]) if len(wanted) else np.zeros((2, 1), np.int64), device)
        keep = at[1] + (step.ends - step.starts - 1)[at[0]] if len(wanted) else at[1]
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
        if self._kept is None or not made.waiting.any():
            return step.hidden[upload(source, step.hidden.device)]
        slot = np.concatenate([step.plan.prefill.slot, step.plan.decode.slot])[made.rows]
        kept, _ = _ranges(made.begins(), made.begins(), made.waiting)
        owner = np.repeat(slot.astype(np.int64), made.waiting)
        token, slots = upload(np.stack([kept, owner]), step.hidden.device)
        from_, into = upload(np.stack([source, to]), step.hidden.device)
        hidden = step.hidden.new_empty(len(source) + len(kept), step.hidden.shape[1])
        hidden[into] = step.hidden[from_]
        hidden[token] = self._kept[slots, own.positions[token] % self._most]
        return hidden


def most_waiting(block: int, position: int, defers: bool) -> int:
    """Hidden states of a slot that may wait. ``position``: bytes that one of every slot takes."""
    fits = WAITING_BYTES // position if defers else 0
    return min(max(block, fits), MOST_WAITING)


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
