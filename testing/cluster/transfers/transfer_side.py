"""A simulated rank's memory open to other groups, and the product's ``RankTransfer`` on top."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from testing.cluster.check import Violation
from testing.cluster.transfers.transfer_rules import TransferRules
from testing.cluster.transfers.wires import Wires
from weft.common.errors import ErrorInfo
from weft.disagg.protocol.arrivals import PARKED_S, Incoming
from weft.disagg.protocol.transfer_events import RankReport, RankStopped
from weft.disagg.transport.transfer_thread import RankTransfer
from weft.sim.timeline import TimelineProcess
from weft.types.transfer import Admitted, Blocks, Bound, GroupDims, TransferKey


class TransferSide:
    """The memory of one rank's process for one cache. Subclasses define the content of the memory."""

    def __init__(
        self,
        wires: Wires,
        process: TimelineProcess,
        rank: int,
        dims: GroupDims,
        rules: TransferRules,
        memory: np.ndarray,
    ) -> None:
        """Create the side and open the transport.

        ``rank`` is the rank's number in its group. ``rules`` check writes and reads, and are notified of
        news. ``memory`` is the one region of ``dims``.
        """
        self._wires, self._process, self._rules = wires, process, rules
        self._said: list[RankReport | RankStopped] = []
        self._commands: deque[Callable[[], None]] = deque()
        """Commands not yet read by the transfer thread."""
        self._wrong: list[Violation] = []
        self._awake = False
        self._due: float | None = None
        transport = wires.open(process, rank, self._wake, self._check_write)
        transport.regions = [memory.reshape(-1).view(np.uint8)]
        self.endpoint = transport.endpoint
        clock = wires.timeline.clock.now
        self._transfer = RankTransfer(rank, dims, transport, self._tell, start=False, clock=clock)

    def take(self) -> list[RankReport | RankStopped]:
        """Return and clear the reports of the transfers."""
        said = self._said[:]
        self._said.clear()
        return said

    @property
    def descriptor(self) -> int:
        """Always -1: there is no descriptor on virtual time."""
        return -1

    def close(self) -> None:
        """Close the transport of an ended process."""
        self._wires.close(self.endpoint.address)

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._wires.timeline.after(0.0, 0.002, self._process, self._begin_turn)

    def _begin_turn(self) -> None:
        """Let the transfer thread read commands, then copy for a while. News waits meanwhile."""
        while self._commands:
            self._commands.popleft()()
        self._wires.timeline.after(0.0, self._wires.copying, self._process, self._turn)

    def _turn(self) -> None:
        """Run the transfer thread until nothing is left to send, and plan the next run.

        Raise the first Violation found meanwhile.
        """
        self._awake = False
        transfer = self._transfer
        transfer.turn(0.0)
        # One turn sends a bounded amount; continue until nothing is left to send.
        while transfer.pushes.behind() is not None:
            transfer.turn(0.0)
        # Raised here, because the transfer itself would swallow the exception.
        if self._wrong:
            raise self._wrong[0]
        if self._said:
            self._rules.transfer_news()
        if self._commands:
            self._wake()
        due = transfer.arrivals.next_due()
        if due is not None and due != self._due and due < self._wires.timeline.now + PARKED_S + 1.0:
            self._due = due
            self._wires.timeline.at(due, self._process, self._wake)

    def _put(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake()

    # ---- the transfer interface of a rank's loop: see ``runner.exports.TransferThread``

    @property
    def dims(self) -> GroupDims:
        return self._transfer.dims

    def begin(self, offer: Admitted, bound: Bound, blocks: tuple[Blocks, ...], num_cached: int = 0) -> None:
        self._put(partial(self._transfer.begin, offer, bound, blocks, num_cached))

    def grow(self, key: TransferKey, blocks: tuple[Blocks, ...]) -> None:
        self._put(partial(self._transfer.grow, key, blocks))

    def computed(self, key: TransferKey, layers: tuple[int, ...], begin: int, end: int) -> None:
        self._put(partial(self._transfer.computed, key, layers, begin, end))

    def fail(self, key: TransferKey, error: ErrorInfo) -> None:
        self._put(partial(self._transfer.fail, key, error))

    def expect(self, offer: Admitted, bound: Bound) -> None:
        self._put(partial(self._transfer.expect, offer, bound))

    def stop(self, key: TransferKey) -> None:
        self._put(partial(self._transfer.stop, key))

    def stop_all(self) -> None:
        while self._commands:
            self._commands.popleft()()
        self._transfer.stop_all()

    @property
    def failure(self) -> Exception | None:
        return self._transfer.failure

    # ---- checks. Transfers would treat an exception as a failed transfer, so violations are collected.

    def _blocks(self, begin: int, end: int) -> Iterable[int]:
        """Return the blocks that contain bytes ``begin`` .. end - 1 of the region."""
        raise NotImplementedError

    def _check_write(self, incoming: Incoming) -> None:
        """Note a Violation if an arriving write, or its read at the sender, touches memory without a pin."""
        blocks: set[int] = set()
        for _, spans in incoming.parts:
            for at, size in spans.tolist():
                blocks.update(self._blocks(at, at + size))
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
