"""The interface of drafters.

A step's row of ``1 + k`` tokens verifies k drafts, which lie in the history of its slot behind the newest
token. They come from a drafter, which the runner asks when a step's tokens are sampled, on the device.

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

from weft.types.plan import Op, StepPlan

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A step whose tokens are in the history. Rows are the plan's, prefill first; columns are of all rows."""

    plan: StepPlan
    slots: Tensor
    """int64 [rows]."""
    starts: Tensor
    """int64 [rows]: positions computed before the step."""
    num_computed: Tensor
    """int64 [slots + 1]: positions computed and accepted now."""
    hidden: Tensor | None
    """[T, hidden] of the merged tokens, for a drafter that ``reads_hidden``."""
    each: int = 0
    """Tokens that every row takes up in ``hidden``; 0: as many as it has."""
    kept: bool = False
    """Whether ``Drafter.hidden_sink`` got the step's hidden states already."""

    @cached_property
    def next_k(self) -> np.ndarray:
        """int32 [rows], on the host: drafts wanted."""
        return np.concatenate([self.plan.prefill.next_k, self.plan.decode.next_k])

    @cached_property
    def ends(self) -> Tensor:
        """int64 [rows]: ``num_computed`` of each. Of a row that sampled, the newest token is there."""
        return self.num_computed[self.slots]

    def wanted(self) -> np.ndarray:
        """int64: the rows that want drafts."""
        return np.flatnonzero(self.next_k)

    def begins(self) -> np.ndarray:
        """int64 [rows], on the host: the first token of each row in ``hidden``."""
        if self.each:
            return np.arange(self.plan.rows) * self.each
        count = np.concatenate([self.plan.prefill.count, self.plan.decode.count]).astype(np.int64)
        result: np.ndarray = np.cumsum(count) - count
        return result

    def bounds(self) -> np.ndarray:
        """int64 [rows], on the host: upper bounds of ``ends``."""
        both = (self.plan.prefill, self.plan.decode)
        result: np.ndarray = np.concatenate([s.start.astype(np.int64) + s.count for s in both])
        return result


class Drafter(ABC):
    """Proposes tokens. Owned by the runner and used from its thread only."""

    #: Whether ``Sampled.hidden`` must be there.
    reads_hidden: bool = False
    #: Whether there is nothing to do after a step of which no row wants drafts.
    rests: bool = False
    #: Whether the last drafts took longer than later ones of the kind will, which are replayed.
    uncaptured: bool = False

    def enter(self, slot: int) -> None:
        """``slot`` has a new sequence."""
        return

    def reset(self) -> None:
        """An epoch has ended: all slots are free."""
        return

    def hidden_sink(self) -> Callable[[Tensor, Tensor, Tensor], None] | None:
        """What a replayed step of one token a row ends with: a function of slots, positions (int64 [rows])
        and hidden [rows, hidden], that may be captured. None: there is nothing to do."""
        return None

    def prepare(self, ops: Sequence[Op]) -> None:
        """A step's ``ops`` are about to be carried out: sequences leave, and others find their blocks."""
        return

    def is_idle(self, plan: StepPlan) -> bool:
        """After a step whose states ``hidden_sink`` got: whether there is nothing else to do. If there is,
        ``propose`` is called."""
        return False

    @abstractmethod
    def propose(self, step: Sampled) -> Tensor | None:
        """int64 [wanted rows, most ``next_k``]: drafts, of the vocabulary; None when no row wants any.

        In a row that wants fewer the last ones are arbitrary. Called once for every step, in order; launches
        work and waits for none.
        """
