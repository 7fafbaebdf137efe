"""A simulated rank's pool of embeddings as memory with content, and the product's ``RankTransfer``.

A row of an embedding is a function of the image's pixels, the row and the level. So the rows that a plan
reads can be compared with the sequence's images, whoever encoded or transferred the rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from testing.cluster.check import Violation, token_key
from testing.cluster.transfers.image_rules import ImageRules
from testing.cluster.transfers.transfer_side import TransferSide
from testing.cluster.transfers.wires import Wires
from weft.config.resolved import MediaLimits
from weft.sim.timeline import TimelineProcess
from weft.types.media_item import MediaItem
from weft.types.plan import AllocSlot, BindMedia, Encode, FreeSlot, MoveMedia, SendMedia, StepPlan
from weft.types.transfer import Blocks, CacheGroupDims, GroupDims, TensorDims

LEVELS = 2
"""Number of levels of an embedding, including the main level."""
_ITEM = 8
_SPOILED = -1
"""Value of memory without content."""


def embedding_dims_of(limits: MediaLimits, ranks: int) -> GroupDims:
    """Return the pool of embeddings of a simulated group in the form of transfers."""
    dims = (("layer", LEVELS), ("block", 1 + limits.blocks), ("position", limits.block_rows), ("width", 1))
    kind = CacheGroupDims(
        kind="embedding",
        layers=tuple(range(LEVELS)),
        block_size=limits.block_rows,
        window=0,
        ratio=1,
        kv_heads=0,
        tensors=(TensorDims(name="values", dims=dims, dtype="float64"),),
    )
    return GroupDims(ranks=ranks, kinds=(kind,))


def rows_of(pixels: bytes, count: int) -> np.ndarray:
    """Return the embedding of an image, int64 [levels, count]. Every byte of ``pixels`` is the image's
    number."""
    level, row = np.mgrid[0:LEVELS, 0:count]
    made: np.ndarray = (pixels[0] + 1) * 1_000_003 + 131 * level + row
    return made


class EmbeddingSide(TransferSide):
    """The pool of embeddings of one rank's process."""

    def __init__(
        self,
        wires: Wires,
        process: TimelineProcess,
        rank: int,
        limits: MediaLimits,
        dims: GroupDims,
        rules: ImageRules,
        shown: Callable[[int], tuple[MediaItem, ...]],
    ) -> None:
        """Create an empty pool. See ``TransferSide``. ``shown`` maps a sequence's key to its images, with
        pixels."""
        self._each, self._shown, self._own = limits.block_rows, shown, rules
        self._pool = np.full((LEVELS, 1 + limits.blocks, self._each), _SPOILED, np.int64)
        self._host = np.full((LEVELS, 1 + limits.host_blocks, self._each), _SPOILED, np.int64)
        self._slots: dict[int, int] = {}
        """Slot -> key of the sequence."""
        super().__init__(wires, process, rank, dims, rules, self._pool)

    def reset(self) -> None:
        """Empty all slots, because an epoch begins."""
        self._slots.clear()

    def run(self, plan: StepPlan) -> None:
        """Run a step. Raise Violation if a step reads a foreign embedding, or writes where a transfer may
        write."""
        for op in plan.ops:
            if isinstance(op, AllocSlot):
                prompt = op.token_ids[: op.num_prompt].tobytes()
                self._slots[op.slot] = token_key(prompt, op.seed, op.choice)
            elif isinstance(op, FreeSlot):
                self._slots.pop(op.slot, None)
            elif isinstance(op, Encode):
                self._write(plan.step, op.blocks, rows_of(op.pixels, op.count))
            elif isinstance(op, MoveMedia):
                self._move(plan.step, op)
            elif isinstance(op, SendMedia):
                self.grow(op.key, (Blocks(first=0, ids=op.blocks),))
                self.computed(op.key, tuple(range(LEVELS)), 0, op.count)
        # Reads come last, because one plan may encode an image and bind the same image.
        for op in plan.ops:
            if isinstance(op, BindMedia):
                self._read(plan.step, op)

    def _write(self, step: int, blocks: bytes, rows: np.ndarray) -> None:
        """Write the rows of an encoded image, [levels, rows], into its blocks.

        Raise Violation if a transfer may write these.
        """
        ids = np.frombuffer(blocks, np.int32)
        self._own.check_step(step, set(ids.tolist()))
        padded = np.full((LEVELS, len(ids) * self._each), _SPOILED, np.int64)
        padded[:, : rows.shape[1]] = rows
        self._pool[:, ids] = padded.reshape(LEVELS, len(ids), self._each)

    def _move(self, step: int, op: MoveMedia) -> None:
        """Copy blocks between device and host.

        Raise Violation if a transfer may write the device's blocks.
        """
        here, host = np.frombuffer(op.blocks, np.int32), np.frombuffer(op.host, np.int32)
        if op.up:
            self._own.check_step(step, set(here.tolist()))
            self._pool[:, here] = self._host[:, host]
        else:
            self._host[:, host] = self._pool[:, here]

    def _read(self, step: int, op: BindMedia) -> None:
        """Raise Violation unless the bound blocks hold the embedding of the sequence's image."""
        shown = self._shown(self._slots[op.slot])
        item = next((one for one in shown if one.start == op.start), None)
        if item is None or item.count != op.count:
            raise Violation(f"step {step} binds an image at {op.start} that its sequence does not have")
        read = self._pool[:, np.frombuffer(op.blocks, np.int32)].reshape(LEVELS, -1)[:, : op.count]
        if (read != rows_of(item.pixels, item.count)).any():
            raise Violation(f"step {step} reads an embedding at {op.start} that is not its image's")

    def _blocks(self, begin: int, end: int) -> set[int]:
        each, blocks = self._each * _ITEM, self._pool.shape[1]
        return {at % blocks for at in range(begin // each, (end - 1) // each + 1)}
