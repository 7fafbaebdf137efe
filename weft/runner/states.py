"""Recurrent states between slots and snapshots: executes ``SaveState`` and ``LoadState`` of a plan.

    slots        [layers, slots + 1, copies, *shape]    per part of each state group; layers use the slots
    snapshots    [layers, 1 + blocks, *shape]           used by this module only

Copies are batched over layers, and on a GPU also over rows: a few launches for any number of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from weft.common.errors import EngineDead
from weft.config.resolved import KVConfig
from weft.ops.upload import upload
from weft.runner.kv_tensors import snapshots
from weft.types.plan import LoadState, Op, SaveState

Tensor = torch.Tensor

PASSING_BYTES = 64 << 20
"""Maximum bytes of the buffer between source and destination in one batch of copies. The buffer is needed
because row indices are known on the device only."""


class _Kind:
    """One state group: slots and snapshots of each part, both ``[layers, rows, elements]``."""

    def __init__(self, slots: Sequence[Tensor], snapshots: Sequence[Tensor]) -> None:
        """``slots``: [layers, slots + 1, copies, ...] of each state tensor. ``snapshots``: [layers, blocks +
        1, ...]. Both are kept as flat views."""
        self.copies = slots[0].shape[2]
        self.num_slots = slots[0].shape[1] - 1
        self.num_blocks = snapshots[0].shape[1] - 1
        self.batched = slots[0].device.type != "cpu"
        """True to copy all rows at once through a buffer (GPU); False to copy row by row, ten times as fast
        on a CPU."""
        self.slots = [part.view(part.shape[0], part.shape[1] * part.shape[2], -1) for part in slots]
        self.snapshots = [part.flatten(2) for part in snapshots]

    def copy(self, ends: Sequence[tuple[Tensor, Tensor]], to: Tensor, rows: Tensor) -> None:
        """Copy row ``rows[i]`` to row ``to[i]`` for each (source, destination) of ``ends``. to, rows: int64
        [n]."""
        if not self.batched:
            for begin, end in zip(rows.tolist(), to.tolist(), strict=True):
                for source, destination in ends:
                    destination[:, end].copy_(source[:, begin])
            return
        for source, destination in ends:
            row = source.shape[0] * source.shape[2] * source.itemsize
            most = max(1, PASSING_BYTES // max(row, 1))
            for begin in range(0, len(to), most):
                part = slice(begin, begin + most)
                destination.index_copy_(1, to[part], source.index_select(1, rows[part]))


class States:
    """Snapshots of every state group, and copies between snapshots and slots.

    Owner: the runner. The runner applies a plan's updates before the computation, on the stream of the
    compute.
    """

    def __init__(
        self,
        kv: KVConfig,
        memory: Sequence[Sequence[Tensor]],
        live: Tensor,
        dtype: torch.dtype,
        blocks: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        """``memory``: tensors of each KV cache group over all layers, from ``kv_tensors.stacked``. ``live``:
        int64 [slots + 1], the valid state copy of each slot. ``dtype``: dtype of the model. ``blocks``:
        snapshot memory per group, if allocated elsewhere."""
        self._live = live
        self._kinds = {
            number: _Kind(
                memory[number], blocks[number] if blocks is not None else snapshots(pool, dtype, live.device)
            )
            for number, pool in enumerate(kv.pools)
            if pool.cache.kind == "state"
        }

    def snapshots(self, kind: int) -> Sequence[Tensor]:
        """Return the snapshots of a state group, per part ``[layers, 1 + blocks, elements]``. For tests."""
        return self._kinds[kind].snapshots

    def apply(self, ops: Iterable[Op]) -> None:
        """Execute the ``SaveState`` and ``LoadState`` updates of a plan, in order.

        No other update changes a state, so the other updates may run earlier. Raises EngineDead for an
        invalid update.
        """
        if not self._kinds:
            return
        # Consecutive updates of one type and group become one batch.
        run: list[SaveState | LoadState] = []
        for op in ops:
            if isinstance(op, SaveState | LoadState):
                if run and not _together(run[-1], op):
                    self._carry_out(run)
                    run = []
                run.append(op)
        if run:
            self._carry_out(run)

    def _carry_out(self, run: list[SaveState | LoadState]) -> None:
        """Copy states for ``run``, updates of one type and one state group; a load also makes copy 0 live.
        Raises EngineDead for an invalid slot, block or copy, or for two copies to one place."""
        kind = self._kinds.get(run[0].kind)
        if kind is None:
            raise EngineDead(f"step copies a state of KV cache group {run[0].kind}, which has none")
        columns = np.array([(op.slot, op.block, getattr(op, "back", 0)) for op in run], np.int64).T.copy()
        slots, blocks, back = columns
        if slots.min() < 0 or slots.max() >= kind.num_slots:
            raise EngineDead("step copies a state of a slot outside the table")
        if blocks.min() < 1 or blocks.max() > kind.num_blocks or back.min() < 0 or back.max() >= kind.copies:
            raise EngineDead("step copies a state from or to where there is none")
        save = isinstance(run[0], SaveState)
        # Two copies to one place in one batch would have no defined order.
        if len(np.unique(blocks if save else slots)) != len(run):
            raise EngineDead("step copies two states to one place")
        slot, block, behind = upload(columns, self._live.device)
        if save:
            # [n]: flat rows (slot, copy). ``back`` counts from the live copy towards older positions.
            rows = slot * kind.copies + self._live[slot] - behind
            kind.copy(list(zip(kind.slots, kind.snapshots, strict=True)), block, rows)
        else:
            self._live.index_fill_(0, slot, 0)  # assignment by index would copy the number and wait
            kind.copy(list(zip(kind.snapshots, kind.slots, strict=True)), slot * kind.copies, block)


def _together(one: SaveState | LoadState, other: SaveState | LoadState) -> bool:
    return type(one) is type(other) and one.kind == other.kind
