"""What the scheduler knows of running sequences, as columns: one entry a slot.

In most rows of a step nothing happens but one more token. Planning and committing those is arithmetic on
these columns; only a sequence that needs blocks, ends or asks for more is looked at as an object.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from weft.types.plan import Segment

if TYPE_CHECKING:
    from weft.scheduler.sequence import Running, Sequence

NO_ORIGIN = 1 << 30
"""More than any length."""
MAX_STOPS = 4
"""Stop ids that a column holds; a sequence with more is never quiet."""


class SlotColumns:
    """Arrays [slots]. In a free slot ``gen`` is 0, and the other entries are stale.

    gen             int32: number of the sequence in the slot, from 1
    sequence        uint64: its id
    limit           int32: tokens at which it ends, or leaves for another group
    origin          int32: tokens before its output, of a sequence with a room; NO_ORIGIN of others
    known           int32: ids that AllocSlot wrote
    num_cached      int32: prompt tokens found in the cache at its first admission
    num_computed    int32: by committed steps
    num_scheduled   int32: by all steps planned
    reserved        int64: how far the block tables reach
    last_step       int64: the last plan that names the slot
    drafts          int32: drafts that the last plan that names the slot leaves for the next one
    wanted          int32: drafts that it should propose, if there is room
    acceptance      float64: running share of its first drafts that were accepted
    exact           int32: how many of the last positions scheduled the device has the state after
    snapshot        int32: where the newest snapshot of its state was made; its hit, at first
    constrained     bool: a grammar says what it may sample
    quiet           bool: a row that samples one token, which ends nothing, has nothing else to tell
    stops           int32 [slots, MAX_STOPS]: ids that may end it; -1 pads
    """

    def __init__(self, num_slots: int) -> None:
        self.gen = np.zeros(num_slots, np.int32)
        self.sequence = np.zeros(num_slots, np.uint64)
        self.limit = np.zeros(num_slots, np.int32)
        self.origin = np.full(num_slots, NO_ORIGIN, np.int32)
        self.known = np.zeros(num_slots, np.int32)
        self.num_cached = np.zeros(num_slots, np.int32)
        self.num_computed = np.zeros(num_slots, np.int32)
        self.num_scheduled = np.zeros(num_slots, np.int32)
        self.reserved = np.zeros(num_slots, np.int64)
        self.last_step = np.full(num_slots, -1, np.int64)
        self.drafts = np.zeros(num_slots, np.int32)
        self.wanted = np.zeros(num_slots, np.int32)
        self.acceptance = np.zeros(num_slots, np.float64)
        self.exact = np.zeros(num_slots, np.int32)
        self.snapshot = np.zeros(num_slots, np.int32)
        self.constrained = np.zeros(num_slots, bool)
        self.quiet = np.zeros(num_slots, bool)
        self.stops = np.full((num_slots, MAX_STOPS), -1, np.int32)

    def enter(self, sequence: Sequence, run: Running) -> None:
        """Fills in what does not change while ``sequence`` is in the slot of ``run``."""
        slot = run.slot
        self.gen[slot] = run.gen
        self.sequence[slot] = sequence.id
        self.limit[slot] = sequence.limit
        self.origin[slot] = NO_ORIGIN if sequence.room is None else sequence.num_prompt
        self.known[slot] = run.known
        self.num_cached[slot] = sequence.num_cached
        self.constrained[slot] = sequence.constraint is not None
        self.set_stops(slot, sequence.stop_ids, quiet=sequence.params.logprobs < 0)
        self.last_step[slot] = -1
        self.drafts[slot] = 0
        self.exact[slot] = 0

    def set_stops(self, slot: int, stop_ids: Iterable[int], quiet: bool) -> None:
        """The ids that may end the sequence in ``slot``, and whether nothing else of its result is needed."""
        stops = list(stop_ids)
        self.quiet[slot] = quiet and len(stops) <= MAX_STOPS
        self.stops[slot] = (stops + [-1] * MAX_STOPS)[:MAX_STOPS]

    def prefilling(self, slots: np.ndarray) -> np.ndarray:
        """bool: which of ``slots`` have known ids that no plan computes yet."""
        prefilling: np.ndarray = self.num_scheduled[slots] < self.known[slots]
        return prefilling

    def constrains(self, prefill: Segment, decode: Segment) -> bool:
        """Whether a grammar says what some row samples, of those that a plan in the making has."""
        if not self.constrained.any():
            return False
        sampling = prefill.slot[prefill.sample > 0]
        return bool(self.constrained[sampling].any() or self.constrained[decode.slot].any())

    def may_end(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """bool: which of ``slots`` the next committed token, of ``tokens``, could end.

        For decode rows that have not committed. A sequence without an end among them has
        ``num_computed + 1`` ids, and one more with the token.
        """
        full = self.num_computed[slots] + 2 >= self.limit[slots]
        stopped = (self.stops[slots] == tokens[:, None]).any(axis=1)
        ends: np.ndarray = full | stopped
        return ends
