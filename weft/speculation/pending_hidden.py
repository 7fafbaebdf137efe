"""Hidden states stored until a drafter makes cache entries from the states."""

from __future__ import annotations

import numpy as np
import torch

Tensor = torch.Tensor

MOST_WAITING, MOST_DEFERRED = 64, 256
"""Maximum states per slot: without deferral, and with deferral beyond a block."""
WAITING_BYTES = 64 << 20
"""Maximum bytes of the states of all slots, except that each slot may always fill a block."""


class PendingHidden:
    """The hidden states of the latest positions of each slot.

    The set of stored positions follows from plans and is known on the host. The states exist only on the
    device.
    """

    def __init__(self, slots: int, most: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        """``most``: maximum positions per slot."""
        self.most = most
        self.counts = np.zeros(slots, np.int64)
        """[slots], number of pending states."""
        self.ends = np.zeros(slots, np.int64)
        """[slots], position after the last pending state; valid where states are pending."""
        self._shape = (slots * most, hidden)
        self._dtype = dtype
        self._device = device
        self._states: Tensor | None = None
        """[slots * most, hidden], indexed by slot and position modulo ``most``; None before ``make``."""
        self.total = 0
        """Number of pending states of all slots."""
        self._bound = 0
        """Upper bound of the states of any slot."""

    def make(self) -> Tensor:
        """Return the memory, allocated on the first call. Lazy, because the memory may be large."""
        if self._states is None:
            self._states = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self._states

    def forget(self, slot: int) -> None:
        """Drop the states of ``slot``."""
        self.total -= int(self.counts[slot])
        self.counts[slot] = 0

    def clear(self) -> None:
        """Drop the states of all slots."""
        self.counts.fill(0)
        self.total = 0

    def keep(self, slots: Tensor, positions: Tensor, hidden: Tensor) -> None:
        """Store hidden [n, hidden] for ``positions`` (int64 [n]) of ``slots`` (int64 [n])."""
        self.make().index_copy_(0, self._rows_of(slots, positions), hidden)

    def take(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the stored states, [n, hidden]."""
        return self.make()[self._rows_of(slots, positions)]

    def _rows_of(self, slots: Tensor, positions: Tensor) -> Tensor:
        return torch.add(positions % self.most, slots, alpha=self.most)

    def full(self, slots: np.ndarray) -> bool:
        """Return True if one of ``slots`` has no room for another state. Call once per step."""
        # An upper bound, increased by one per step, avoids a scan of all slots in most steps.
        self._bound += 1
        if self._bound < self.most:
            return False
        self._bound = int(self.counts.max()) + 1
        return self._bound >= self.most and int(self.counts[slots].max()) + 1 >= self.most

    def add(self, slots: np.ndarray, starts: np.ndarray) -> None:
        """Count one more state for each of ``slots``, at positions ``starts``."""
        self.total += len(slots)
        self.counts[slots] += 1
        self.ends[slots] = starts + 1

    def set(self, slots: np.ndarray, counts: np.ndarray, ends: np.ndarray) -> None:
        """Set the number of pending states of ``slots`` to ``counts``, up to positions ``ends``."""
        self.total += int(counts.sum() - self.counts[slots].sum())
        self.counts[slots] = counts
        self.ends[slots] = ends
        self._bound = max(self._bound, int(counts.max(initial=0)))

    def overdue(self, block: int) -> np.ndarray:
        """Return the slots with pending states of a full block of ``block`` positions, int64."""
        # A block boundary inside the pending positions: a full block waits for entries.
        begins = self.ends - self.counts
        result: np.ndarray = np.flatnonzero((self.counts > 0) & (self.ends // block > begins // block))
        return result


def most_waiting(block: int, position: int, defers: bool) -> int:
    """Return the maximum pending states per slot. ``position``: bytes of one state for every slot."""
    if not defers:
        return min(block, MOST_WAITING)
    return min(max(block, WAITING_BYTES // position), MOST_DEFERRED)
