"""Hidden states that wait until a drafter makes its entries from them."""

from __future__ import annotations

import numpy as np
import torch

Tensor = torch.Tensor

MOST_WAITING, MOST_DEFERRED = 64, 256
"""States of a slot; and where they may wait for longer than a block."""
WAITING_BYTES = 64 << 20
"""Of those of all slots, but that each slot's fill a block."""


class PendingHidden:
    """For each slot the hidden states of its latest positions.

    Which ones follows from plans, and is known on the host; the states are on the device only.
    """

    def __init__(self, slots: int, most: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        """``most``: positions of a slot."""
        self.most = most
        self.counts = np.zeros(slots, np.int64)
        """Of each slot, how many wait."""
        self.ends = np.zeros(slots, np.int64)
        """Of slots where some do: the position behind the last one."""
        self._shape = (slots * most, hidden)
        self._dtype = dtype
        self._device = device
        self._states: Tensor | None = None
        """[slots * most, hidden], by slot and position modulo the most; see ``make``."""
        self.total = 0
        """Of all slots."""
        self._bound = 0
        """No slot has more."""

    def make(self) -> Tensor:
        """The memory of the states. Not before there is a use for it: it may be large."""
        if self._states is None:
            self._states = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self._states

    def forget(self, slot: int) -> None:
        """None wait of ``slot``."""
        self.total -= int(self.counts[slot])
        self.counts[slot] = 0

    def clear(self) -> None:
        """None wait at all."""
        self.counts.fill(0)
        self.total = 0

    def keep(self, slots: Tensor, positions: Tensor, hidden: Tensor) -> None:
        """Keeps hidden [n, hidden] of ``positions`` (int64 [n]) of ``slots`` (int64 [n])."""
        self.make().index_copy_(0, self._rows_of(slots, positions), hidden)

    def take(self, slots: Tensor, positions: Tensor) -> Tensor:
        """[n, hidden]: what was kept."""
        return self.make()[self._rows_of(slots, positions)]

    def _rows_of(self, slots: Tensor, positions: Tensor) -> Tensor:
        return torch.add(positions % self.most, slots, alpha=self.most)

    def full(self, slots: np.ndarray) -> bool:
        """Whether no more fits for one of ``slots``. To be asked once a step."""
        self._bound += 1
        if self._bound < self.most:
            return False
        self._bound = int(self.counts.max()) + 1
        return self._bound >= self.most and int(self.counts[slots].max()) + 1 >= self.most

    def add(self, slots: np.ndarray, starts: np.ndarray) -> None:
        """One more of each of ``slots``, at ``starts``."""
        self.total += len(slots)
        self.counts[slots] += 1
        self.ends[slots] = starts + 1

    def set(self, slots: np.ndarray, counts: np.ndarray, ends: np.ndarray) -> None:
        """``counts`` of ``slots`` wait, up to ``ends``."""
        self.total += int(counts.sum() - self.counts[slots].sum())
        self.counts[slots] = counts
        self.ends[slots] = ends
        self._bound = max(self._bound, int(counts.max(initial=0)))

    def overdue(self, block: int) -> np.ndarray:
        """int64: the slots where those of a full block of ``block`` positions wait."""
        begins = self.ends - self.counts
        result: np.ndarray = np.flatnonzero((self.counts > 0) & (self.ends // block > begins // block))
        return result


def most_waiting(block: int, position: int, defers: bool) -> int:
    """States of a slot that may wait. ``position``: bytes that one of every slot takes."""
    if not defers:
        return min(block, MOST_WAITING)
    return min(max(block, WAITING_BYTES // position), MOST_DEFERRED)
