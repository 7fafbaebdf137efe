"""Slots: the small integers by which every rank of a group knows a running sequence."""

from __future__ import annotations

import heapq

from weft.common.errors import EngineDead
from weft.types.plan import FreeSlot


class SlotTable:
    """The allocator of ``num_slots`` slots. A slot given back can be taken again after the last plan that
    names it commits.

    Sequences of a slot are told apart by ``gen``, which only grows. The ``FreeSlot`` of the old sequence is
    in the ops of the next plan that is made, before any ``AllocSlot``: the builder of a plan puts
    ``announce()`` first.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))  # a heap: the lowest slot is taken first
        self._gen = [0] * num_slots
        self._taken = [False] * num_slots
        self._pending: dict[int, list[int]] = {}  # step -> slots that are free when it commits
        self._freed: list[FreeSlot] = []
        self._last_commit = -1

    def available(self) -> int:
        """Slots that ``take`` can give now."""
        return len(self._free)

    def peek(self) -> int:
        """The slot that ``take`` gives next."""
        return self._free[0]

    def take(self) -> tuple[int, int]:
        """(slot, gen) for a new sequence. Raises EngineDead when no slot is free: callers ask first."""
        if not self._free:
            raise EngineDead("a slot was taken when none was free")
        slot = heapq.heappop(self._free)
        self._gen[slot] += 1
        self._taken[slot] = True
        return slot, self._gen[slot]

    def release(self, slot: int, after_step: int) -> None:
        """Frees the slot, at once or when ``after_step`` commits."""
        if not self._taken[slot]:
            raise EngineDead("a slot was released that has no sequence")
        self._taken[slot] = False
        if after_step > self._last_commit:
            self._pending.setdefault(after_step, []).append(slot)
        else:
            self._free_now(slot)

    def committed(self, step: int) -> None:
        """``step`` and all before it have committed."""
        self._last_commit = step
        for due in [s for s in self._pending if s <= step]:
            for slot in self._pending.pop(due):
                self._free_now(slot)

    def reset(self) -> None:
        """Frees all slots. No rank knows of a sequence any more, so there is no ``FreeSlot`` to announce."""
        self._free = list(range(self.num_slots))
        self._taken = [False] * self.num_slots
        self._pending.clear()
        self._freed = []

    def announce(self) -> list[FreeSlot]:
        """(slot, gen) of the sequences that left their slot and that no plan has freed yet; each is given
        once.
        """
        freed = self._freed
        self._freed = []
        return freed

    def _free_now(self, slot: int) -> None:
        heapq.heappush(self._free, slot)
        self._freed.append(FreeSlot(slot=slot, gen=self._gen[slot]))
