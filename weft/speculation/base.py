"""The interface of drafters.

A row of ``1 + k`` tokens verifies k drafts. The drafts are in the history of the slot, behind the newest
token. A drafter makes the drafts: the runner calls the drafter, on the device, when the tokens of a step are
sampled.

    history[slot]   0 ....... start ......... end        end + 1 ... end + next_k
                    computed  | this step's | newest    | drafts
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from weft.types.plan import SlotUpdate, StepPlan

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A step with its sampled tokens in the history. Rows are the plan's rows, prefill first; columns cover
    all rows."""

    plan: StepPlan
    slots: Tensor
    """int64 [rows]."""
    starts: Tensor
    """int64 [rows]: number of positions computed before the step."""
    num_computed: Tensor
    """int64 [slots + 1]: number of positions computed and accepted so far."""
    hidden: Tensor | None
    """[T, hidden] of the merged tokens, for a drafter with ``reads_hidden``; else None."""
    each: int = 0
    """Number of tokens of every row in ``hidden``; 0: rows have different lengths."""
    stored: bool = False
    """True if ``Drafter.hidden_sink`` has already received the hidden states."""

    @cached_property
    def next_k(self) -> np.ndarray:
        """int32 [rows], on the host: wanted drafts."""
        return np.concatenate([self.plan.prefill.next_k, self.plan.decode.next_k])

    @cached_property
    def ends(self) -> Tensor:
        """int64 [rows]: ``num_computed`` of each row. For a sampling row: the position of the newest
        token."""
        return self.num_computed[self.slots]

    def wanted(self) -> np.ndarray:
        """Return the indices of rows with wanted drafts, int64."""
        return np.flatnonzero(self.next_k)

    def begins(self) -> np.ndarray:
        """Return the index of each row's first token in ``hidden``, int64 [rows], on the host."""
        if self.each:
            return np.arange(self.plan.rows) * self.each
        count = np.concatenate([self.plan.prefill.count, self.plan.decode.count]).astype(np.int64)
        result: np.ndarray = np.cumsum(count) - count
        return result

    def bounds(self) -> np.ndarray:
        """Return upper bounds of ``ends``, int64 [rows], on the host."""
        both = (self.plan.prefill, self.plan.decode)
        result: np.ndarray = np.concatenate([s.start.astype(np.int64) + s.count for s in both])
        return result


class Drafter(ABC):
    """Proposes tokens. The runner owns the drafter and calls the drafter from one thread only."""

    #: True if ``Sampled.hidden`` is required.
    reads_hidden: bool = False
    #: True if ``propose`` need not be called after a step without wanted drafts.
    skips_idle_steps: bool = False
    #: True if the last drafts took longer than later equal drafts, which will be replayed.
    uncaptured: bool = False

    def enter(self, slot: int) -> None:
        """Reset the state of ``slot`` for a new sequence."""
        return

    def reset(self) -> None:
        """Reset everything at the end of an epoch: all slots are free."""
        return

    def hidden_sink(self) -> Callable[[Tensor, Tensor, Tensor], None] | None:
        """Return a function to store the hidden states of a replayed step, or None if not needed.

        The function gets slots and positions (int64 [rows]) and hidden [rows, hidden], one token per row. The
        function may be captured with the step.
        """
        return None

    def prepare(self, ops: Sequence[SlotUpdate]) -> None:
        """Handle the slot updates ``ops`` of a step before the updates apply: sequences leave, and other
        sequences find the blocks."""
        return

    def is_idle(self, plan: StepPlan) -> bool:
        """Return True if nothing remains to do after a step handled by ``hidden_sink``; the step then counts
        as done. Call at most once per step. If False, call ``propose``."""
        return False

    @abstractmethod
    def propose(self, step: Sampled) -> Tensor | None:
        """Return the drafts, int64 [wanted rows, most ``next_k``]; None if no row wants drafts.

        In a row with fewer wanted drafts, the last drafts are arbitrary. May write cache entries and the
        history behind the newest tokens. Call once for every step, in order, except steps skipped by
        ``skips_idle_steps`` or ``is_idle``. Launches work on the device and does not wait.
        """
