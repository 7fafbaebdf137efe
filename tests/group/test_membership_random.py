"""Whatever befalls ranks, links and heads: one epoch at a time, and in the end all run or give up."""

from __future__ import annotations

import pytest

from tests.group.world import World

FAULTS_S = 60.0
BOUND_S = 400.0
"""Seconds in which every group runs again after the last fault: a few tries, each with its hello and load."""


def play(seed: int, tensor: int, replicas: int) -> World:
    """``World`` checks itself all along."""
    world = World(seed, tensor, replicas, FAULTS_S)

    def ended() -> bool:
        return all(head.membership.phase in ("running", "ended") for head in world.heads)

    world.run(FAULTS_S)
    world.run(FAULTS_S + BOUND_S, ended)
    assert ended(), [(head.membership.phase, head.membership.members) for head in world.heads]
    return world


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("least", [1_000, pytest.param(20_000, marks=pytest.mark.grid)])
def test_whatever_befalls(replicas: int, least: int) -> None:
    counted = dict.fromkeys(("faults", "settled", "epochs", "heads", "lost", "ended"), 0)
    seed = 0
    while counted["faults"] < least:
        world = play(seed, 1 + seed % 4, replicas)
        for name, count in world.counted.items():
            counted[name] += count
        counted["ended"] += sum(head.membership.failed is not None for head in world.heads)
        seed += 1
    assert counted["epochs"] > least // 8, "most groups came back"
    assert counted["lost"] > least // 8
    assert min(counted["settled"], counted["heads"], counted["ended"]) > 0
