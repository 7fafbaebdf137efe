"""A KV disk on virtual time: the store of one engine, which only takes time.

The book and the loads are the product's code. The disk carries out one command after the other, loads before
stores, as the thread of a rank does:

    seconds of a command = latency + bytes / bandwidth

The disk keeps the blocks that were used last, up to its size. The product removes whole files instead.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from weft.common.clock import VirtualClock
from weft.engine.loop import EngineLoop
from weft.kv.tiers import Changed, Copied
from weft.scheduler.loads import Loads
from weft.sim.device import FakeStep
from weft.types.messages import TokenEvent
from weft.types.tiers import BlockOutcome, CopyBlocks, Entry, StoreMode


class StoreCosts(NamedTuple):
    """The disk of a simulated engine."""

    nbytes: int
    """Bytes of blocks that fit on the disk."""
    bandwidth: float
    """Bytes per second, for loads and stores together."""
    latency: float = 1e-3
    """Seconds of a command beside the bytes."""
    mode: StoreMode = "reused"
    """Which blocks are stored."""


class SimulatedStore:
    """The disk tier of one engine, an ``AwaitedSource``."""

    sockets: Sequence[Any] = ()

    def __init__(self, loads: Loads, costs: StoreCosts, clock: VirtualClock) -> None:
        """``loads``: the result of ``Scheduler.use_tier``."""
        self.loads = loads
        self._costs, self._clock = costs, clock
        self._records: OrderedDict[Entry, None] = OrderedDict()
        """Blocks on the disk, in order of the last use."""
        self._used = 0
        self._loads = deque[CopyBlocks]()
        self._stores = deque[CopyBlocks]()
        self._running: CopyBlocks | None = None
        self._began = self._ends = 0.0
        """Start and end of the running command."""

    @property
    def next_at(self) -> float | None:
        """Time of the next report or deadline; None without one."""
        times = [self._ends] if self._running is not None else []
        due = self.loads.next_due
        return min([*times, due] if due is not None else times, default=None)

    def take(self, scheduler: object) -> list[TokenEvent]:
        """Report the commands that have ended. Return no events: a load changes no sequence's tokens."""
        while self._running is not None and self._ends <= self._clock.now():
            command, self._running = self._running, None
            nbytes = self.loads.book.bytes_of([(kind, key) for kind, _, key in command.items()])
            outcomes, gone = self._carry_out(command)
            seconds = self._ends - self._began
            self._begin(self._ends)
            self.loads.on(Copied(command.job, outcomes, nbytes, seconds), self._clock.now())
            if gone:
                self.loads.on(Changed((), gone), self._clock.now())
        return []

    def asked(self, scheduler: object) -> list[TokenEvent]:
        """Queue the commands of the scheduler. Return no events."""
        for command in self.loads.requests(self._clock.now()):
            (self._loads if command.load else self._stores).append(command)
        if self._running is None:
            self._begin(self._clock.now())
        return []

    def _begin(self, now: float) -> None:
        """Start the next command at ``now``."""
        queue = self._loads or self._stores
        if not queue:
            return
        self._running = command = queue.popleft()
        nbytes = self.loads.book.bytes_of([(kind, key) for kind, _, key in command.items()])
        self._began, self._ends = now, now + self._costs.latency + nbytes / self._costs.bandwidth

    def _carry_out(self, command: CopyBlocks) -> tuple[bytes, list[Entry]]:
        """Return the outcomes of a command, and the blocks that made room on the disk."""
        outcomes, gone = bytearray(), list[Entry]()
        for kind, _, key in command.items():
            entry = (kind, key)
            there = entry in self._records
            if there:
                self._records.move_to_end(entry)
            elif not command.load:
                self._records[entry] = None
                self._used += self.loads.book.bytes_of([entry])
            outcomes.append(BlockOutcome.DONE if there or not command.load else BlockOutcome.GONE)
        while self._used > self._costs.nbytes:
            entry, _ = self._records.popitem(last=False)
            self._used -= self.loads.book.bytes_of([entry])
            gone.append(entry)
        return bytes(outcomes), gone


class StoreLoop(EngineLoop[FakeStep]):
    """A step loop whose disk works during steps. ``store`` is None without a disk."""

    store: SimulatedStore | None = None

    def commit(self, events: list[TokenEvent]) -> None:
        """Let the disk work until the end of the oldest step, then commit the step."""
        complete = self._in_flight[0].handle.complete
        while self.wait_for_store(complete, events):
            pass
        super().commit(events)

    def wait_for_store(self, until: float, events: list[TokenEvent]) -> bool:
        """Move the clock to the next report of the disk, and append the events. Return False without a report
        at or before ``until``."""
        at = None if self.store is None else self.store.next_at
        if at is None or at > until:
            return False
        assert isinstance(self._clock, VirtualClock)
        self._clock.advance_to(at)
        events += self.hear()
        return True
