"""Slots: small integers by which every rank of a group identifies a running sequence."""

from __future__ import annotations

import heapq

from weft.common.errors import EngineDead
from weft.types.plan import FreeSlot


class SlotTable:
    """The allocator of ``num_slots`` slots. A released slot is free after the commit of the last plan with
    the slot.

    ``gen`` distinguishes the sequences of a slot and only grows. The ``FreeSlot`` of the old sequence comes
    before any ``AllocSlot`` in the next plan: the builder of a plan puts ``announce()`` first.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))  # a heap: the lowest slot is taken first
        self._gen = [0] * num_slots
        self._taken = [False] * num_slots
        self._pending: dict[int, list[int]] = {}  # step -> slots freed by the commit
        self._freed: list[FreeSlot] = []
        self._last_commit = -1

    def available(self) -> int:
        """Return the number of free slots."""
        return len(self._free)

    def peek(self) -> int:
        """Return the next slot of ``take``. A slot must be free."""
        return self._free[0]

    def take(self) -> tuple[int, int]:
        """Return (slot, gen) for a new sequence. Raises EngineDead when no slot is free: callers check
        first."""
        if not self._free:
            raise EngineDead("a slot was taken when none was free")
        slot = heapq.heappop(self._free)
        self._gen[slot] += 1
        self._taken[slot] = True
        return slot, self._gen[slot]

    def release(self, slot: int, after_step: int) -> None:
        """Free the slot, at once or when ``after_step`` commits. Raises EngineDead for a slot without a
        sequence."""
        if not self._taken[slot]:
            raise EngineDead("a slot was released that has no sequence")
        self._taken[slot] = False
        if after_step > self._last_commit:
            self._pending.setdefault(after_step, []).append(slot)
        else:
            self._free_now(slot)

    def committed(self, step: int) -> None:
        """Note the commit of ``step`` and all earlier steps; free the slots of the steps."""
        self._last_commit = step
        for due in [s for s in self._pending if s <= step]:
            for slot in self._pending.pop(due):
                self._free_now(slot)

    def reset(self) -> None:
        """Free all slots without ``FreeSlot``: the ranks have empty slot tables."""
        self._free = list(range(self.num_slots))
        self._taken = [False] * self.num_slots
        self._pending.clear()
        self._freed = []

    def announce(self) -> list[FreeSlot]:
        """Return the ``FreeSlot`` of each freed sequence since the last call."""
        freed = self._freed
        self._freed = []
        return freed

    def _free_now(self, slot: int) -> None:
        heapq.heappush(self._free, slot)
        self._freed.append(FreeSlot(slot=slot, gen=self._gen[slot]))
