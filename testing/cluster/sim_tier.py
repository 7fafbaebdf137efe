"""A KV tier in a simulated cluster: one disk for all engine processes, with latency and faults.

The book and the loads are the product's code. The seed decides if a schedule has a tier, and a random
generator of its own chooses the faults of the disk. So other schedules stay as before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from testing.cluster.check import VOCABULARY, require
from testing.cluster.clients import Client
from weft.kv.tiers import Changed, Copied, Stopped
from weft.scheduler import Scheduler
from weft.types.messages import TokenEvent
from weft.types.plan import AllocSlot, AppendBlocks, AppendEach, StepPlan
from weft.types.tiers import BlockOutcome, CopyBlocks, Entry, StoreMode

if TYPE_CHECKING:
    from testing.cluster.cluster import Cluster
    from testing.cluster.engine_process import EngineProcess

TIERED = (5, 7)
"""Last digits of the seeds of schedules with a tier, unless the schedule has roles or no prefix caching."""
PROMPT = 14
"""Maximum tokens of a prompt in a schedule with a tier. All prompts begin alike."""
EVICTS = 0.7
"""Share of the commands after which the pool has evicted everything unused, so that records are needed."""
KNOWN_S = 1.5
"""Seconds within which a heartbeat reports a change of the pool."""
STALLS = (0.3, 2.0, 20.0)
"""Seconds of stalls, chosen at random."""
BUDGET = 40
"""Maximum number of records. The oldest go first."""


class SimDisk:
    """The records of a cluster. Outlives every process, and serves several writers."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"disk of {seed}")
        self.there = seed % 10 in TIERED
        """True if the schedule has a tier."""
        self.records: dict[Entry, None] = {}
        """Complete records, oldest first."""
        self.damage = self.rng.choice((0.0, 0.1, 0.3))
        self.full_after = self.rng.choice((10**9, 10**9, 5))
        """Number of stores after which the disk is full."""
        self.stores = 0
        self.readers: list[SimTier] = []

    def share_prompts(self, clients: Sequence[Client]) -> None:
        """Let the prompts of a schedule with a tier begin alike, so that records are read."""
        base = [self.rng.randrange(VOCABULARY) for _ in range(PROMPT)]
        for client in clients if self.there else ():
            client.prompt = base[: self.rng.randint(5, PROMPT)]

    def delay(self) -> float:
        """Return the seconds of one command."""
        return self.rng.choice(STALLS) if self.rng.random() < 0.05 else self.rng.uniform(0.001, 0.02)

    def load(self, entry: Entry) -> BlockOutcome:
        """Return the outcome of one read. A damaged record is dropped."""
        if entry not in self.records:
            return BlockOutcome.GONE
        if self.rng.random() < self.damage:
            del self.records[entry]
            return BlockOutcome.CORRUPT
        return BlockOutcome.DONE

    def store(self, entry: Entry) -> BlockOutcome:
        """Return the outcome of one write. A torn record is not there."""
        self.stores += 1
        if self.stores > self.full_after:
            return BlockOutcome.OFF
        if self.rng.random() < self.damage / 4:
            return BlockOutcome.SKIPPED
        self.records.setdefault(entry)
        while len(self.records) > BUDGET:
            del self.records[next(iter(self.records))]
        return BlockOutcome.DONE


class SimTier:
    """The tier of one engine process, an ``AwaitedSource``."""

    sockets: Sequence[Any] = ()

    def __init__(self, process: EngineProcess, scheduler: Scheduler, disk: SimDisk) -> None:
        self._process, self._disk = process, disk
        self._cluster: Cluster = process.cluster
        mode: StoreMode = disk.rng.choice(("all", "all", "reused"))
        self.loads = scheduler.use_tier("float32", mode)
        self._pool = scheduler._state.caches.kinds[0].pool
        self.loads.on(Changed(list(disk.records), []), self._cluster.now)
        disk.readers.append(self)
        self._quiet_from = 0.0
        self._garbage: set[int] = set()
        """Blocks with the bytes of a failed load."""

    def take(self, scheduler: object) -> list[TokenEvent]:
        """Return no events: reports arrive as events of the timeline."""
        return []

    def serve(self, scheduler: object) -> list[TokenEvent]:
        """Begin the commands of the scheduler."""
        cluster = self._cluster
        for command in self.loads.requests(cluster.now):
            epoch = self._process.group.membership.epoch
            for kind, block, _ in command.items():
                require(self._pool.is_pinned(block), f"a copy of block {block} of group {kind} has no pin")
            cluster.at(cluster.now + self._disk.delay(), self._process, self._done, command, epoch)
        return []

    @property
    def busy(self) -> bool:
        """True while a command is under way, and until the API servers know the changes of the pool."""
        return bool(self.loads.book.num_copying) or self._cluster.now < self._quiet_from

    def _done(self, command: CopyBlocks, epoch: int) -> None:
        """Report the end of a command. Commands of a lost epoch have the outcome ``LOST``."""
        cluster, outcomes = self._cluster, bytearray()
        lost = epoch != self._process.group.membership.epoch
        for kind, block, key in command.items():
            move = self._disk.load if command.load else self._disk.store
            outcome = BlockOutcome.LOST if lost else move((kind, key))
            cluster.count(f"blocks {'loaded' if command.load else 'stored'}: {outcome.name.lower()}")
            if command.load:
                self._garbage.discard(block)
                self._garbage |= {block} if outcome != BlockOutcome.DONE else set()
            outcomes.append(outcome)
        self.loads.on(Copied(command.job, bytes(outcomes), 100 * command.size, 0.01), cluster.now)
        if not command.load:
            self._publish([(kind, key) for kind, _, key in command.items()])
        if self._disk.rng.random() < EVICTS:
            self._pool.forget_unused()
        if BlockOutcome.OFF in outcomes:
            self.loads.on(Stopped("no space left"), cluster.now)
        cluster.counts["prompt tokens saved by a tier"] = max(
            cluster.counts["prompt tokens saved by a tier"], self.loads.stats(cluster.now).saved_tokens
        )
        self._quiet_from = cluster.now + KNOWN_S
        self._process.transfer_news()

    def _publish(self, entries: list[Entry]) -> None:
        """Let the other processes see records, at different times."""
        for reader in self._disk.readers:
            if reader is not self:
                self._cluster.after(0.005, 0.2, reader._process, reader._see, entries)

    def _see(self, entries: list[Entry]) -> None:
        there = [entry for entry in entries if entry in self._disk.records]
        self.loads.on(Changed(there, [entry for entry in entries if entry not in there]), self._cluster.now)

    def check(self, plan: StepPlan) -> None:
        """Raise Violation if a sequence reads a block with the bytes of a failed load."""
        hits: dict[int, int] = {}
        for op in plan.ops:
            if isinstance(op, AllocSlot):
                hits[op.slot] = op.num_cached // self._process.engine.kv.block_size
            elif isinstance(op, AppendBlocks):
                blocks, count = op.blocks.tolist(), hits.pop(op.slot, 0)
                bad = self._garbage.intersection(blocks[:count])
                require(not bad, f"step {plan.step} reads blocks {sorted(bad)}, whose load has failed")
                self._garbage.difference_update(blocks[count:])
            elif isinstance(op, AppendEach):
                self._garbage.difference_update(op.blocks.tolist())


def open_tier(process: EngineProcess) -> None:
    """Attach a tier to the engine of ``process``, if the schedule has one."""
    engine, cluster = process.engine, process.cluster
    disk = cluster.disk
    if not disk.there or cluster.transfers.paired or not engine.kv.enable_prefix_caching:
        return
    assert isinstance(engine.scheduler, Scheduler)
    tier = engine.tier = engine.runner.tier = SimTier(process, engine.scheduler, disk)
    engine.sources = [*engine.sources, tier]
