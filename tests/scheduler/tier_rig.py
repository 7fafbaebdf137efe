"""A rig with a KV tier: a disk in memory that keeps contents, answers late, and fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from tests.scheduler.harness import Rig
from weft.config.resolved import KVConfig
from weft.kv.tiers import STUCK_S, Changed, Copied
from weft.scheduler.loads import Loads
from weft.types.tiers import BlockOutcome, CopyBlocks, Entry, StoreMode

Content = dict[int, int]
"""Offset within a block -> content of the position."""


@dataclass
class FakeDisk:
    """Records of blocks. The records outlive the rigs that write them."""

    records: dict[Entry, Content] = field(default_factory=dict)
    fault: Callable[[CopyBlocks, Entry], BlockOutcome] = lambda command, entry: BlockOutcome.DONE
    """Outcome of the copy of a block, unless the record is missing."""


class TierRig(Rig):
    """A rig with a tier. ``serve`` answers commands; until then, commands are under way."""

    def __init__(
        self,
        kv: KVConfig,
        depth: int = 1,
        *,
        mode: StoreMode = "all",
        disk: FakeDisk | None = None,
        **section: object,
    ) -> None:
        super().__init__(msgspec.structs.replace(kv, enable_prefix_caching=True), depth, **section)
        self.disk = disk or FakeDisk()
        self.loads: Loads = self.scheduler.use_tier("float32", mode)
        self.under_way: list[tuple[CopyBlocks, bool]] = []
        """(command, True if the ranks were lost since)."""
        self.loads.on(Changed(list(self.disk.records), []), self.now)
        self.copied = self.loaded_blocks = 0
        self.seconds = 1e-3
        """Reported seconds of a command."""

    def ask(self) -> None:
        """Collect the commands of the scheduler, and check the blocks."""
        for command in self.loads.requests(self.now):
            self.under_way.append((command, False))
            for kind, block, _ in command.items():
                pool = self.scheduler._state.caches.kinds[kind].pool
                assert pool.is_pinned(block)
                if command.load:  # nothing in flight may name a block that is filled
                    assert not any(block in blocks[kind] for _, blocks in self.runner.named.values())

    def serve(self, number: int = 0) -> None:
        """Carry out one command and report the outcome."""
        command, lost = self.under_way.pop(number)
        outcomes = bytearray()
        for kind, block, key in command.items():
            entry = (kind, key)
            outcome = BlockOutcome.LOST if lost else self.disk.fault(command, entry)
            if outcome == BlockOutcome.DONE and command.load and entry not in self.disk.records:
                outcome = BlockOutcome.GONE
            outcomes.append(outcome)
            if not lost:
                self._copy(command.load, kind, block, entry, outcome)
        self.loads.on(Copied(command.job, bytes(outcomes), 100 * len(outcomes), self.seconds), self.now)

    def _copy(self, load: bool, kind: int, block: int, entry: Entry, outcome: BlockOutcome) -> None:
        """Move the contents of a block. A failed load leaves garbage."""
        memory, size = self.runner.memory[kind], self.kv.pools[kind].block_size
        if not load:
            if outcome == BlockOutcome.DONE:
                whole = {place: memory[block, place] for place in range(size) if (block, place) in memory}
                assert whole, "a block without contents was stored"
                known = self.disk.records.setdefault(entry, whole)
                assert known == whole, "a block was stored with other contents than before"
                self.copied += 1
            return
        content = self.disk.records.get(entry, {})
        for place in range(size):
            memory.pop((block, place), None)
            if outcome == BlockOutcome.DONE and place in content:
                memory[block, place] = content[place]
        self.loaded_blocks += outcome == BlockOutcome.DONE

    def settle(self, most: int = 3000) -> None:
        """Run until no work and no command is left."""
        for _ in range(most):
            self.collect(self.scheduler.expire(self.now))
            self.ask()
            if self.under_way:
                self.serve()
            elif self.scheduler.has_work():
                self.step()
            elif self.scheduler.blocked:
                self.now += STUCK_S / 4
            elif not self.loads.moving:
                return
        raise AssertionError("work is left after many steps")

    def drain(self, most: int = 5000) -> None:
        self.settle(most)

    def lose(self) -> None:
        """Lose the ranks. Commands under way end without a report of the lost rank."""
        self.under_way = [(command, True) for command, _ in self.under_way]
        events = self.scheduler.requeue_all()
        self.in_flight.clear()
        self.runner = self.runner.anew()
        for event in events:
            self.outputs[event.sequence].given_up = True
        self.collect(events)


def faulty(rng: random.Random, share: float) -> Callable[[CopyBlocks, Entry], BlockOutcome]:
    """Return a fault that hits a share of all copies of blocks."""
    bad = (BlockOutcome.CORRUPT, BlockOutcome.GONE, BlockOutcome.SKIPPED, BlockOutcome.LOST)
    return lambda command, entry: rng.choice(bad) if rng.random() < share else BlockOutcome.DONE
