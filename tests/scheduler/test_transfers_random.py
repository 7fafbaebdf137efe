"""Random loads of two groups: each sequence gets the tokens of a run alone, under any faults."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.scheduler.harness import random_bases, random_submits
from tests.scheduler.transfers_rig import World
from tests.support.slow import mostly_slow, seeds


def play(seed: int, harm: float = 1.0, streams: int = 24, patience: float = 600.0, tight: int = 0) -> World:
    """Run streams under faults, then at most ``patience`` seconds without new streams, until all have
    ended."""
    world = World(seed, harm, tight)
    rng = random.Random(seed + 1)
    bases = random_bases(rng)
    request = 0
    while len(world.streams) < streams:
        if rng.random() < 0.6:
            request += 1
            world.submit(random_submits(rng, 0, request, bases))
        if rng.random() < 0.1 * harm and world.streams:
            world.abort(world.streams[rng.randrange(len(world.streams))])
        if rng.random() < 0.03 * harm:
            rng.choice([world.sender, world.receiver]).lose()
        world.run(rng.random() * (0.1 if tight else 0.3))
    world.harm = 0.0
    world.run(patience)
    return world


@pytest.mark.requirement("E8", "E20")
@seeds((11, 13, 22, 23), 24, 80)
def test_random_loads_of_two_groups(seeds: Sequence[int]) -> None:
    seen: set[str] = set()
    preempted = hits = saved = accepted = 0
    for seed in seeds:
        world = play(seed)
        world.check_end()
        for engine in (world.sender, world.receiver):
            seen |= {f"{engine.name} {what}" for what in engine.seen}
        stats = world.receiver.scheduler.stats()
        preempted += stats.preemptions + world.sender.scheduler.stats().preemptions
        hits += stats.prefix_hits
        saved += world.receiver.runner.loaded
        accepted += sum(stats.drafts_accepted)
    assert min(preempted, hits, saved, accepted) > 0
    both = {
        "CancelTransfer",
        "TransferFailed",
        "TransferFreed",
        "TransferReceived",
        "abort",
        "evicted",
        "length",
        "lost",
        "masks",
        "stop",
    }
    only = {
        "P moved",
        "P FinishTransfer",
        "P TransferBound",
        "P error",
        "D PostponeTransfer",
        "D ReserveTransfer",
        "D TransferWanted",
    }
    assert seen >= {f"{name} {what}" for name in "PD" for what in both} | only


def test_without_faults_little_is_given_back() -> None:
    """Only sequences that ended with the first token, and sequences whose blocks others needed, are
    returned."""
    for seed in range(3):
        world = play(seed, harm=0.0)
        world.check_end()
        for engine in (world.sender, world.receiver):
            stats = engine.scheduler.stats()
            assert stats.transfers is not None
            assert stats.transfers.returns <= 3 + stats.preemptions


@mostly_slow("tight", [1, 2, 4], [2])
@seeds(4, 12, 12)
def test_local_sequences_and_those_that_come_share_a_small_cache(tight: int, seeds: Sequence[int]) -> None:
    """Local and received sequences all progress, whichever sequence has the blocks."""
    preempted = returned = 0
    for seed in seeds:
        world = play(seed, harm=0.3, tight=tight)
        world.check_end()
        preempted += world.receiver.scheduler.stats().preemptions
        returned += "evicted" in world.receiver.seen
    assert min(preempted, returned) > 0
