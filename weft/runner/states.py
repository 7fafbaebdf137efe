"""Recurrent states between slots and snapshots: carries out the plan's ``SaveState`` and ``LoadState``.

    slots        [layers, slots + 1, copies, *shape]    for each part of each state kind; layers use them
    snapshots    [layers, 1 + blocks, *shape]           only what is here does

Copies are batched over layers, and on a GPU over rows: a handful of launches, however many rows there are.
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
"""What a batch of copies may take besides its ends: states pass through a buffer, as their places are known
on the device only."""


class _Kind:
    """One state kind: for each part its slots and its snapshots, both ``[layers, rows, elements]``."""

    def __init__(self, slots: Sequence[Tensor], snapshots: Sequence[Tensor]) -> None:
        self.copies = slots[0].shape[2]
        self.num_slots = slots[0].shape[1] - 1
        self.num_blocks = snapshots[0].shape[1] - 1
        self.batched = slots[0].device.type != "cpu"
        """Whether rows go together, through a buffer, or one by one: on a CPU that is ten times as fast."""
        self.slots = [part.view(part.shape[0], part.shape[1] * part.shape[2], -1) for part in slots]
        self.snapshots = [part.flatten(2) for part in snapshots]

    def copy(self, ends: Sequence[tuple[Tensor, Tensor]], to: Tensor, rows: Tensor) -> None:
        """For each (source, destination) of ``ends``: row ``to[i]`` becomes row ``rows[i]``, int64 [n]."""
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
    """The snapshots of every state kind, and the way from and to the slots.

    Owner: the runner, which applies a plan's ops on the stream of its compute, before it.
    """

    def __init__(
        self,
        kv: KVConfig,
        memory: Sequence[Sequence[Tensor]],
        live: Tensor,
        dtype: torch.dtype,
        blocks: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        """``memory``: for each cache kind its tensors over all its layers, as ``kv_tensors.stacked`` made
        them, in a model of ``dtype``. ``live``: int64 [slots + 1], the copy of each slot that holds.
        ``blocks``: for each cache kind the memory of its blocks, where there is some."""
        self._live = live
        self._kinds = {
            number: _Kind(
                memory[number], blocks[number] if blocks is not None else snapshots(pool, dtype, live.device)
            )
            for number, pool in enumerate(kv.pools)
            if pool.cache.kind == "state"
        }

    def snapshots(self, kind: int) -> Sequence[Tensor]:
        """The snapshots of ``kind``: for each part ``[layers, 1 + blocks, elements]``. Tests look at them."""
        return self._kinds[kind].snapshots

    def apply(self, ops: Iterable[Op]) -> None:
        """Carries out what there is to do here among the ops of a plan, in their order.

        Nothing else in a plan's ops changes a state, so the others may be applied before. Raises EngineDead
        for an op that cannot be right.
        """
        if not self._kinds:
            return
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
        """``run``: of one type and kind."""
        kind = self._kinds.get(run[0].kind)
        if kind is None:
            raise EngineDead(f"step copies a state of cache kind {run[0].kind}, which has none")
        columns = np.array([(op.slot, op.block, getattr(op, "back", 0)) for op in run], np.int64).T.copy()
        slots, blocks, back = columns
        if slots.min() < 0 or slots.max() >= kind.num_slots:
            raise EngineDead("step copies a state of a slot outside the table")
        if blocks.min() < 1 or blocks.max() > kind.num_blocks or back.min() < 0 or back.max() >= kind.copies:
            raise EngineDead("step copies a state from or to where there is none")
        save = isinstance(run[0], SaveState)
        if len(np.unique(blocks if save else slots)) != len(run):
            raise EngineDead("step copies two states to one place")
        slot, block, behind = upload(columns, self._live.device)
        if save:
            rows = slot * kind.copies + self._live[slot] - behind
            kind.copy(list(zip(kind.slots, kind.snapshots, strict=True)), block, rows)
        else:
            self._live.index_fill_(0, slot, 0)  # a number by index would be copied, and waited for
            kind.copy(list(zip(kind.snapshots, kind.slots, strict=True)), slot * kind.copies, block)


def _together(one: SaveState | LoadState, other: SaveState | LoadState) -> bool:
    return type(one) is type(other) and one.kind == other.kind
