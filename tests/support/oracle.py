"""Draft from known answers, with a given probability of a correct draft."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from weft.speculation.base import Drafter, Sampled
from weft.types.plan import AllocSlot


class Oracle(Drafter):
    """Draft correctly with probability ``right``, independently of earlier drafts."""

    def __init__(self, answer: Callable[[AllocSlot], list[int]], right: float, vocab: int) -> None:
        """Create the drafter. ``answer`` returns the known tokens, prompt and output, of the sequence in a
        slot.
        """
        self._answer = answer
        self._right = right
        self._vocab = vocab
        self._random = random.Random(7)
        self._tokens: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        """Counts by number of drafts wanted for a row."""

    def propose(self, step: Sampled) -> torch.Tensor | None:
        for op in step.plan.ops:
            if isinstance(op, AllocSlot):
                self._tokens[op.slot] = self._answer(op)
        rows = step.wanted()
        if not len(rows):
            return None
        made = torch.zeros(len(rows), int(step.next_k.max()), dtype=torch.int64)
        for line, row in enumerate(rows.tolist()):
            slot, end = int(step.slots[row]), int(step.ends[row])
            wanted = int(step.next_k[row])
            self.lengths[wanted] = self.lengths.get(wanted, 0) + 1
            for place in range(wanted):
                made[line, place] = self._draft(self._tokens[slot], end + 1 + place)
        return made

    def _draft(self, tokens: list[int], position: int) -> int:
        if position < len(tokens) and self._random.random() < self._right:
            return tokens[position]
        return self._random.randrange(self._vocab)
