"""Sessions of agents on virtual time: the gain of retained caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from click.testing import CliRunner

from tests.support.slow import mostly_slow
from weft.cli.sim.sim import sim
from weft.config.sections.all import SchedulerSection
from weft.sim.agents import AgentReport, Agents, AgentSimulation
from weft.sim.engine import kv_config
from weft.sim.presets import PRESETS
from weft.sim.simulated_store import StoreCosts

SMALL = Agents(
    sessions=3,
    turns=8,
    first=2000,
    grows=300,
    output=20,
    shared=500,
    pause=20.0,
    others=400,
    other_tokens=1000,
    every=0.4,
)


DISK = StoreCosts(nbytes=1 << 30, bandwidth=1e9)


FEW = replace(SMALL, turns=4, pause=4.0, others=100)


def run(
    retention: float,
    seed: int = 0,
    levels: Sequence[StoreCosts] = (),
    agents: Agents = SMALL,
    tokens: int = 32_000,
) -> AgentReport:
    section = SchedulerSection(max_num_seqs=16, max_num_batched_tokens=2048, steps_in_flight=2)
    kv = kv_config(section, agents.longest, tokens=tokens, block_size=16)
    cost = PRESETS["spool-text-cpu"].scaled(0.01)
    simulation = AgentSimulation(kv, section, cost, agents, retention=retention, seed=seed, levels=levels)
    simulation.run()
    assert levels or simulation.scheduler.stats().kv_usage == 0
    return simulation.agent_report()


@pytest.mark.requirement("G14")
@mostly_slow("seed", [0, 1], [0])
def test_kept_sessions_are_found_again_and_answered_sooner(seed: int) -> None:
    without, kept = run(0.0, seed), run(300.0, seed)
    assert without.turns == kept.turns == 3 * 7
    assert without.prompt_tokens == kept.prompt_tokens
    assert kept.hit_rate > without.hit_rate + 0.2
    assert kept.ttft.p50 < without.ttft.p50


@pytest.mark.parametrize(
    ("agents", "tokens"), [(FEW, 8000), pytest.param(SMALL, 32_000, marks=pytest.mark.slow)]
)
def test_a_disk_brings_sessions_back(agents: Agents, tokens: int) -> None:
    without, disk = (run(0.0, levels=levels, agents=agents, tokens=tokens) for levels in ((), [DISK]))
    assert disk.prompt_tokens == without.prompt_tokens
    assert disk.loads["done"] > 0
    assert disk.hit_rate > without.hit_rate + 0.1
    assert disk.ttft.mean < without.ttft.mean


@pytest.mark.slow
def test_host_memory_before_a_disk_is_used_first() -> None:
    """Recent blocks come from host memory, the others from the disk, and turns are answered sooner than from
    the disk alone."""
    host = StoreCosts(nbytes=1 << 14, bandwidth=20e9, latency=1e-4, level="host")
    disk = run(0.0, levels=[DISK])
    both = run(0.0, levels=[host, DISK])
    assert set(both.loaded) == {"host", "disk"}
    assert both.loaded["host"] > 0
    assert 0 < both.loaded["disk"] < disk.loaded["disk"]
    assert both.hit_rate > disk.hit_rate - 0.02
    large = run(0.0, levels=[host._replace(nbytes=1 << 30), DISK])
    assert large.loaded["disk"] == 0


@pytest.mark.slow
def test_a_disk_without_room_gives_no_gain_and_no_harm() -> None:
    without, disk = run(0.0), run(0.0, levels=[DISK._replace(nbytes=1000)])
    assert disk.turns == without.turns
    assert abs(disk.hit_rate - without.hit_rate) < 0.05
    assert disk.ttft.p99 < 1.1 * without.ttft.p99


@pytest.mark.slow
def test_the_same_seed_is_the_same_run() -> None:
    assert run(50.0, 3) == run(50.0, 3)
    assert run(50.0, 3, [DISK]) == run(50.0, 3, [DISK])


def test_the_command_prints_a_column_for_each_retention() -> None:
    flags = ["--sessions", "1", "--turns", "2", "--others", "3", "--kv-tokens", "500000"]
    got = CliRunner().invoke(sim, ["agents", *flags, "--retention", "0", "--retention", "60"])
    assert got.exit_code == 0, got.output
    lines = got.output.splitlines()
    assert lines[0].split() == ["--session-retention", "0", "60"]
    assert "of them cached" in got.output
    small = CliRunner().invoke(sim, ["agents", "--kv-tokens", "1000"])
    assert small.exit_code != 0


def test_the_command_adds_a_column_for_each_level() -> None:
    flags = ["--sessions", "1", "--turns", "2", "--others", "3", "--kv-tokens", "500000", "--retention", "0"]
    tier = ["--kv-host", "1G", "--kv-disk", "20G", "--kv-disk-bandwidth", "500M"]
    got = CliRunner().invoke(sim, ["agents", *flags, *tier])
    assert got.exit_code == 0, got.output
    lines = [line.split() for line in got.output.splitlines()]
    assert lines[:2] == [["--session-retention", "0", "0", "0"], ["KV", "tier", "none", "host", "host+disk"]]
    assert ["loaded", "from", "disk"] in [line[:3] for line in lines]
    assert lines[-1][:4] == ["loads", "not", "begun", "0"]
    wrong = CliRunner().invoke(sim, ["agents", *flags, "--kv-disk", "much"])
    assert "--kv-disk" in str(wrong.exception)
