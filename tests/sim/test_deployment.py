"""Several groups on virtual time, without faults."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tests.support.slow import mostly_slow
from weft.cli.sim.sim_plan import advice, divisions, table
from weft.config.sections.all import SchedulerSection
from weft.config.sizing.budget import with_budget
from weft.control.fleet import encoders
from weft.sim.deployment import Deployment, Groups, SimulatedOutcome
from weft.sim.engine import kv_config, simulate
from weft.sim.images import ImageCosts
from weft.sim.presets import load
from weft.sim.simulated_transfers import Wire
from weft.sim.workload import Arrival, Lengths, poisson

COST = load("spool-text-cpu")
SECTION = with_budget(SchedulerSection(max_num_seqs=32), "cuda")
FAST = Wire(12288, 2e9)


def load_of(count: int = 60, rate: float = 6.0) -> list[Arrival]:
    return poisson(count, rate, Lengths(500, 1500), Lengths(32, 64), random.Random(3))


def run(
    groups: Groups, arrivals: list[Arrival], wire: Wire = FAST, tokens: int = 0
) -> tuple[SimulatedOutcome, Deployment]:
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


@mostly_slow(
    "groups",
    [Groups(unified=3), Groups(prefill=1, decode=2), Groups(prefill=2, decode=1)],
    [Groups(prefill=1, decode=2)],
)
def test_every_request_ends_with_its_tokens_and_a_seed_says_when(groups: Groups) -> None:
    arrivals = load_of()
    one, deployment = run(groups, arrivals)
    assert (one.done, one.refused) == (len(arrivals), 0)
    assert [len(stream.times) for stream in deployment.streams.values()] == [a.output for a in arrivals]
    assert all(share > 0.05 for share in one.busy.values()), "each group has its part"
    again, _ = run(groups, arrivals)
    assert again == one


@pytest.mark.slow
def test_decode_groups_compute_no_prompts_and_keep_their_itl() -> None:
    arrivals = load_of(rate=8.0)
    unified, _ = run(Groups(unified=2), arrivals)
    apart, deployment = run(Groups(prefill=1, decode=1), arrivals)
    stats = deployment.groups["decode0"].stats()
    assert stats.mixed_steps == 0
    assert stats.transfers is not None
    assert stats.transfers.returns == 0
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


IMAGES = ImageCosts(tokens=256, patch_seconds=2e-4, row_bytes=6144)


def see(
    groups: Groups, rate: float = 3.0, images: ImageCosts = IMAGES, wire: Wire = FAST, each: int = 2
) -> tuple[SimulatedOutcome, Deployment]:
    """Short prompts with ``each`` images of 0.2 s."""
    arrivals = poisson(40, rate, Lengths(50, 150), Lengths(16, 32), random.Random(3))
    arrivals = [dataclasses.replace(one, images=each) for one in arrivals]
    deployment = Deployment(groups, kv_config(SECTION, 2048), SECTION, COST, arrivals, wire, images=images)
    return deployment.run((1.0, 0.02)), deployment


@pytest.mark.parametrize(
    "groups",
    [
        Groups(unified=2),
        Groups(prefill=1, decode=1),
        Groups(encode=1, unified=1),
        Groups(encode=2, prefill=1, decode=1),
    ],
)
def test_images_are_encoded_once_where_that_is_done(groups: Groups) -> None:
    one, deployment = see(groups)
    assert (one.done, one.refused) == (40, 0)
    stats = {name: group.stats() for name, group in deployment.groups.items()}
    encoded = {name: its.images_encoded for name, its in stats.items() if its.images_encoded}
    assert sum(encoded.values()) == 80
    role = "encode" if groups.encode else "unified" if groups.unified else "prefill"
    assert {name.rstrip("0123456789") for name in encoded} == {role}
    assert all(share > 0.01 for share in one.busy.values()), "each group has its part"
    assert not any(group.has_work() for group in deployment.groups.values())
    again, _ = see(groups)
    assert again == one


def test_images_that_came_before_are_encoded_once() -> None:
    _, deployment = see(Groups(encode=2, unified=1), images=IMAGES._replace(repeats=0.75))
    encoded = [deployment.groups[name].stats().images_encoded for name in ("encode0", "encode1")]
    assert deployment._images is not None
    assert sum(encoded) == deployment._images._made < 40
    assert min(encoded) > 0


def test_streams_do_not_stand_still_for_images_that_others_encode() -> None:
    together, _ = see(Groups(unified=2))
    apart, _ = see(Groups(encode=1, unified=1), rate=2.0)
    assert together.itl.p99 > 0.2
    assert apart.itl.p99 < 0.05


def test_encoded_images_do_not_wait_for_the_next_batch() -> None:
    """Two images take 0.4 s. The first images of an idle group are encoded before their receiver has
    answered."""
    one, _ = see(Groups(encode=1, unified=1), rate=1.5)
    assert one.ttft.p50 < 0.5


def test_more_groups_that_encode_and_wires_show_in_the_first_token() -> None:
    (one, _), (two, _) = see(Groups(encode=1, unified=1)), see(Groups(encode=2, unified=1))
    assert two.ttft.p50 < 0.7 * one.ttft.p50
    slow, _ = see(Groups(encode=2, unified=1), wire=Wire(12288, 6144 * 256.0))
    assert slow.ttft.p50 > two.ttft.p50 + 1.0


def test_the_plan_is_the_fewest_groups_that_reach_the_goal() -> None:
    assert [str(one) for one in divisions(3)] == [
        "1 unified",
        "2 unified",
        "1 prefill, 1 decode",
        "3 unified",
        "1 prefill, 2 decode",
        "2 prefill, 1 decode",
    ]
    assert [str(one) for one in divisions(3, images=True)] == [
        "1 unified",
        "2 unified",
        "1 prefill, 1 decode",
        "1 encode, 1 unified",
        "3 unified",
        "1 prefill, 2 decode",
        "2 prefill, 1 decode",
        "1 encode, 2 unified",
        "1 encode, 1 prefill, 1 decode",
        "2 encode, 1 unified",
    ]
    arrivals = load_of(count=30, rate=3.0)
    outcomes = [run(groups, arrivals)[0] for groups in divisions(2)]
    few = [one._replace(good=good) for one, good in zip(outcomes, (0.4, 0.9, 0.97), strict=True)]
    assert advice(few, 0.95) == "the smallest deployment that reaches 95%: 1 prefill, 1 decode"
    assert advice(few, 0.9) == "the smallest deployment that reaches 90%: 1 prefill, 1 decode"
    assert advice(few, 0.3) == "the smallest deployment that reaches 30%: 1 unified"
    assert "no deployment reaches 99%; 1 prefill, 1 decode comes closest with 97%" in advice(few, 0.99)
    assert "1 prefill, 1 decode" in table(few)


@pytest.mark.slow
@pytest.mark.requirement("D27")
def test_images_go_where_they_belong_unless_others_would_encode_them_sooner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The margin lies between 0 (images have no home) and a value that prevents any balance."""

    def waits(repeats: float, margin: float) -> tuple[float, int]:
        monkeypatch.setattr(encoders, "MARGIN", margin)
        costs = ImageCosts(tokens=256, patch_seconds=390e-6, row_bytes=6144, repeats=repeats)
        rate = 1.2 / (1024 * 390e-6 * (1 - repeats))  # 60% of what two can
        arrivals = poisson(240, rate, Lengths(100, 300), Lengths(8, 8), random.Random(1))
        shown = [dataclasses.replace(one, images=1) for one in arrivals]
        section = with_budget(SchedulerSection(max_num_seqs=64, max_queued_requests=240), "cuda")
        groups = Groups(unified=2, encode=2)
        deployment = Deployment(
            groups, kv_config(section, 600), section, COST, shown, FAST, seed=1, images=costs
        )
        outcome = deployment.run()
        encoded = sum(group.scheduler.stats().images_encoded for group in deployment.groups.values())
        return outcome.ttft.p99, encoded

    chosen = encoders.MARGIN
    assert waits(0.0, chosen)[0] < 0.85 * waits(0.0, 64.0)[0]
    assert waits(0.9, chosen)[1] < 0.9 * waits(0.9, 0.0)[1]
