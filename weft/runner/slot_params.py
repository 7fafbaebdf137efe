"""Sampling parameters of every slot, on the host, and what each slot's rows need of a sampler."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import torch

from weft.common.errors import EngineDead
from weft.ops import sampling as ops
from weft.ops.philox import signed_seed
from weft.runner.token_lists import Lists, lists_of
from weft.types.plan import AllocSlot
from weft.types.sampling import TokenParams

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
INTS = ("top_k", "min_tokens", "logprobs", "prompt_logprobs", "seed", "choice")

# What a row needs, as bits of its class; rows are worked on class by class.
GREEDY, LISTS, PENALTY, TOP_K, TOP_P, MIN_P, MASK = (1 << bit for bit in range(7))
DIRECT = (0, GREEDY, MIN_P)  # classes that need neither changed logits nor an order of the tokens
STAGE = 7
"""The bits from here on number the first of ``ops.WIDTHS`` that holds the row's top_k."""


class SlotParams:
    """Parameters of each slot from its ``alloc`` to its ``free``; between them what the columns hold is
    arbitrary.

    floats    float64 [slots, FLOATS]
    ints      int64 [slots, INTS]
    classes   int64 [slots]
    direct    bool [slots]: of a class in ``DIRECT``, without logprobs
    lists     of single tokens, where there are some
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
        """Gives the slot its sequence's parameters. Raises EngineDead when the slot is taken."""
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
        """Frees the slot. Raises EngineDead when it has no sequence."""
        if not self._taken[slot]:
            raise EngineDead(f"sampler: slot {slot} is freed and has no sequence")
        self._taken[slot] = False
        self.lists[slot] = None

    def clear(self) -> None:
        """Frees every slot."""
        self._taken.fill(False)
        self.lists = [None] * len(self.lists)

    def _class(self, params: TokenParams, top_k: int, lists: Lists | None) -> int:
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
