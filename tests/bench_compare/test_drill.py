"""The counters of ``bench.drill``, and a small drill."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench import drill, observed, rows
from tests.cli.test_cli import run
from weft.bench.process import ServerProcess


def arguments(**changed: object) -> argparse.Namespace:
    given = {"clients": 2, "requests": 3, "tokens": 16, "kills": 1, "every": 0.5, "deadline": 240.0}
    given |= {
        "mm_cache_bytes": "256K",
        "max_request_bytes": "",
        "pictures": "",
        "quality": 70,
        "timeout": 180.0,
    }
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


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_killed_head_costs_a_gap_and_nothing_else(tmp_path: Path) -> None:
    row, reasons = drill.drill("head", arguments(requests=12), tmp_path / "log")
    assert (row["kills"], row["requests"], row["lost"], row["other tokens"]) == (1, 24, 0, 0), (row, reasons)
    assert row["gap largest s"] is not None


def test_who_is_killed_has_a_server_that_has_it(tmp_path: Path) -> None:
    commands = {
        name: drill.command_of(victim, "", tmp_path / f"{name}.yaml")
        for name, victim in drill.VICTIMS.items()
    }
    assert "--no-enable-prefix-caching" in commands["decode"]
    assert commands["decode"][-4:] == ["--prefill", "1", "--decode", "2"]
    assert commands["decode-rank"][3:5] == ["up", str(tmp_path / "decode-rank.yaml")]
    checked = run("up", commands["decode-rank"][4], "--check")
    assert checked.returncode == 0, checked.stderr
    assert "2 x cpu, tp 2" in checked.stdout
    assert not drill.VICTIMS["head-of-two"].roles


def test_pools_are_read_from_the_metrics_of_each_head() -> None:
    text = (
        'weft:free_blocks{model_name="a",head="prefill0",kind="0"} 12.0\n'
        'weft:front_sequences{model_name="a"} 3.0\nweft:transfers_open{model_name="a",head="decode0"} 1.0\n'
    )
    assert list(observed.pools(text).values()) == [12.0, 1.0]
