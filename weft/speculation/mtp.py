"""Drafts from the model's own module that predicts further tokens.

It is one more layer, with a cache of its own. Its line at position p is made from the model's hidden state
there and from the token at p + 1, so it can be made when that is sampled:

    position        p - 1          p            p + 1        p + 2
    token                          t            sampled      draft 1      draft 2
    line of     hidden, t    hidden, sampled    | own output, draft 1 ...
                             └─ draft 1         └─ draft 2

The line of the last accepted position gives the first draft. For each further one the module runs on its own
output and the last draft; those lines are guesses, and made again when their positions have been computed.

A row that wants no drafts needs no lines yet: its hidden states wait, at most until its block is full, when
others may find it. So where nothing is drafted, the module costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from weft.attention.base import Backends, LayerCache, StepInput
from weft.models.base import Model
from weft.ops import sampling as ops
from weft.ops.cpu import sampling as direct
from weft.ops.upload import upload
from weft.overlap.drive import drive
from weft.speculation.base import Drafter, Sampled
from weft.types.plan import Segment, column

Tensor = torch.Tensor

MOST_WAITING = 64
"""Hidden states of a slot that wait for their lines."""


class Steps(Protocol):
    """Makes steps over rows of the drafter's own. ``runner.batch.BatchBuilder`` does."""

    def follow(
        self, prefill: Segment, decode: Segment, starts: Tensor, logits_index: np.ndarray, shift: int
    ) -> StepInput:
        """Any rows."""

    def decode(
        self, slots: Tensor, bound: Segment, starts: Tensor | None = None, shift: int = 0
    ) -> StepInput:
        """Rows of one token."""


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
    ) -> None:
        """history: int32 [slots + 1, longest]. ``block_size``: positions of a block that others may find."""
        self._model, self._cache, self._backends = model, cache, backends
        self._steps = steps
        self._history = history
        self._vocab = vocab_size
        self._block = block_size
        self._most = min(block_size, MOST_WAITING)
        slots = history.shape[0]
        self._waiting = np.zeros(slots, np.int64)
        """Of each slot, how many hidden states wait."""
        self._verified = np.zeros(slots, bool)
        """Whether the slot's last row had drafts: then nobody here knows where the next one starts."""
        self._kept: Tensor | None = None
        """[slots, most waiting, hidden]."""

    def enter(self, slot: int) -> None:
        self._waiting[slot] = 0
        self._verified[slot] = False

    def propose(self, step: Sampled) -> Tensor | None:
        assert step.hidden is not None, "hidden states that nobody kept"
        made = self._due(step)
        wanted = step.wanted()
        if not len(made.rows):
            return None
        hidden = self._first(step, made, wanted)
        if not len(wanted):
            return None
        drafts = [self._best(hidden)]
        ends, slots, bounds = step.ends, step.slots, step.bounds()
        if len(wanted) < len(step.next_k):
            at = upload(wanted, slots.device)
            ends, slots = ends[at], slots[at]
        # Rows that want fewer drafts than others run along: what they get is dropped, and so are their lines.
        left, bounds = step.next_k[wanted], bounds[wanted]
        for place in range(1, int(left.max())):
            self._write(slots, ends + place, drafts[-1])
            positions = (ends + (place - 1)).clamp_(max=self._history.shape[1] - 2)
            bound = _bound(np.minimum(bounds + place - 1, self._history.shape[1] - 2))
            one = self._steps.decode(slots, bound, positions, 1)
            hidden = drive(self._model.ahead(one, hidden, self._cache, self._backends))
            drafts.append(self._best(hidden))
        return torch.stack(drafts, dim=1)

    def _due(self, step: Sampled) -> _Rows:
        """The rows whose lines are made now; of the others the hidden states are kept."""
        prefill, decode = step.plan.prefill, step.plan.decode
        slots, plain = decode.slot, decode.count == 1
        waiting = self._waiting[slots]
        full = (decode.start + 1) % self._block == 0
        keep = plain & (decode.next_k == 0) & ~self._verified[slots] & ~full & (waiting + 1 < self._most)
        self._verified[slots] = ~plain
        if keep.any():
            self._keep(step, np.flatnonzero(keep))
        self._waiting[slots] = np.where(keep, waiting + 1, 0)
        chunk = ~keep & (waiting > 0)
        order = np.concatenate([np.flatnonzero(chunk), np.flatnonzero(~keep & ~chunk)])
        none = np.zeros(prefill.rows, np.int64)
        behind = np.concatenate([none, waiting[order]])
        counts = np.concatenate([prefill.count, decode.count[order] + waiting[order]]).astype(np.int64)
        rows = np.concatenate([np.arange(prefill.rows), prefill.rows + order])
        return _Rows(rows, behind, counts, prefill.rows + int(chunk.sum()))

    def _keep(self, step: Sampled, rows: np.ndarray) -> None:
        """Puts the one hidden state of each of the decode rows ``rows`` to those that wait in its slot."""
        assert step.hidden is not None
        decode = step.plan.decode
        if self._kept is None:
            shape = (len(self._waiting), self._most, step.hidden.shape[1])
            self._kept = step.hidden.new_empty(shape)
        begins = step.plan.prefill.tokens + np.cumsum(decode.count) - decode.count
        slots = decode.slot[rows]
        columns = np.stack([begins[rows], slots * self._most + self._waiting[slots]]).astype(np.int64)
        source, to = upload(columns, step.hidden.device)
        self._kept.view(-1, step.hidden.shape[1]).index_copy_(0, to, step.hidden[source])

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
        hidden = self._gather(step, made)
        return drive(self._model.ahead(own, hidden, self._cache, self._backends, keep))

    def _gather(self, step: Sampled, made: _Rows) -> Tensor:
        """[tokens of ``made``, hidden]: what waited, and what this step made."""
        assert step.hidden is not None
        if len(made.rows) == step.plan.rows and not made.waiting.any():
            return step.hidden
        count = np.concatenate([step.plan.prefill.count, step.plan.decode.count]).astype(np.int64)
        theirs = (np.cumsum(count) - count)[made.rows]
        source, to = _ranges(theirs, made.begins() + made.waiting, count[made.rows])
        slot = np.concatenate([step.plan.prefill.slot, step.plan.decode.slot])[made.rows].astype(np.int64)
        kept, place = _ranges(slot * self._most, made.begins(), made.waiting)
        total = len(source) + len(kept)
        device = step.hidden.device
        if self._kept is None or not len(kept):
            return step.hidden[upload(source, device)]
        hidden = step.hidden.new_empty(total, step.hidden.shape[1])
        hidden[upload(to, device)] = step.hidden[upload(source, device)]
        hidden[upload(place, device)] = self._kept.view(-1, hidden.shape[1])[upload(kept, device)]
        return hidden

    def _best(self, hidden: Tensor) -> Tensor:
        """int64 [rows]: the likeliest token behind each; any where there is none."""
        logits = self._model.logits(hidden)
        if direct.serves(logits):
            ids, wrong = direct.greedy(logits, torch.arange(len(logits)), self._vocab)
        else:
            ids, wrong = ops.greedy(logits[:, : self._vocab])
        return ids.masked_fill(wrong, 0)

    def _write(self, slots: Tensor, places: Tensor, ids: Tensor) -> None:
        self._history[slots, places.clamp(max=self._history.shape[1] - 1)] = ids.to(self._history.dtype)


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


def _bound(starts: np.ndarray) -> Segment:
    """Rows of one token, as far as shapes depend on them."""
    one = column(np.ones(len(starts)))
    return Segment(slot=one, start=column(starts), count=one)


def _ranges(first: np.ndarray, other: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``first[i] + j`` and ``other[i] + j`` for j below ``counts[i]``, for each i in turn."""
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(first, counts) + within, np.repeat(other, counts) + within
