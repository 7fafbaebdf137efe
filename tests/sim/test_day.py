"""Groups that join, leave and are lost on virtual time, and a short day with a planner."""

from __future__ import annotations

import random

import pytest

from weft.common.errors import InvalidRequest
from weft.config.sections.all import SchedulerSection
from weft.config.sizing.budget import with_budget
from weft.control.planner.capacity import Capacity, Limits, Load
from weft.control.planner.observations import Meter
from weft.front.monitoring.front_tables import LATENCY_BOUNDS
from weft.sim.changing import TPOT_BOUNDS, TTFT_BOUNDS, ChangingDeployment, Settings
from weft.sim.day import DayParameters, draw_day
from weft.sim.deployment import Deployment, Groups
from weft.sim.engine import kv_config
from weft.sim.presets import load
from weft.sim.simulated_transfers import Wire
from weft.sim.workload import Arrival, Lengths, poisson

COST = load("spool-text-cpu")
SECTION = with_budget(SchedulerSection(max_num_seqs=32), "cuda")
WIRE = Wire(12288, 2e9)
SETTINGS = Settings(kv_config(SECTION, 2048), SECTION, COST, WIRE, load_s=2.0)
PAIR = Groups(prefill=2, decode=2)


def arrivals(count: int = 60, rate: float = 6.0) -> list[Arrival]:
    return poisson(count, rate, Lengths(300, 900), Lengths(16, 48), random.Random(3))


def whole(fleet: ChangingDeployment) -> None:
    """Check that each request has exactly its tokens, and that nothing is left in live engines."""
    assert fleet.refused == 0
    assert [len(one.times) for one in fleet.streams.values()] == [
        one.arrival.output for one in fleet.streams.values()
    ]
    left = [group for name, group in fleet.groups.items() if name in fleet.records and group.has_work()]
    assert left == []


def test_without_changes_a_run_is_the_run_of_a_deployment() -> None:
    plain = Deployment(PAIR, SETTINGS.kv, SECTION, COST, arrivals(), WIRE, seed=1)
    changing = ChangingDeployment(PAIR, SETTINGS, arrivals(), seed=1)
    assert changing.run((1.0, 0.02)) == plain.run((1.0, 0.02))


def test_groups_join_after_their_load_and_leave_after_their_requests() -> None:
    fleet = ChangingDeployment(Groups(prefill=1, decode=1), SETTINGS, arrivals(), seed=1)
    seen: dict[str, object] = {}

    def grow() -> None:
        assert fleet.scale("decode", 3) == (("decode1", "decode2"), [])
        seen["loading"] = {name: one.state for name, one in fleet.records.items()}

    def shrink() -> None:
        seen["up"] = {name: one.state for name, one in fleet.records.items()}
        seen["work"] = [fleet.groups[name].steps for name in ("decode1", "decode2")]
        assert fleet.scale("decode", 1) == ((), ["decode1", "decode2"])
        with pytest.raises(InvalidRequest, match="without a decode group"):
            fleet.scale("decode", 0)

    fleet.timeline.at(1.0, None, grow)
    fleet.timeline.at(6.0, None, shrink)
    fleet.run()
    whole(fleet)
    assert seen["loading"]["decode2"] == "loading"  # type: ignore[index]
    assert set(seen["up"].values()) == {"running"}  # type: ignore[attr-defined]
    assert min(seen["work"]) > 0  # type: ignore[call-overload]
    assert set(fleet.records) == {"prefill0", "decode0"}
    assert 2 * fleet.now + 2 * 5.0 <= fleet.size() < 2 * fleet.now + 2 * 9.0


def test_the_time_of_a_lost_group_counts_once() -> None:
    """Also if the group is scaled away while its host is down."""
    fleet = ChangingDeployment(Groups(prefill=1, decode=2), SETTINGS, arrivals(), seed=1)
    fleet.timeline.at(3.0, None, fleet.lose, "decode1", 60.0)
    fleet.timeline.at(4.0, None, fleet.scale, "decode", 1)
    fleet.run()
    assert set(fleet.records) == {"prefill0", "decode0"}
    assert fleet.size() == pytest.approx(2 * fleet.now + 3.0)


def test_no_request_is_lost_with_a_host() -> None:
    for name in ("prefill0", "decode0"):
        fleet = ChangingDeployment(PAIR, SETTINGS, arrivals(), seed=1)
        fleet.timeline.at(3.0, None, fleet.lose, name, 2.0)
        fleet.run()
        whole(fleet)
        assert fleet.records[name].state == "running"
        assert fleet.groups[name].incarnation > 4, "another process"


def test_a_snapshot_has_the_numbers_of_the_run() -> None:
    assert (TTFT_BOUNDS, TPOT_BOUNDS) == LATENCY_BOUNDS
    fleet = ChangingDeployment(PAIR, SETTINGS, arrivals(), seed=1)
    meter = Meter(Limits(0.3, 0.02))
    assert meter.on(fleet.snapshot(), 0.0) is None
    fleet.run()
    seen = meter.on(fleet.snapshot(), fleet.now)
    assert seen is not None
    assert (seen.arrivals, seen.ended) == (60, 60)
    assert seen.prompt_tokens == sum(one.prompt for one in arrivals())
    assert seen.output_tokens == sum(one.output for one in arrivals())
    waits = sorted(one.times[0] - one.arrival.at for one in fleet.streams.values())
    assert seen.ttft.number == 60
    assert seen.ttft.at_goal == pytest.approx(waits[56], rel=0.5)
    assert abs(seen.ttft.outside - sum(wait > 0.3 for wait in waits)) < 10
    assert {role: one.serving for role, one in seen.roles.items()} == {"prefill": 2, "decode": 2}
    assert {one.role for one in seen.work} == {"prefill", "decode"}


@pytest.mark.parametrize(
    ("role", "rate"),
    [
        ("decode", 6.0),
        pytest.param("prefill", 6.0, marks=pytest.mark.slow),
        pytest.param("unified", 6.0, marks=pytest.mark.slow),
        pytest.param("unified", 10.0, marks=pytest.mark.slow),
    ],
)
def test_the_capacity_agrees_with_the_simulation(role: str, rate: float) -> None:
    """The number of groups meets the goal in the simulator, and a fleet without a third of the groups does
    not."""
    limits = Limits(0.5, 0.012)
    capacity = Capacity(COST, limits, SECTION.max_num_batched_tokens, 32)
    groups = capacity.groups(role, Load(rate, 1000, 1000, 48), 12)
    outcomes = {}
    for number in {groups, max(round(groups * 0.6), 1)}:
        many = {"prefill": 8, "decode": 12, role: number} if role != "unified" else {"unified": number}
        requests = poisson(150, rate, Lengths(500, 1500), Lengths(32, 64), random.Random(3))
        outcome = Deployment(Groups(**many), SETTINGS.kv, SECTION, COST, requests, WIRE).run(
            (limits.ttft, limits.tpot)
        )
        outcomes[number] = outcome.good
    assert outcomes[groups] >= 0.93
    assert groups == 1 or min(outcomes.values()) < 0.93


@pytest.mark.slow
def test_a_planner_keeps_more_requests_within_their_limits_than_the_groups_it_began_with() -> None:
    """An eighth of a day. The full days are in docs/simulator.md."""
    bench = DayParameters(COST.scaled(12.0), Limits(6.0, 0.18), load_s=10.0)
    day = draw_day(5, 0.8, shorter=8.0)
    planned = bench.play(day, PAIR, planned=True)
    fixed = bench.play(day, PAIR)
    assert planned.requests == fixed.requests == len(day.arrivals)
    assert planned.changes >= 2
    assert any("is lost" in line for line in planned.log)
    assert planned.outside < 0.5 * fixed.outside
    assert draw_day(5, 0.8, shorter=8.0) == day, "a seed names a day"
