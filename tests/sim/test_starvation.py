"""B7: 100 long prompts against 32 running decodes, on the real scheduler and virtual time."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

import pytest

from tests.sim.shapes import shape
from tests.support.slow import mostly_slow
from weft.config.sections.all import SchedulerSection
from weft.sim import Arrival, Report, simulate
from weft.sim.engine import kv_config
from weft.sim.presets import load
from weft.sim.workload import Lengths, background, burst, in_order

DECODES, PROMPTS = 32, 100
COST = load("spool-text-cpu")


def alone() -> float:
    """Seconds of a typical step of the decodes alone."""
    return COST.predict(shape(decode=[128] * DECODES))


@functools.cache
def starve(depth: int, prompts: int = PROMPTS, **fields: object) -> Report:
    """Decodes for 300 steps alone, then all prompts at once."""
    fields.setdefault("max_num_batched_tokens", 2048)
    section = SchedulerSection(max_num_seqs=64, steps_in_flight=depth, **fields)  # type: ignore[arg-type]
    rng = random.Random(11)
    arrivals: list[Arrival] = [
        *background(DECODES, 16, 256, rng),
        *burst(prompts, Lengths(1000, 2000), Lengths(16, 16), rng, at=600 * alone()),
    ]
    return simulate(kv_config(section, 2048), section, COST, in_order(arrivals), noise=0.05, seed=1)


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, Report]]:
    """Printed when the module is done: pytest -s tests/sim/test_starvation.py."""
    found: dict[str, Report] = {}
    yield found
    print(f"\n{'':24}{'alone p50':>10}{'p99':>8}{'beside p50':>12}{'p99':>9}{'prompt tok/s':>14}")
    for name, r in sorted(found.items()):
        times = (r.quiet_itl.p50, r.quiet_itl.p99, r.background_itl.p50, r.background_itl.p99)
        a, b, c, d = (1e3 * seconds for seconds in times)
        print(f"{name:24}{a:10.1f}{b:8.1f}{c:12.1f}{d:9.1f}{r.prompt_rate:14.0f}")


@pytest.mark.requirement("B7")
@mostly_slow("depth", [1, 2], [2])
def test_long_prompts_leave_decodes_within_twice_their_time(depth: int, table: dict[str, Report]) -> None:
    """The p99 beside prompts is compared with the *median* alone, which is stricter than with the p99 alone.

    The policy starts from its prior and learns the machine in the run.
    """
    report = starve(depth, itl_target_ms=1.6e3 * alone())
    table[f"depth {depth}, target"] = report
    assert report.done == PROMPTS
    assert report.mixed_steps > 500
    assert report.background_itl.p99 <= 2 * report.quiet_itl.p50
    assert report.background_itl.p99 <= 2 * report.quiet_itl.p99
    free = table[f"depth {depth}, no target"] = starve(depth)
    assert free.background_itl.p99 > 5 * free.quiet_itl.p50
    assert report.prompt_rate > 0.25 * free.prompt_rate


@pytest.mark.requirement("B7")
@mostly_slow("depth", [1, 2], [2])
def test_exclusive_steps_starve_decodes(depth: int, table: dict[str, Report]) -> None:
    report = table[f"depth {depth}, exclusive"] = starve(depth, step_policy="exclusive")
    mixed = starve(depth, itl_target_ms=1.6e3 * alone())
    assert report.done == PROMPTS
    assert report.mixed_steps == 0
    assert report.background_itl.p99 >= 5 * report.quiet_itl.p99
    assert report.background_itl.p99 >= 5 * mixed.background_itl.p99


@pytest.mark.slow
def test_prompts_go_on_when_the_target_cannot_be_met() -> None:
    """A target below the time of decodes alone: the minimum chunk applies, and every prompt is done."""
    report = starve(2, 20, itl_target_ms=0.5e3 * alone())
    assert report.done == 20
    assert report.prompt_rate > 0
    assert report.background_itl.p99 <= 2 * report.quiet_itl.p50
