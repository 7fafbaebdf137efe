"""The network of tests: late, lost, repeated and damaged writes, copied by receivers and one-sided."""

from __future__ import annotations

import queue

import numpy as np
import pytest
import torch

from tests.disagg.protocol.memory import KINDS, Group
from tests.disagg.transport.rig import TABLES
from tests.support.slow import mostly_slow
from weft.disagg.protocol.group_layout import blocks_of
from weft.disagg.protocol.transfer_events import RankReport, RankStopped
from weft.disagg.protocol.transfer_table import FenceBy
from weft.disagg.transport.loopback_transport import LoopbackFaults, LoopbackNetwork, LoopbackTransport
from weft.disagg.transport.transfer_thread import RankTransfer
from weft.types import transfer as r
from weft.types.transfer import Outcome, TransferKey

KEY = TransferKey(3, 0, 1)
END = 37


class Pair:
    """One rank on each side, on virtual time."""

    def __init__(self, faults: LoopbackFaults, seed: int = 0, fence: FenceBy = "copy") -> None:
        self.time = 0.0
        self.network = LoopbackNetwork(lambda: self.time, seed, faults)
        caches = [KINDS["full"], KINDS["latent"], KINDS["state"]]
        rng = np.random.default_rng(seed)
        self.groups = Group(caches, 1, 8, 16), Group(caches, 1, 8, 16, True)
        self.told: queue.SimpleQueue[RankReport | RankStopped] = queue.SimpleQueue()
        self.transports, self.ranks = [], []
        for group, name in zip(self.groups, ("P", "D"), strict=True):
            group.fill(rng)
            transport = LoopbackTransport(self.network, name, 1, fence)
            transport.register([torch.from_numpy(region) for region in group.regions[0]])
            tell = self.told.put if name == "D" else lambda said: None
            self.transports.append(transport)
            self.ranks.append(
                RankTransfer(0, group.dims, transport, tell, start=False, clock=lambda: self.time)
            )

    def begin(self, key: TransferKey = KEY) -> None:
        sender, receiver = self.groups
        tables = [[TABLES[which][:5], TABLES[which][:5], [1]] for which in (0, 1)]
        offer = r.Admitted(key=key, num_prompt=END, dims=sender.dims)
        blocks = tuple(blocks_of(table) for table in tables[1])
        ends = (self.transports[1].endpoint,)
        bound = r.Bound(key=key, start=8, dims=receiver.dims, blocks=blocks, endpoints=ends)
        self.ranks[1].expect(offer, bound)
        self.ranks[0].begin(offer, bound, tuple(blocks_of(table) for table in tables[0]))
        for layer in (1, 2):
            self.ranks[0].computed(key, (layer,), 8, END)

    def run(self, seconds: float) -> None:
        until = self.time + seconds
        while self.time < until:
            for rank in self.ranks:
                rank.turn(0.0)
            self.time = min(until, max(self.time + 1e-4, self.network.next_due() or until))

    def outcome(self) -> RankReport | None:
        last = None
        while not self.told.empty():
            said = self.told.get()
            if isinstance(said, RankReport) and said.outcome is not Outcome.pending and last is None:
                last = said
        return last


@pytest.mark.requirement("E30")
@mostly_slow("fence", ["copy", "rekey"], ["rekey"])
@pytest.mark.parametrize("damage", ["flipped", "swapped", "moved"])
def test_a_hundred_of_a_hundred_corruptions_are_caught(damage: str, fence: FenceBy) -> None:
    caught = planted = 0
    for seed in range(100):
        pair = Pair(LoopbackFaults(**{damage: 1.0}), seed, fence)
        pair.begin()
        pair.run(1.0)
        said = pair.outcome()
        planted += 1
        assert said is not None
        caught += said.error is not None and said.error.code == "transfer_corrupt"
    assert caught == planted == 100


@pytest.mark.requirement("E30")
def test_a_stale_state_is_caught_every_time() -> None:
    """The data of another attempt, or of another place, differs."""
    for seed in range(100):
        pair = Pair(LoopbackFaults(delay=0.5), seed)
        pair.begin()
        pair.ranks[0].turn(0.0)
        for region in pair.groups[0].regions_of(2):
            memory = pair.groups[0].regions[0][region]
            memory[:] = np.roll(memory, 64)
        pair.run(2.0)
        said = pair.outcome()
        assert said is not None
        assert said.error is not None
        assert said.error.code == "transfer_corrupt"


@pytest.mark.requirement("E30")
def test_a_block_that_is_reassigned_before_it_is_read_is_caught_every_time() -> None:
    for seed in range(100):
        pair = Pair(LoopbackFaults(delay=0.5), seed)
        pair.begin()
        pair.ranks[0].turn(0.0)
        rng = np.random.default_rng(seed)
        block = pair.groups[0].elements(0, 0)[:, TABLES[0][1 + seed % 4]]
        block[:, :, :, : END % 8] ^= rng.integers(1, 256, dtype=np.uint8)
        pair.run(2.0)
        said = pair.outcome()
        assert said is not None
        assert said.error is not None


@pytest.mark.parametrize("fence", ["copy", "connection"])
def test_repeated_and_overtaking_writes_change_nothing(fence: FenceBy) -> None:
    for seed in range(20):
        pair = Pair(LoopbackFaults(delay=1.0, repeated=0.5), seed, fence)
        pair.begin()
        pair.run(5.0)
        said = pair.outcome()
        assert said is not None
        assert said.outcome is Outcome.done


def test_a_lost_write_leaves_the_transfer_pending() -> None:
    pair = Pair(LoopbackFaults(lost=0.5), 1)
    pair.begin()
    pair.run(5.0)
    assert pair.outcome() is None


def test_a_late_write_of_a_stopped_transfer_lands_nowhere_if_receivers_copy() -> None:
    pair = Pair(LoopbackFaults(late=1.0, late_s=50.0))
    pair.begin()
    pair.run(1.0)
    pair.ranks[1].stop(KEY)
    pair.run(1.0)
    before = [region.copy() for region in pair.groups[1].regions[0]]
    pair.run(100.0)
    assert all(np.array_equal(x, y) for x, y in zip(before, pair.groups[1].regions[0], strict=True))
    assert pair.ranks[1].arrivals.dropped > 0


def test_a_late_one_sided_write_lands_unless_its_connection_is_cut() -> None:
    """Why time alone fences nothing."""
    for cut in (False, True):
        pair = Pair(LoopbackFaults(late=1.0, late_s=50.0), fence="connection")
        pair.begin()
        pair.run(1.0)
        pair.ranks[1].stop(KEY)
        if cut:
            pair.transports[1].cut.add("P")
        before = [region.copy() for region in pair.groups[1].regions[0]]
        pair.run(100.0)
        same = all(np.array_equal(x, y) for x, y in zip(before, pair.groups[1].regions[0], strict=True))
        assert same == cut
