"""Under any faults of ranks, links and engines: one epoch at a time, and in the end all run or give up."""

from __future__ import annotations

from collections import Counter

import pytest

from testing.cluster.explore import silent_log
from tests.group.world import World

FAULTS_S = 60.0
BOUND_S = 400.0
"""Seconds after the last fault in which every group runs again: a few tries, with registration and load."""


def play(seed: int, tensor: int, replicas: int) -> World:
    """Play a random world. ``testing.cluster.group`` checks the invariants all the time."""
    world = World(seed, tensor, replicas, FAULTS_S)
    with silent_log():
        over = world.run(FAULTS_S + BOUND_S)
    phases = [(engine.group.membership.phase, engine.group.membership.members) for engine in world.engines]
    assert over, f"seed {seed}: {phases}"
    return world


@pytest.mark.requirement("F48")
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("least", [1_000, pytest.param(20_000, marks=pytest.mark.grid)])
def test_random_faults_keep_the_invariants(replicas: int, least: int) -> None:
    counts: Counter[str] = Counter()
    seed = 0
    while counts["faults"] < least:
        world = play(seed, 1 + seed % 4, replicas)
        counts.update(world.counts)
        counts["ended"] += sum(engine.failed is not None for engine in world.engines)
        seed += 1
    assert counts["epochs"] > least // 8, "most groups came back"
    assert counts["epochs lost"] > least // 8
    assert min(counts["settled"], counts["heads"], counts["ended"], counts["report lost"]) > 0
