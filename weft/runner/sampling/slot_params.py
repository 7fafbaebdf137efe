"""Sampling parameters of every slot on the host, and the classes of work that the sampler needs per slot."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import torch

from weft.common.errors import EngineDead
from weft.ops import sampling as ops
from weft.ops.philox import signed_seed
from weft.runner.sampling.token_lists import Lists, lists_of
from weft.types.plan import AllocSlot
from weft.types.sampling import TokenParams

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
INTS = ("top_k", "min_tokens", "logprobs", "prompt_logprobs", "seed", "choice")

# Bits of a row's class: the sampling work of the row. Rows of one class are processed together.
GREEDY, LISTS, PENALTY, TOP_K, TOP_P, MIN_P, MASK = (1 << bit for bit in range(7))
DIRECT = (0, GREEDY, MIN_P)  # classes without changed logits and without sorting
STAGE = 7
"""Bits from here on hold the index of the first of ``ops.WIDTHS`` that is at least the row's top_k."""


class SlotParams:
    """Parameters of each slot from ``alloc`` to ``free``. Columns of free slots are arbitrary.

    floats    float64 [slots, FLOATS]
    ints      int64 [slots, INTS]
    classes   int64 [slots]
    direct    bool [slots]: True for a class in ``DIRECT`` without logprobs
    lists     token lists per slot; None for a slot without lists
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._device = device
        self._taken = np.zeros(num_slots, dtype=bool)
        self.floats = np.zeros((num_slots, len(FLOATS)), dtype=np.float64)
        self.ints = np.zeros((num_slots, len(INTS)), dtype=np.int64)
        self.classes = np.zeros(num_slots, dtype=np.int64)
        self.direct = np.zeros(num_slots, dtype=bool)
        self.lists: list[Lists | None] = [None] * num_slots

    def alloc(self, op: AllocSlot) -> None:
        """Store the parameters of a new sequence, its lists and its class. Raises EngineDead if the slot is
        in use."""
        if self._taken[op.slot]:
            raise EngineDead(f"sampler: slot {op.slot} is given to a sequence before the last one was freed")
        params = op.params
        top_k = params.top_k if 0 < params.top_k < self._vocab else self._vocab
        own = {"top_k": top_k, "seed": signed_seed(op.seed), "choice": op.choice}
        self._taken[op.slot] = True
        self.floats[op.slot] = [getattr(params, name) for name in FLOATS]
        self.ints[op.slot] = [own[name] if name in own else getattr(params, name) for name in INTS]
        lists = lists_of(params, self._vocab, self._device)
        self.lists[op.slot] = lists
        self.classes[op.slot] = kind = self._class(params, top_k, lists)
        self.direct[op.slot] = kind in DIRECT and params.logprobs < 0

    def free(self, slot: int) -> None:
        """Free the slot. Raises EngineDead if the slot is free already."""
        if not self._taken[slot]:
            raise EngineDead(f"sampler: slot {slot} is freed and has no sequence")
        self._taken[slot] = False
        self.lists[slot] = None

    def clear(self) -> None:
        """Free every slot."""
        self._taken.fill(False)
        self.lists = [None] * len(self.lists)

    def _class(self, params: TokenParams, top_k: int, lists: Lists | None) -> int:
        """Return the class of a row: bits for the steps of the sampling rule that the parameters need, and
        the width of top-k. ``GREEDY`` excludes all filters."""
        kind = 0 if lists is None else LISTS
        if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty:
            kind |= PENALTY
        if params.temperature < 1e-5:
            return kind | GREEDY
        if top_k < self._vocab:
            kind |= TOP_K | bisect_left(ops.WIDTHS, top_k) << STAGE
        kind |= TOP_P if params.top_p < 1 else 0
        kind |= MIN_P if params.min_p > 0 else 0
        return kind
