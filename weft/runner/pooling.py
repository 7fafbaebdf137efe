"""Embeddings: pooled hidden states of a prompt, gathered over the steps of the prompt.

    last    the state of the prompt's last position
    mean    the mean of the states of all positions; sums are float64 for every model dtype

States are taken after the final norm, as the head would read them. A sequence with a mean starts at position
0: a cached prefix has no hidden states to sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from weft.common.errors import EngineDead
from weft.runner.batch.staging import offsets_of
from weft.types.plan import AllocSlot, FreeSlot, SlotUpdate, StepPlan

Tensor = torch.Tensor

_NONE, _LAST, _MEAN = range(3)
_MODES = {"": _NONE, "last": _LAST, "mean": _MEAN}


@dataclass(frozen=True, slots=True)
class Pooled:
    """Embeddings completed by a step."""

    rows: np.ndarray
    """int64 [n], ascending: rows of the plan."""
    values: Tensor
    """float32 [n, hidden], on the device."""


class Pooler:
    """Sums of hidden states per slot. Owned by the runner and used from its thread only."""

    def __init__(self, num_slots: int, hidden: int, device: torch.device) -> None:
        self._shape = (num_slots, hidden)
        self._device = device
        self._mode = np.zeros(num_slots, np.int8)
        self._known = np.zeros(num_slots, np.int64)
        self._sums: Tensor | None = None
        """float64 [slots, hidden]; None until a sequence asks for a mean."""

    def apply(self, ops: Iterable[SlotUpdate]) -> None:
        """Record pooling modes at slot allocation, forget modes at release, and reset sums. Raises EngineDead
        for an embedding that cannot be computed."""
        for op in ops:
            if isinstance(op, FreeSlot):
                self._mode[op.slot] = _NONE
            elif isinstance(op, AllocSlot):
                self._alloc(op)

    def _alloc(self, op: AllocSlot) -> None:
        """Record mode and length of a new sequence; zero the sum of a mean. Raises EngineDead for an unknown
        mode, or for a mean with cached positions."""
        mode = _MODES.get(op.pooling)
        if mode is None or (mode == _MEAN and op.num_cached):
            raise EngineDead(f"slot {op.slot} is allocated for an embedding that cannot be made")
        self._mode[op.slot] = mode
        self._known[op.slot] = len(op.token_ids)
        if mode == _MEAN:
            if self._sums is None:
                self._sums = torch.zeros(self._shape, dtype=torch.float64, device=self._device)
            self._sums[op.slot].zero_()

    def clear(self) -> None:
        """Mark all slots as free."""
        self._mode.fill(_NONE)

    def wants(self, plan: StepPlan) -> bool:
        """Return True if ``take`` needs the hidden states of all tokens of ``plan``."""
        return bool(plan.prefill.rows and self._mode[plan.prefill.slot].any())

    def take(self, plan: StepPlan, hidden: Tensor) -> Pooled | None:
        """Add the hidden states of a step to the sums of means. Return the embeddings (float32) of prompts
        that are complete; None if no prompt is.

        hidden: [T, hidden] of the plan's tokens, prefill rows first.
        """
        prefill = plan.prefill
        offsets = offsets_of(prefill.count)
        rows: list[int] = []
        values: list[Tensor] = []
        for row in np.flatnonzero(self._mode[prefill.slot]).tolist():
            slot = int(prefill.slot[row])
            begin, end = int(offsets[row]), int(offsets[row + 1])
            mean = self._mode[slot] == _MEAN
            # [tokens of the row, hidden] -> [hidden]; a prompt may span several chunks
            if mean:
                assert self._sums is not None
                self._sums[slot].add_(hidden[begin:end].sum(0, dtype=torch.float64))
            if int(prefill.start[row]) + end - begin < self._known[slot]:
                continue
            rows.append(row)
            if mean:
                assert self._sums is not None
                values.append((self._sums[slot] / int(self._known[slot])).float())
            else:
                values.append(hidden[end - 1].float())
        return Pooled(np.array(rows, np.int64), torch.stack(values)) if rows else None
