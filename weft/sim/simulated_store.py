"""The levels of a KV tier on virtual time: host memory, disk and object store of one engine.

The tier book and the loads are the product's code. The tier executes one command at a time, loads before
stores, as the thread of a rank does. A load reads each block from the fastest level that has the block. A
store writes to every level:

    seconds of a command = latency + bytes / bandwidth, summed over the levels

Each level evicts the least recently used blocks. The product's disk evicts whole files instead.
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
from weft.types.tiers import LEVELS, BlockOutcome, CopyBlocks, Entry, LevelStats, StoreMode, StoreState


class StoreCosts(NamedTuple):
    """A level of a simulated engine."""

    nbytes: int
    """Bytes of blocks that fit into the level."""
    bandwidth: float
    """Bytes per second, for loads and stores together."""
    latency: float = 1e-3
    """Fixed seconds per command."""
    mode: StoreMode = "reused"
    """Policy of stores. The mode of the first level applies to all levels."""
    level: str = "disk"
    """One of ``LEVELS``."""


class _Level:
    """The blocks in one level."""

    def __init__(self, costs: StoreCosts) -> None:
        self.costs, self.bit = costs, 1 << LEVELS.index(costs.level)
        self.records: OrderedDict[Entry, None] = OrderedDict()
        """Blocks, in order of the last use."""
        self.used = self.evicted = 0

    def put(self, entry: Entry, nbytes: int) -> list[Entry]:
        """Add or use a block of ``nbytes``. Return the evicted blocks."""
        gone = list[Entry]()
        if entry not in self.records:
            self.used += nbytes
        self.records[entry] = None
        self.records.move_to_end(entry)
        while self.used > self.costs.nbytes:
            # Blocks of one run have equal bytes in each KV cache group.
            gone.append(self.records.popitem(last=False)[0])
            self.used -= nbytes
            self.evicted += 1
        return gone


class SimulatedStore:
    """The tier of one engine, an ``AwaitedSource``."""

    sockets: Sequence[Any] = ()

    def __init__(self, loads: Loads, levels: Sequence[StoreCosts], clock: VirtualClock) -> None:
        """``loads``: the result of ``Scheduler.use_tier``. ``levels``: the fastest first."""
        self.loads = loads
        self._levels, self._clock = [_Level(costs) for costs in levels], clock
        self._loads = deque[CopyBlocks]()
        self._stores = deque[CopyBlocks]()
        self._running: CopyBlocks | None = None
        self._began = self._ends = 0.0
        """Start and end of the running command."""

    @property
    def next_at(self) -> float | None:
        """Time of the next report or deadline; None if there is neither."""
        times = [self._ends] if self._running is not None else []
        due = self.loads.next_due
        return min([*times, due] if due is not None else times, default=None)

    def take(self, scheduler: object) -> list[TokenEvent]:
        """Report the commands that have ended. Return no events: a load changes no sequence's tokens."""
        while self._running is not None and self._ends <= self._clock.now():
            command, self._running = self._running, None
            nbytes = self.loads.book.bytes_of([(kind, key) for kind, _, key in command.items()])
            outcomes, levels, changes = self._carry_out(command)
            seconds = self._ends - self._began
            self._begin(self._ends)
            self.loads.on(Copied(command.job, outcomes, nbytes, seconds, levels), self._clock.now())
            for change in changes:
                self.loads.on(change, self._clock.now())
            state = {
                one.costs.level: LevelStats(nbytes=one.used, evicted=one.evicted) for one in self._levels
            }
            self.loads.on(StoreState(state), self._clock.now())
        return []

    def serve(self, scheduler: object) -> list[TokenEvent]:
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
        self._began = now
        self._ends = now + self._seconds(command)

    def _seconds(self, command: CopyBlocks) -> float:
        """Return the seconds of a command."""
        nbytes = [0] * len(self._levels)
        for kind, _, key in command.items():
            entry = (kind, key)
            for number, level in enumerate(self._levels):
                if not command.load or entry in level.records:
                    nbytes[number] += self.loads.book.bytes_of([entry])
                    if command.load:
                        break
        each = zip(self._levels, nbytes, strict=True)
        return sum(level.costs.latency + one / level.costs.bandwidth for level, one in each if one)

    def _carry_out(self, command: CopyBlocks) -> tuple[bytes, bytes, list[Changed]]:
        """Return outcomes and levels of the blocks of a command, and the changes of the levels."""
        outcomes, levels = bytearray(), bytearray()
        added: dict[int, list[Entry]] = {level.bit: [] for level in self._levels}
        gone: dict[int, list[Entry]] = {level.bit: [] for level in self._levels}
        for kind, _, key in command.items():
            entry, nbytes = (kind, key), self.loads.book.bytes_of([(kind, key)])
            there = [level for level in self._levels if entry in level.records]
            found = not command.load or bool(there)
            for level in self._levels if found else ():
                # A loaded block also enters host memory.
                if command.load and level not in there and level.costs.level != "host":
                    continue
                added[level.bit].append(entry)
                gone[level.bit] += level.put(entry, nbytes)
            outcomes.append(BlockOutcome.DONE if found else BlockOutcome.GONE)
            levels.append(sum(level.bit for level in self._levels))
        return bytes(outcomes), bytes(levels), [Changed(added[bit], gone[bit], bit) for bit in added]


class StoreLoop(EngineLoop[FakeStep]):
    """A step loop whose tier works during steps. ``store`` is None without a tier."""

    store: SimulatedStore | None = None

    def commit(self, events: list[TokenEvent]) -> None:
        """Let the tier work until the end of the oldest step, then commit the step."""
        complete = self._in_flight[0].handle.complete
        while self.wait_for_store(complete, events):
            pass
        super().commit(events)

    def wait_for_store(self, until: float, events: list[TokenEvent]) -> bool:
        """Move the clock to the next report of the tier, and append the events. Return False without a report
        at or before ``until``."""
        at = None if self.store is None else self.store.next_at
        if at is None or at > until:
            return False
        assert isinstance(self._clock, VirtualClock)
        self._clock.advance_to(at)
        events += self.poll()
        return True
