"""A simulated rank of a group with a role: its cache as memory with content, and the real ``RankTransfer``.

The entry of a position is a function of all ids up to it, as a model's is. So whoever computed or transferred
it, what a row reads can be compared with what it must be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from weft.common.errors import ErrorInfo
from weft.config.resolved import KVConfig
from weft.runner.exports import Exports
from weft.sim.check import Violation, token, token_key
from weft.sim.room_rules import RoomRules
from weft.sim.timeline import Process
from weft.sim.wires import Wires
from weft.transfer.arrivals import PARKED_S, Incoming
from weft.transfer.group_layout import group_dims
from weft.transfer.words import RankReport, RankStopped
from weft.transports.worker import RankTransfer
from weft.types.plan import AllocSlot, AppendBlocks, AppendEach, FreeSlot, StepPlan
from weft.types.rooms import Admitted, Blocks, Bound, GroupDims, RoomKey

DTYPE = "float64"
_MASK = (1 << 61) - 1


@dataclass(slots=True)
class _Slot:
    """What is in a slot."""

    key: int
    ids: list[int]
    chain: list[int]
    """Entries of positions, as far as they were asked for."""
    table: list[int]

    def entries(self, begin: int, end: int) -> np.ndarray:
        """What the cache must have of positions ``begin`` .. end - 1."""
        while len(self.chain) < end:
            position = len(self.chain)
            while len(self.ids) <= position:
                self.ids.append(token(self.key, len(self.ids)))
            before = self.chain[-1] if position else 7
            self.chain.append((before * 1_000_003 + self.ids[position] + 1) & _MASK)
        return np.array(self.chain[begin:end], np.int64)


def dims_of(kv: KVConfig, ranks: int) -> GroupDims:
    """The caches of a simulated group as rooms describe them."""
    return group_dims(kv, kv, ranks, DTYPE, snapshots=True)


class RankSide:
    """Of one process. It has one full kind of one layer, with keys and values of 8 bytes each."""

    def __init__(
        self,
        wires: Wires,
        process: Process,
        rank: int,
        kv: KVConfig,
        dims: GroupDims,
        rules: RoomRules,
    ) -> None:
        """``rank``: in its group. ``rules``: what must hold here; they are told when there is something to
        ``take``, too."""
        self._wires, self._process, self._rules = wires, process, rules
        self._block = kv.block_size
        (layout,) = kv.pools[0].tensors(DTYPE)
        self._entries = np.zeros(layout.shape, np.int64).reshape(layout.shape[1], 2, self._block)
        self._slots: dict[int, _Slot] = {}
        self._said: list[RankReport | RankStopped] = []
        self._commands: deque[Callable[[], None]] = deque()
        """That the thread of the transfers has not taken in."""
        self._wrong: list[Violation] = []
        self._awake = False
        self._due: float | None = None
        transport = wires.open(process, rank, self._wake, self._check_write)
        transport.regions = [self._entries.reshape(-1).view(np.uint8)]
        self.endpoint = transport.endpoint
        clock = wires.timeline.clock.now
        self._transfer = RankTransfer(rank, dims, transport, self._tell, start=False, clock=clock)
        self._exports = Exports(kv, len(kv.pools[0].cache.layers), DTYPE, self)

    # ---- steps

    def reset(self) -> None:
        """An epoch begins: all slots are empty."""
        self._slots.clear()

    def run(self, plan: StepPlan) -> None:
        """Carries a step out. Raises Violation where a row reads what is not its own."""
        for op in plan.ops:
            if isinstance(op, AllocSlot):
                ids = op.token_ids.tolist()
                key = token_key(op.token_ids[: op.num_prompt].tobytes(), op.seed, op.choice)
                self._slots[op.slot] = _Slot(key, ids, [], [])
            elif isinstance(op, FreeSlot):
                self._slots.pop(op.slot, None)
            elif isinstance(op, AppendBlocks):
                self._slots[op.slot].table.extend(op.blocks.tolist())
            elif isinstance(op, AppendEach):
                for slot, block in zip(op.slots.tolist(), op.blocks.tolist(), strict=True):
                    self._slots[slot].table.append(block)
        done = self._exports.begin(plan.ops)
        for rows in (plan.prefill, plan.decode):
            columns = (rows.slot.tolist(), rows.start.tolist(), rows.count.tolist())
            for slot, start, count in zip(*columns, strict=True):
                self._row(plan.step, self._slots[slot], start, start + count)
        if done is not None:
            done(0)

    def _row(self, step: int, slot: _Slot, start: int, end: int) -> None:
        due = slot.entries(0, end)
        table = np.array(slot.table, np.int64)
        positions = np.arange(end)
        blocks, offsets = table[positions // self._block], positions % self._block
        read = self._entries[blocks[:start], :, offsets[:start]]
        wrong = (read[:, 0] != due[:start]) | (read[:, 1] != ~due[:start])
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            where = f"position {first} (block {blocks[first]})"
            raise Violation(f"step {step} reads what is not its sequence's own at {where} of {start}")
        self._entries[blocks[start:], 0, offsets[start:]] = due[start:]
        self._entries[blocks[start:], 1, offsets[start:]] = ~due[start:]

    # ---- rooms

    def take(self) -> list[RankReport | RankStopped]:
        """What the transfers have told."""
        said = self._said[:]
        self._said.clear()
        return said

    @property
    def descriptor(self) -> int:
        """There is none on virtual time."""
        return -1

    def close(self) -> None:
        """The process has ended."""
        self._wires.close(self.endpoint.address)

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._wires.timeline.after(0.0, 0.002, self._process, self._begin_turn)

    def _begin_turn(self) -> None:
        """The thread of the transfers takes commands in, then copies for a while; what it is told meanwhile
        waits."""
        while self._commands:
            self._commands.popleft()()
        self._wires.timeline.after(0.0, self._wires.copying, self._process, self._turn)

    def _turn(self) -> None:
        self._awake = False
        transfer = self._transfer
        transfer.turn(0.0)
        while transfer.pushes.behind() is not None:
            transfer.turn(0.0)
        if self._wrong:
            raise self._wrong[0]
        if self._said:
            self._rules.room_news()
        if self._commands:
            self._wake()
        due = transfer.arrivals.next_due()
        if due is not None and due != self._due and due < self._wires.timeline.now + PARKED_S + 1.0:
            self._due = due
            self._wires.timeline.at(due, self._process, self._wake)

    def _put(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake()

    # ---- what the loop of the rank asks of its transfers: see ``runner.exports.Transfer``

    @property
    def dims(self) -> GroupDims:
        return self._transfer.dims

    def begin(self, offer: Admitted, bound: Bound, blocks: tuple[Blocks, ...], num_cached: int = 0) -> None:
        self._put(partial(self._transfer.begin, offer, bound, blocks, num_cached))

    def grow(self, key: RoomKey, blocks: tuple[Blocks, ...]) -> None:
        self._put(partial(self._transfer.grow, key, blocks))

    def computed(self, key: RoomKey, layers: tuple[int, ...], begin: int, end: int) -> None:
        self._put(partial(self._transfer.computed, key, layers, begin, end))

    def fail(self, key: RoomKey, error: ErrorInfo) -> None:
        self._put(partial(self._transfer.fail, key, error))

    def expect(self, offer: Admitted, bound: Bound) -> None:
        self._put(partial(self._transfer.expect, offer, bound))

    def stop(self, key: RoomKey) -> None:
        self._put(partial(self._transfer.stop, key))

    def stop_all(self) -> None:
        while self._commands:
            self._commands.popleft()()
        self._transfer.stop_all()

    @property
    def failure(self) -> Exception | None:
        return self._transfer.failure

    # ---- what must hold. Transfers take what is raised in them for a failure of the room.

    def _check_write(self, incoming: Incoming) -> None:
        row = 2 * self._block * self._entries.itemsize
        blocks: set[int] = set()
        for _, spans in incoming.parts:
            for at, size in spans.tolist():
                blocks.update(range(at // row, (at + size - 1) // row + 1))
        self._require(partial(self._rules.check_write, incoming.key, blocks))
        if self._wires.kind == "shm":
            self._require(partial(self._rules.check_read, incoming.key))

    def _require(self, check: Callable[[], None]) -> None:
        try:
            check()
        except Violation as violation:
            self._wrong.append(violation)

    def _tell(self, word: RankReport | RankStopped) -> None:
        error = word.error if isinstance(word, RankReport) else None
        if error is not None and error.code == "transfer_corrupt":
            self._require(partial(self._rules.check_corrupt, word.key))
        self._said.append(word)
