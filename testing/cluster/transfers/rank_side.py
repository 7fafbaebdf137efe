"""A simulated rank's KV cache as memory with content, and the product's ``RankTransfer``.

The entry of a position is a function of all ids and images up to the position, as in a model. So the entries
that a row reads can be compared with the expected entries, whoever computed or transferred them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from testing.cluster.check import Violation, token, token_key
from testing.cluster.transfers.transfer_rules import TransferRules
from testing.cluster.transfers.transfer_side import TransferSide
from testing.cluster.transfers.wires import Wires
from weft.config.resolved import KVConfig
from weft.disagg.protocol.group_layout import group_dims
from weft.runner.exports import Exports
from weft.sim.timeline import TimelineProcess
from weft.types.plan import AllocSlot, AppendBlocks, AppendEach, FreeSlot, StepPlan
from weft.types.transfer import GroupDims

DTYPE = "float64"
_MASK = (1 << 61) - 1


@dataclass(slots=True)
class _Slot:
    """The content of a slot."""

    key: int
    ids: list[int]
    chain: list[int]
    """Entries of positions, computed on demand."""
    table: list[int]
    seen: Mapping[int, int] = field(default_factory=dict)
    """Image placeholder position -> content shown there."""

    def entries(self, begin: int, end: int) -> np.ndarray:
        """Return the expected entries of positions ``begin`` .. end - 1, int64 [end - begin].

        Extends ``ids`` and ``chain`` as needed.
        """
        while len(self.chain) < end:
            position = len(self.chain)
            while len(self.ids) <= position:
                self.ids.append(token(self.key, len(self.ids)))
            before = self.chain[-1] if position else 7
            known = self.ids[position] + 1 + self.seen.get(position, 0)
            self.chain.append((before * 1_000_003 + known) & _MASK)
        return np.array(self.chain[begin:end], np.int64)


def dims_of(kv: KVConfig, ranks: int) -> GroupDims:
    """Return the caches of a simulated group in the form of transfers."""
    return group_dims(kv, kv, ranks, DTYPE, snapshots=True)


class RankSide(TransferSide):
    """The KV cache of one rank's process: one full-attention group of one layer.

    Keys and values have 8 bytes each: a key is the entry, a value the bitwise complement.
    """

    def __init__(
        self,
        wires: Wires,
        process: TimelineProcess,
        rank: int,
        kv: KVConfig,
        dims: GroupDims,
        rules: TransferRules,
        seen: Callable[[int], Mapping[int, int]],
    ) -> None:
        """Create an empty cache. See ``TransferSide``.

        ``seen`` maps a sequence's key to its placeholder positions and the content shown there.
        """
        self._block = kv.block_size
        self._seen = seen
        (layout,) = kv.pools[0].tensors(DTYPE)
        self._entries = np.zeros(layout.shape, np.int64).reshape(layout.shape[1], 2, self._block)
        self._slots: dict[int, _Slot] = {}
        super().__init__(wires, process, rank, dims, rules, self._entries)
        self._exports = Exports(kv, len(kv.pools[0].cache.layers), DTYPE, self)

    # ---- steps

    def reset(self) -> None:
        """Empty all slots, because an epoch begins."""
        self._slots.clear()

    def run(self, plan: StepPlan) -> None:
        """Run a step. Raise Violation if a row reads entries of another sequence."""
        for op in plan.ops:
            if isinstance(op, AllocSlot):
                ids = op.token_ids.tolist()
                key = token_key(op.token_ids[: op.num_prompt].tobytes(), op.seed, op.choice)
                self._slots[op.slot] = _Slot(key, ids, [], [], self._seen(key))
            elif isinstance(op, FreeSlot):
                self._slots.pop(op.slot, None)
            elif isinstance(op, AppendBlocks):
                self._slots[op.slot].table.extend(op.blocks.tolist())
            elif isinstance(op, AppendEach):
                for slot, block in zip(op.slots.tolist(), op.blocks.tolist(), strict=True):
                    self._slots[slot].table.append(block)
        # Exports begin before the rows and end after the rows, as on a device.
        done = self._exports.begin(plan.ops)
        for rows in (plan.prefill, plan.decode):
            columns = (rows.slot.tolist(), rows.start.tolist(), rows.count.tolist())
            for slot, start, count in zip(*columns, strict=True):
                self._row(plan.step, self._slots[slot], start, start + count)
        if done is not None:
            done(0)

    def _row(self, step: int, slot: _Slot, start: int, end: int) -> None:
        """Write the entries of positions ``start`` .. end - 1.

        Raise Violation if an earlier position holds other entries.
        """
        due = slot.entries(0, end)
        table = np.array(slot.table, np.int64)
        positions = np.arange(end)
        blocks, offsets = table[positions // self._block], positions % self._block
        # All earlier positions must hold the sequence's entries. Then write the new positions.
        read = self._entries[blocks[:start], :, offsets[:start]]
        wrong = (read[:, 0] != due[:start]) | (read[:, 1] != ~due[:start])
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            where = f"position {first} (block {blocks[first]})"
            raise Violation(f"step {step} reads what is not its sequence's own at {where} of {start}")
        self._entries[blocks[start:], 0, offsets[start:]] = due[start:]
        self._entries[blocks[start:], 1, offsets[start:]] = ~due[start:]

    def _blocks(self, begin: int, end: int) -> range:
        row = 2 * self._block * self._entries.itemsize
        return range(begin // row, (end - 1) // row + 1)
