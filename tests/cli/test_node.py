"""Ranks on a host without an engine: which ends count as failures."""

from __future__ import annotations

from typing import Any

import pytest

from weft.cli.processes import node
from weft.cli.processes.node import AWAY_S, HostRanks
from weft.cli.processes.rank_main import NO_ENGINE, WELCOME_S
from weft.common.restarts import RestartBudget


class Processes:
    """Rank processes with scripted ends."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, int]] = []
        self.spawned: list[int] = []

    def ended(self) -> list[tuple[int, int]]:
        taken, self.ends = self.ends, []
        return taken

    def spawn(self, rank: int) -> bool:
        self.spawned.append(rank)
        return False

    def kill(self, rank: int) -> None: ...

    def ranks(self) -> list[int]:
        return []


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    at = [0.0]
    monkeypatch.setattr(node.time, "monotonic", lambda: at[0])
    return at


def test_many_ranks_wait_an_hour_for_an_engine(now: list[float]) -> None:
    """Eight ranks that end every two minutes, because no engine answers, are not failures."""
    made: Any = Processes()
    ranks = HostRanks(made, range(8, 16), 10.0, RestartBudget(3, 600.0))
    while now[0] < AWAY_S - WELCOME_S:
        now[0] += WELCOME_S
        made.ends = [(rank, NO_ENGINE) for rank in range(8, 16)]
        assert ranks.look()
    now[0] += WELCOME_S
    made.ends = [(rank, NO_ENGINE) for rank in range(8, 16)]
    assert not ranks.look(), "an hour is over"


def test_an_engine_in_between_begins_the_hour_anew(now: list[float]) -> None:
    made: Any = Processes()
    ranks = HostRanks(made, [1], 10.0, RestartBudget(0, 600.0))
    for _ in range(50):
        now[0] += 10 * WELCOME_S
        made.ends = [(1, NO_ENGINE)]
        assert ranks.look()
    made.ends = [(1, 1)]
    assert not ranks.look(), "other ends count"
