"""``bench.drill``: what it counts, and one small drill."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench import drill, rows
from weft.bench.process import ServerProcess


def arguments(**changed: object) -> argparse.Namespace:
    given = {"clients": 2, "requests": 3, "tokens": 16, "kills": 1, "every": 0.5, "deadline": 240.0}
    return argparse.Namespace(**{**given, "model": "", "tree": str(rows.ROOT), **changed})


def test_a_gap_is_the_longest_silence_around_a_kill_of_each_client() -> None:
    run = drill.Drill(ServerProcess(["true"]), arguments())
    run.kills = [10.0, 100.0]
    run.clients[0].arrivals = [
        1.0,
        9.0,
        9.9,
        12.4,
        12.5,
        99.9,
        100.1,
    ]
    run.clients[1].arrivals = [9.95, 10.5, 11.5]  # ended before the second kill
    assert run.gaps() == pytest.approx([2.5, 1.0, 0.2])


@pytest.mark.timeout(280)
def test_a_killed_head_costs_a_gap_and_nothing_else(tmp_path: Path) -> None:
    row, reasons = drill.drill("head", arguments(requests=12), tmp_path / "log")
    assert (row["kills"], row["requests"], row["lost"], row["other tokens"]) == (1, 24, 0, 0), (row, reasons)
    assert row["gap largest s"] is not None
