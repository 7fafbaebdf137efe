"""Several groups on virtual time, without faults."""

from __future__ import annotations

import random

import pytest

from weft.config.budget import with_budget
from weft.config.sections import SchedulerSection
from weft.launch.sim_plan import advice, divisions, table
from weft.sim.deployment import Deployment, Groups, Outcome
from weft.sim.engine import kv_config, simulate
from weft.sim.presets import load
from weft.sim.transfers import Wire
from weft.sim.workload import Arrival, Lengths, poisson

COST = load("spool-text-cpu")
SECTION = with_budget(SchedulerSection(max_num_seqs=32), "cuda")
FAST = Wire(12288, 2e9)


def load_of(count: int = 60, rate: float = 6.0) -> list[Arrival]:
    return poisson(count, rate, Lengths(500, 1500), Lengths(32, 64), random.Random(3))


def run(
    groups: Groups, arrivals: list[Arrival], wire: Wire = FAST, tokens: int = 0
) -> tuple[Outcome, Deployment]:
    kv = kv_config(SECTION, 2048, tokens=tokens)
    deployment = Deployment(groups, kv, SECTION, COST, arrivals, wire)
    return deployment.run((1.0, 0.02)), deployment


def test_one_unified_group_is_the_simulator_of_one_scheduler() -> None:
    arrivals = load_of()
    got, _ = run(Groups(unified=1), arrivals)
    alone = simulate(kv_config(SECTION, 2048), SECTION, COST, arrivals)
    assert got.done == alone.done == len(arrivals)
    assert got.ttft.p50 == pytest.approx(alone.ttft.p50, rel=0.02)
    assert got.itl.p99 == pytest.approx(alone.itl.p99, rel=0.05)


@pytest.mark.parametrize(
    "groups", [Groups(unified=3), Groups(prefill=1, decode=2), Groups(prefill=2, decode=1)]
)
def test_every_request_ends_with_its_tokens_and_a_seed_says_when(groups: Groups) -> None:
    arrivals = load_of()
    one, deployment = run(groups, arrivals)
    assert (one.done, one.refused) == (len(arrivals), 0)
    assert [len(stream.times) for stream in deployment.streams.values()] == [a.output for a in arrivals]
    assert all(share > 0.05 for share in one.busy.values()), "each group has its part"
    again, _ = run(groups, arrivals)
    assert again == one


def test_who_decodes_computes_no_prompts_and_long_prompts_disturb_nobody() -> None:
    arrivals = load_of(rate=8.0)
    unified, _ = run(Groups(unified=2), arrivals)
    apart, deployment = run(Groups(prefill=1, decode=1), arrivals)
    stats = deployment.groups["decode0"].stats()
    assert stats.mixed_steps == 0
    assert stats.transfers is not None
    assert stats.transfers.evictions == 0
    assert apart.exposed.count == len(arrivals)
    assert apart.itl.p99 < 0.5 * unified.itl.p99


def test_a_slow_wire_shows_in_the_second_token_alone() -> None:
    arrivals = [Arrival(0.0, 1024, 8)]
    fast, one = run(Groups(prefill=1, decode=1), arrivals)
    slow, other = run(Groups(prefill=1, decode=1), arrivals, Wire(12288, 12288 * 1024))
    assert slow.ttft == fast.ttft
    (quick,), (late,) = one.streams.values(), other.streams.values()
    assert late.times[1] - late.times[0] > 0.5
    assert quick.times[1] - quick.times[0] < 0.1
    assert [b - a for a, b in zip(late.times[1:], late.times[2:], strict=False)] == pytest.approx(
        [b - a for a, b in zip(quick.times[1:], quick.times[2:], strict=False)]
    )


def test_prompts_wait_for_blocks_where_they_are_decoded() -> None:
    arrivals = [Arrival(0.0, 1500, 64) for _ in range(6)]
    got, _ = run(Groups(prefill=1, decode=1), arrivals, tokens=2 * 2048)
    assert got.done == 6
    assert got.exposed.most > 0.2, "offers were put off until others had ended"


def test_the_plan_is_the_fewest_groups_that_reach_the_goal() -> None:
    assert [str(one) for one in divisions(3)] == [
        "1 unified",
        "2 unified",
        "1 prefill, 1 decode",
        "3 unified",
        "1 prefill, 2 decode",
        "2 prefill, 1 decode",
    ]
    arrivals = load_of(count=30, rate=3.0)
    outcomes = [run(groups, arrivals)[0] for groups in divisions(2)]
    few = [one._replace(good=good) for one, good in zip(outcomes, (0.4, 0.9, 0.97), strict=True)]
    assert advice(few, 0.95) == "95% is reached with 1 prefill, 1 decode"
    assert advice(few, 0.9) == "90% is reached with 1 prefill, 1 decode"
    assert advice(few, 0.3) == "30% is reached with 1 unified"
    assert "none reaches 99%; 1 prefill, 1 decode comes closest: 97%" in advice(few, 0.99)
    assert "1 prefill, 1 decode" in table(few)
