"""Routes of slots: which rows of a step record their experts, and which rows have forced experts.

A step with such a row computes all rows in the last layer and is not replayed. See ``weft.ops.row_routes``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from weft.common.errors import EngineDead
from weft.ops.row_routes import RowRoutes
from weft.ops.upload import upload
from weft.runner.batch.staging import offsets_of, ragged
from weft.types.plan import AllocSlot, FreeSlot, PlannedRows, RouteRows, SlotUpdate, column
from weft.types.routes import Routes

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class StepRoutes:
    """Recorded routes of a step, for the rows of slots that ask."""

    rows: np.ndarray
    """int64 [n], ascending: rows of the plan."""
    offsets: np.ndarray
    """int64 [n + 1]: tokens of row i are ``offsets[i] .. offsets[i + 1]``."""
    ids: Tensor
    """int32 [tokens, layers, k], on the device."""

    def result(self) -> RouteRows:
        """Return the routes as numpy columns. ``ids`` must be on the host."""
        return RouteRows(
            rows=column(self.rows), offsets=column(self.offsets), ids=self.ids.numpy().astype("<u2")
        )


class ExpertRoutes:
    """Recording and forcing of routes by slot. Owned by the runner and used from its thread only."""

    def __init__(self, num_slots: int, layers: int, device: torch.device) -> None:
        """``layers``: routed layers of the model; 0 for a model without experts."""
        self._layers, self._device = layers, device
        self._asked = np.zeros(num_slots, bool)
        self._touched = np.zeros(num_slots, bool)
        """Slots that record or force."""
        self._any = False
        """True if there is such a slot."""
        self._forced: dict[int, Tensor] = {}
        """Slot -> int16 [tokens, layers, k], on the device. No model has 32768 experts. The scheduler bounds
        the bytes of all slots."""

    def apply(self, ops: Iterable[SlotUpdate]) -> None:
        """Take the routes of slots that are given and freed. Raises EngineDead for a model without experts,
        and for forced routes of another number of layers."""
        for op in ops:
            if isinstance(op, FreeSlot):
                self._free(op.slot)
            elif isinstance(op, AllocSlot) and (op.routes or op.forced is not None):
                layers = self._layers if op.forced is None else op.forced.layers
                if not layers or layers != self._layers:
                    raise EngineDead(f"slot {op.slot} is allocated with routes that the model does not have")
                self._asked[op.slot] = op.routes
                self._touched[op.slot] = self._any = True
                if op.forced is not None:
                    self._forced[op.slot] = self._upload(op.forced)

    def _upload(self, forced: Routes) -> Tensor:
        return upload(forced.array().astype(np.int16), self._device)

    def _free(self, slot: int) -> None:
        self._asked[slot] = False
        if self._touched[slot]:
            self._touched[slot] = False
            self._any = bool(self._touched.any())
        self._forced.pop(slot, None)

    def clear(self) -> None:
        """Mark all slots as free."""
        self._asked.fill(False)
        self._touched.fill(False)
        self._any = False
        self._forced.clear()

    def wants(self, plan: PlannedRows) -> bool:
        """Return True if a row of ``plan`` records or forces routes."""
        if not self._any:
            return False
        touched = self._touched
        return bool(touched[plan.prefill.slot].any() or touched[plan.decode.slot].any())

    def begin(self, plan: PlannedRows, positions: Tensor) -> RowRoutes | None:
        """Return the routes for the rows of ``plan``, a plan or micro-batch; None if no row has routes.

        positions: int64 [T] of the plan's tokens, on the device.
        """
        if not self.wants(plan):
            return None
        slots = np.concatenate([plan.prefill.slot, plan.decode.slot])
        offsets = offsets_of(np.concatenate([plan.prefill.count, plan.decode.count]))
        forced: Tensor | None = None
        for row, slot in enumerate(slots.tolist()):
            given = self._forced.get(slot)
            if given is None:
                continue
            if forced is None:
                forced = positions.new_full((len(positions), *given.shape[1:]), -1)
            part = slice(int(offsets[row]), int(offsets[row + 1]))
            # The device alone knows the positions of decode rows behind drafts.
            at = positions[part]
            inside = (at < len(given)).view(-1, 1, 1)
            forced[part] = torch.where(inside, given[at.clamp(max=len(given) - 1)].long(), -1)
        return RowRoutes(self._layers, forced)

    def take(self, plan: PlannedRows, made: Tensor) -> StepRoutes | None:
        """Return the routes of the rows that ask; None without such rows. made: int64 [T, layers, k], of the
        plan's tokens in order."""
        slots = np.concatenate([plan.prefill.slot, plan.decode.slot])
        counts = np.concatenate([plan.prefill.count, plan.decode.count]).astype(np.int64)
        rows = np.flatnonzero(self._asked[slots])
        if not len(rows):
            return None
        index = ragged(offsets_of(counts)[rows], counts[rows])
        chosen = made[upload(index, made.device)].int()
        return StepRoutes(rows, offsets_of(counts[rows]), chosen)
