"""Sessions of agents on virtual time: the gain of retained caches."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tests.support.slow import mostly_slow
from weft.cli.sim.sim import sim
from weft.config.sections.all import SchedulerSection
from weft.sim.agents import AgentReport, Agents, AgentSimulation
from weft.sim.engine import kv_config
from weft.sim.presets import PRESETS

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


def run(retention: float, seed: int = 0) -> AgentReport:
    section = SchedulerSection(max_num_seqs=16, max_num_batched_tokens=2048, steps_in_flight=2)
    kv = kv_config(section, SMALL.longest, tokens=32_000, block_size=16)
    cost = PRESETS["spool-text-cpu"].scaled(0.01)
    simulation = AgentSimulation(kv, section, cost, SMALL, retention=retention, seed=seed)
    simulation.run()
    assert simulation.scheduler.stats().kv_usage == 0
    return simulation.agent_report()


@pytest.mark.requirement("G14")
@mostly_slow("seed", [0, 1], [0])
def test_kept_sessions_are_found_again_and_answered_sooner(seed: int) -> None:
    without, kept = run(0.0, seed), run(300.0, seed)
    assert without.turns == kept.turns == 3 * 7
    assert without.prompt_tokens == kept.prompt_tokens
    assert kept.hit_rate > without.hit_rate + 0.2
    assert kept.ttft.p50 < without.ttft.p50


@pytest.mark.slow
def test_the_same_seed_is_the_same_run() -> None:
    assert run(50.0, 3) == run(50.0, 3)


def test_the_command_prints_a_column_for_each_retention() -> None:
    flags = ["--sessions", "1", "--turns", "2", "--others", "3", "--kv-tokens", "500000"]
    got = CliRunner().invoke(sim, ["agents", *flags, "--retention", "0", "--retention", "60"])
    assert got.exit_code == 0, got.output
    lines = got.output.splitlines()
    assert lines[0].split() == ["--session-retention", "0", "60"]
    assert "of them cached" in got.output
    small = CliRunner().invoke(sim, ["agents", "--kv-tokens", "1000"])
    assert small.exit_code != 0
