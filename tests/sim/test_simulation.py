"""The simulator: virtual time, determinism, workloads, and use of the real scheduler."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.sim.shapes import TRUTH, shape
from tests.support.slowness import deadline
from weft.common.clock import VirtualClock
from weft.common.errors import ConfigError
from weft.config.sections.all import SchedulerSection
from weft.scheduler import Scheduler
from weft.scheduler.policy.step_cost import NAMES, CostModel
from weft.sim import Arrival, Report, Simulation, simulate
from weft.sim.engine import kv_config
from weft.sim.presets import PRESETS, load
from weft.sim.workload import Lengths, Prompts, background, burst, in_order, poisson, read_trace

FLAT = CostModel.of({**dict.fromkeys(NAMES, 0.0), "step": 1.0})
"""Every step takes a second."""


def section(**fields: object) -> SchedulerSection:
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 256, **fields}
    return SchedulerSection(**values)  # type: ignore[arg-type]


def varied(seed: int, count: int = 40) -> list[Arrival]:
    rng = random.Random(seed)
    return poisson(count, 20.0, Lengths(1, 400), Lengths(1, 40), rng)


def run(
    arrivals: list[Arrival], cost: CostModel = TRUTH, *, tokens: int = 0, seed: int = 0, **fields: object
) -> Report:
    return simulate(
        kv_config(section(**fields), 512, tokens=tokens, block_size=16),
        section(**fields),
        cost,
        arrivals,
        seed=seed,
    )


def timeless(report: Report) -> Report:
    return msgspec.structs.replace(report, wall_seconds=0.0)


@pytest.mark.parametrize("depth", [1, 2])
def test_one_request_by_hand(depth: int) -> None:
    """300 prompt tokens in chunks of 256 and 44, which samples; then one token a step."""
    report = run([Arrival(5.0, 300, 4)], FLAT, steps_in_flight=depth)
    assert report.steps == 5
    assert report.seconds == 10.0
    assert report.ttft.p50 == 2.0
    assert report.itl.p50 == report.itl.p99 == 1.0
    assert (report.done, report.requests, report.refused) == (1, 1, 0)
    assert report.prompt_rate == 150.0
    assert report.device_share == pytest.approx(0.5)


@pytest.mark.parametrize("depth", [1, 2])
def test_planning_hides_behind_the_device_with_two_steps_in_flight(depth: int) -> None:
    sections = section(steps_in_flight=depth)
    made = simulate(kv_config(sections, 512), sections, FLAT, [Arrival(0.0, 10, 50)], host=0.25)
    assert made.itl.p50 == pytest.approx(1.25 if depth == 1 else 1.0)


def test_the_scheduler_is_the_one_that_serves() -> None:
    simulation = Simulation(kv_config(section(), 512), section(), FLAT, [Arrival(0.0, 1, 1)])
    assert type(simulation.scheduler) is Scheduler


@pytest.mark.parametrize("fields", [{}, {"itl_target_ms": 15.0}, {"step_policy": "exclusive"}])
def test_same_seed_same_run(fields: dict[str, object]) -> None:
    kv, sections, arrivals = kv_config(section(**fields), 512, block_size=16), section(**fields), varied(3)
    runs = [timeless(simulate(kv, sections, TRUTH, arrivals, seed=seed, noise=0.1)) for seed in (7, 7, 8)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_small_caches_preempt_and_everything_is_done() -> None:
    report = run(burst(12, Lengths(40, 80), Lengths(200, 300), random.Random(4)), tokens=640)
    assert report.preemptions > 0
    assert report.done == report.requests == 12


def test_the_queue_is_bounded() -> None:
    report = run(burst(40, Lengths(100, 100), Lengths(5, 5), random.Random(0)), max_queued_requests=4)
    assert report.refused == 40 - 8 - 4
    assert report.done == 12


def test_shared_prefixes_are_found() -> None:
    sections = section()
    kv = kv_config(sections, 512, block_size=16)
    arrivals = [Arrival(float(i), 200, 2) for i in range(5)]
    assert simulate(kv, sections, TRUTH, arrivals).prefix_hits == 0
    assert simulate(kv, sections, TRUTH, arrivals, shared=160).prefix_hits == 4 * 160


def test_background_sequences_go_on_until_the_requests_are_done() -> None:
    rng = random.Random(0)
    arrivals = [*background(4, 1, 20, rng), *burst(3, Lengths(400, 400), Lengths(2, 2), rng, at=40.0)]
    report = run(arrivals, FLAT)
    assert report.requests == report.done == 3
    assert report.quiet_itl.count > 50
    assert report.background_itl.count > 0
    assert report.output_rate > 3.5  # four streams, minus steps of new prompts


@pytest.mark.parametrize("queue", [100, 1])
def test_background_sequences_do_not_queue_behind_requests(queue: int) -> None:
    rng = random.Random(0)
    arrivals = [*background(2, 1, 5, rng), *burst(20, Lengths(1, 1), Lengths(50, 50), rng, at=10.0)]
    sections = section(max_num_seqs=4, max_queued_requests=queue)
    simulation = Simulation(kv_config(sections, 512), sections, FLAT, arrivals)
    report = simulation.run()
    assert bool(report.refused) == (queue == 1)
    made = sum(len(stream.times) for stream in simulation.streams if stream.arrival.background)
    assert made > 0.6 * 2 * report.seconds


def test_a_wait_that_ends_with_the_last_request_is_seen() -> None:
    """Exclusive steps, with prompts that make one token: decodes wait until all prompts are done."""
    arrivals = [
        *background(2, 1, 100, random.Random(0)),
        *burst(4, Lengths(400, 400), Lengths(1, 1), random.Random(0), at=20.0),
    ]
    report = run(arrivals, FLAT, step_policy="exclusive")
    assert report.background_itl.most > 4 * 400 / 256


def test_a_run_can_be_cut_off_and_one_without_end_is_refused() -> None:
    arrivals = background(2, 1, 10, random.Random(0))
    kv, sections = kv_config(section(), 512), section()
    assert simulate(kv, sections, FLAT, arrivals, most_seconds=30.0).seconds == pytest.approx(30.0, abs=2)
    with pytest.raises(ConfigError, match="for ever"):
        simulate(kv, sections, FLAT, arrivals)


def test_nothing_to_do_takes_no_time() -> None:
    report = run([])
    assert (report.seconds, report.requests, report.steps) == (0.0, 0, 0)


def test_requests_beyond_the_context_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="--max-model-len is 512"):
        run([Arrival(0.0, 500, 20)])


def test_progress_is_reported() -> None:
    heard: list[tuple[int, int, float]] = []
    kv, sections = kv_config(section(), 512), section()
    simulate(kv, sections, FLAT, varied(1), progress=lambda *told: heard.append(told))
    assert heard[-1][:2] == (40, 40)
    assert [one[2] for one in heard] == sorted(one[2] for one in heard)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_scheduler_observes_each_step_time_once(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At both depths the observed seconds of all steps add up to the device's."""
    sections = section(steps_in_flight=depth, itl_target_ms=50.0)
    simulation = Simulation(kv_config(sections, 512), sections, TRUTH, varied(2))
    seen: list[float] = []
    monkeypatch.setattr(simulation.scheduler, "observe", lambda plan, seconds: seen.append(seconds))
    simulation.run()
    assert sum(seen) == pytest.approx(simulation.device.busy)


def test_the_clock_only_goes_forward() -> None:
    clock = VirtualClock(3.0)
    clock.advance_to(2.0)
    assert clock.now() == 3.0
    clock.advance_to(4.5)
    assert clock.now() == 4.5


def test_poisson_arrivals_have_their_rate_and_a_seed() -> None:
    made = [poisson(4000, 8.0, Lengths(1, 9), Lengths(5, 5), random.Random(s), at=2.0) for s in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    assert made[0] == in_order(made[0])
    assert (made[0][-1].at - 2.0) / 4000 == pytest.approx(1 / 8, rel=0.1)
    assert {a.prompt for a in made[0]} == set(range(1, 10))
    assert {a.output for a in made[0]} == {5}


def test_prompts_share_what_they_should() -> None:
    prompts = Prompts(1000, 20, seed=1)
    a, b, short = prompts.make(50), prompts.make(50), prompts.make(7)
    assert (a[:20] == b[:20]).all()
    assert (a[20:] != b[20:]).any()
    assert (short == a[:7]).all()
    assert len(Prompts(1000, 0, seed=1).make(12)) == 12


@pytest.mark.parametrize("text", ["", "x", "-5", "5-", "0", "9-3", "1-2-3", "1.5", "٣"])
def test_wrong_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--prompt-tokens must be"):
        Lengths.parse(text, "--prompt-tokens")


def test_traces(tmp_path: Path) -> None:
    file = tmp_path / "day.jsonl"
    file.write_text(
        '{"at": 2, "prompt_tokens": 30, "output_tokens": 4}\n\n'
        '{"at": 0.5, "prompt_tokens": 3, "output_tokens": 1}\n'
    )
    assert read_trace(file) == [Arrival(0.5, 3, 1), Arrival(2.0, 30, 4)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("[]", "line 1"),
        ('{"at": 1, "prompt_tokens": 3}', "output_tokens"),
        (
            '{"at": 1, "prompt_tokens": 3, "output_tokens": 1}\n'
            '{"at": -1, "prompt_tokens": 1, "output_tokens": 1}',
            "line 2",
        ),
        ('{"at": 1, "prompt_tokens": 0, "output_tokens": 1}', "line 1"),
        ('{"at": 1, "prompt_tokens": 1, "output_tokens": 1, "x": 1}', "x"),
    ],
)
def test_wrong_traces_name_the_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "day.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_trace(file)
    with pytest.raises(ConfigError, match=r"gone\.jsonl"):
        read_trace(tmp_path / "gone.jsonl")


def test_presets_and_files(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    file.write_bytes(TRUTH.to_json())
    assert load(str(file)).coefficients == TRUTH.coefficients
    for name in PRESETS:
        assert load(name).about
        assert 1e-5 < load(name).predict(shape(decode=[100])) < 10
    with pytest.raises(ConfigError, match=r"--cost-model no-such.*spool-text-cpu"):
        load("no-such")


def test_no_torch() -> None:
    code = "import sys, weft.sim, weft.cli.sim.sim; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=deadline(60)).returncode == 0


def test_drafts_make_steps_fewer_where_they_are_right() -> None:
    """All steps cost the same, so tokens per second grow with the accepted drafts."""
    sections, arrivals = section(), [Arrival(0.0, 10, 200) for _ in range(4)]
    rates = []
    for drafts, acceptance in ((0, 0.0), (3, 0.0), (3, 0.6), (3, 1.0)):
        kv = kv_config(sections, 512, drafts=drafts)
        report = simulate(kv, sections, FLAT, arrivals, acceptance=acceptance)
        assert report.drafts_accepted <= report.drafts
        assert bool(report.drafts) == bool(drafts)
        rates.append(report.output_rate)
    off, wrong, some, right = rates
    assert wrong >= 0.97 * off
    assert 1.7 * off < some < 2.3 * off
    assert right > 3.4 * off
