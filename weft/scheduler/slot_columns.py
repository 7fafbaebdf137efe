"""Per-slot facts about running sequences, as columns with one entry per slot.

Most rows of a step only add one token. Planning and committing such rows is arithmetic on the columns. A
sequence is handled as an object only if the sequence needs blocks, ends or requests more output.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from weft.scheduler.sequence import Running, Sequence
from weft.types.plan import Segment

NO_ORIGIN = 1 << 30
"""Larger than any length."""
MAX_STOPS = 4
"""Number of stop ids in a column; a sequence with more stop ids is never quiet."""


class SlotColumns:
    """Arrays [slots]. In a free slot ``gen`` is 0 and the other entries are stale.

    gen             int32: generation of the slot (number of its sequence), from 1
    sequence        uint64: id of the sequence
    limit           int32: tokens at which the sequence ends, or leaves for another group
    origin          int32: tokens before the output, for a sequence with a transfer; else NO_ORIGIN
    known           int32: ids that AllocSlot wrote
    num_cached      int32: prompt tokens found in the cache at the first admission
    num_computed    int32: positions computed by committed steps
    num_scheduled   int32: positions computed once all planned steps are done
    reserved        int64: positions that the block tables cover
    last_step       int64: the last plan that names the slot, or -1; the slot is free after its commit
    drafts          int32: drafts that the last plan of the slot leaves for the next plan
    wanted          int32: drafts to propose, if there is room
    acceptance      float64: acceptance of first drafts of the slot, minus the average of all sequences
    exact           int32: number of last scheduled positions with a state on the device
    snapshot        int32: position of the newest snapshot; the cache hit, at first
    constrained     bool: a grammar limits the tokens
    adapted         bool: the adapter of the sequence changes experts
    quiet           bool: a row with one token that ends nothing needs no further fields in the event
    stops           int32 [slots, MAX_STOPS]: ids that may end the sequence; padded with -1
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
        self.adapted = np.zeros(num_slots, bool)
        self.quiet = np.zeros(num_slots, bool)
        self.stops = np.full((num_slots, MAX_STOPS), -1, np.int32)

    def enter(self, sequence: Sequence, run: Running, num_computed: int, reserved: int) -> None:
        """Set the columns of a slot for a new sequence with ``num_computed`` positions in the cache.

        ``wanted`` and ``acceptance`` are set by the draft policy.
        """
        slot = run.slot
        self.gen[slot] = run.gen
        self.sequence[slot] = sequence.id
        self.limit[slot] = sequence.limit
        self.origin[slot] = NO_ORIGIN if sequence.transfer is None else sequence.num_prompt
        self.known[slot] = run.known
        self.num_cached[slot] = sequence.num_cached
        self.num_computed[slot] = self.num_scheduled[slot] = self.snapshot[slot] = num_computed
        self.reserved[slot] = reserved
        self.constrained[slot] = sequence.constraint is not None
        self.adapted[slot] = sequence.adapts_experts
        quiet = sequence.params.logprobs < 0 and sequence.routed < 0
        self.set_stops(slot, sequence.stop_ids, quiet=quiet)
        self.last_step[slot] = -1
        self.drafts[slot] = 0
        self.exact[slot] = 0

    def set_stops(self, slot: int, stop_ids: Iterable[int], quiet: bool) -> None:
        """Set the stop ids of ``slot``. ``quiet``: the row needs nothing but the token from the result."""
        stops = list(stop_ids)
        self.quiet[slot] = quiet and len(stops) <= MAX_STOPS
        self.stops[slot] = (stops + [-1] * MAX_STOPS)[:MAX_STOPS]

    def prefilling(self, slots: np.ndarray) -> np.ndarray:
        """Return bool [len(slots)]: True for slots with known ids after the last planned position."""
        prefilling: np.ndarray = self.num_scheduled[slots] < self.known[slots]
        return prefilling

    def constrains(self, prefill: Segment, decode: Segment) -> bool:
        """Return True if a grammar limits the tokens of any sampling row in the two segments."""
        if not self.constrained.any():
            return False
        sampling = prefill.slot[prefill.sample > 0]
        return bool(self.constrained[sampling].any() or self.constrained[decode.slot].any())

    def may_end(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return bool [len(slots)]: True if the next committed token, in ``tokens``, could end the sequence.

        For decode rows before the commit. A slot then has ``num_computed + 1`` ids, and one more with the
        token.
        """
        full = self.num_computed[slots] + 2 >= self.limit[slots]
        stopped = (self.stops[slots] == tokens[:, None]).any(axis=1)
        ends: np.ndarray = full | stopped
        return ends
