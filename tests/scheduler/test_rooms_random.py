"""Random loads of two groups: everybody gets the tokens they would have got alone, whatever happens."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.harness import random_bases, random_submits
from tests.scheduler.rooms_rig import World


def play(seed: int, harm: float = 1.0, streams: int = 24) -> World:
    """Streams come while anything happens; then peace until everything is over."""
    world = World(seed, harm)
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
        world.run(rng.random() * 0.3)
    world.harm = 0.0
    world.run(600.0)
    return world


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 60), marks=pytest.mark.grid)])
def test_random_loads_of_two_groups(seeds: range) -> None:
    seen: set[str] = set()
    copied = 0
    for seed in seeds:
        world = play(seed)
        world.check_end()
        seen |= {f"P {what}" for what in world.sender.seen} | {f"D {what}" for what in world.receiver.seen}
        copied += world.copied
    print(sorted(seen), copied)


def test_without_faults_nothing_is_given_back() -> None:
    for seed in range(6):
        world = play(seed, harm=0.0)
        world.check_end()
        print(world.sender.seen, world.receiver.seen)
