"""Embeddings: pooled hidden states of a prompt, gathered over the steps of the prompt.

    last      the state of the prompt's last position
    mean      the mean of the states of all positions; sums are float64 for every model dtype
    cls       the state of the prompt's first position
    classify  the numbers that the model makes of the last state (``Model.classify``)

States are taken after the final norm, as the head would read them. A sequence with a mean, or with the first
state, starts at position 0: a cached prefix has no hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from weft.common.errors import EngineDead
from weft.models.decoder import Model
from weft.parallel.comm import drive
from weft.runner.batch.staging import offsets_of
from weft.types.plan import AllocSlot, FreeSlot, SlotUpdate, StepPlan

Tensor = torch.Tensor

_NONE, _LAST, _MEAN, _FIRST, _CLASSES = range(5)
_MODES = {"": _NONE, "last": _LAST, "mean": _MEAN, "cls": _FIRST, "classify": _CLASSES}
_SUMMED = (_MEAN, _FIRST)


@dataclass(frozen=True, slots=True)
class Pooled:
    """Embeddings completed by a step."""

    rows: np.ndarray
    """int64 [n], ascending: rows of the plan."""
    values: Tensor
    """float32 [n, most lengths], on the device; zeros behind the length of a row."""
    lengths: np.ndarray
    """int64 [n]: numbers of each row."""


def classifier(model: Model) -> Callable[[Tensor], Tensor] | None:
    """Return the function from last hidden states [n, hidden] to numbers [n, labels]; None for a model
    without classes."""
    return None if model.spec.classify is None else lambda hidden: drive(model.classify(hidden))


class Pooler:
    """Sums of hidden states per slot. Owned by the runner and used from its thread only."""

    def __init__(
        self,
        num_slots: int,
        hidden: int,
        device: torch.device,
        classify: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """``classify``: returns the numbers of last states [n, hidden]; None if the model has none."""
        self._classify = classify
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
        """Record mode and length of a new sequence; zero its sum. Raises EngineDead for an unknown mode, for
        a mean or first state with cached positions, and for classes of a model without classes."""
        mode = _MODES.get(op.pooling)
        if (
            mode is None
            or (mode in _SUMMED and op.num_cached)
            or (mode == _CLASSES and self._classify is None)
        ):
            raise EngineDead(f"slot {op.slot} is allocated for an embedding that cannot be made")
        self._mode[op.slot] = mode
        self._known[op.slot] = len(op.token_ids)
        if mode in _SUMMED:
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
            mode = self._mode[slot]
            # [tokens of the row, hidden] -> [hidden]; a prompt may span several chunks
            if mode in _SUMMED:
                assert self._sums is not None
                taken = (
                    hidden[begin:end] if mode == _MEAN else hidden[begin : begin + (prefill.start[row] == 0)]
                )
                self._sums[slot].add_(taken.sum(0, dtype=torch.float64))
            if int(prefill.start[row]) + end - begin < self._known[slot]:
                continue
            rows.append(row)
            if mode in _SUMMED:
                assert self._sums is not None
                values.append((self._sums[slot] / (int(self._known[slot]) if mode == _MEAN else 1)).float())
            else:
                values.append(hidden[end - 1])
        return self._made(np.array(rows, np.int64), values, prefill.slot) if rows else None

    def _made(self, rows: np.ndarray, values: list[Tensor], slots: np.ndarray) -> Pooled:
        """Return the embeddings of ``rows``. ``values``: hidden state of each row; ``slots``: of all rows."""
        classes = np.flatnonzero(self._mode[slots[rows]] == _CLASSES).tolist()
        if classes:
            assert self._classify is not None
            # One call for all rows: with several ranks the call runs collectives.
            numbers = self._classify(torch.stack([values[at] for at in classes]))
            for at, own in zip(classes, numbers, strict=True):
                values[at] = own
        lengths = np.array([len(value) for value in values])
        made = values[0].new_zeros(len(values), int(lengths.max()), dtype=torch.float32)
        for at, value in enumerate(values):
            made[at, : len(value)] = value
        return Pooled(rows, made, lengths)
