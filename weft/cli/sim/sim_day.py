"""``weft sim day``: a day with changing load, with a planner and with fixed fleets of the same mean size."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import click

from weft.cli.result_file import check_result_file, json_option, write_result
from weft.cli.sim.sim_options import POSITIVE, cost_model_option, limit_options
from weft.control.planner.capacity import Limits
from weft.sim.day import DayParameters, Outcome, divisions_of, draw_day, encode
from weft.sim.deployment import Groups
from weft.sim.presets import load


@click.command("day")
@click.option(
    "--seed", "seeds", type=click.IntRange(0), multiple=True, default=(0,), show_default=True, help="The day."
)
@cost_model_option()
@click.option(
    "--slower",
    type=POSITIVE,
    default=12.0,
    show_default=True,
    help="Seconds of a step, relative to the cost model.",
)
@click.option(
    "--believed",
    type=POSITIVE,
    default=1.0,
    show_default=True,
    help="Seconds of a step in the planner's cost model, relative to the groups' steps.",
)
@click.option(
    "--rate", type=POSITIVE, default=0.8, show_default=True, help="Requests per second of the morning."
)
@limit_options(6000.0, 180.0)
@click.option(
    "--load-s", type=POSITIVE, default=30.0, show_default=True, help="Seconds until a new group serves."
)
@click.option("--max-groups", type=click.IntRange(2), default=8, show_default=True, help="Of each role.")
@click.option(
    "--shorter", type=POSITIVE, default=1.0, show_default=True, help="Divisor of the length of the day."
)
@click.option("--fixed/--no-fixed", default=True, help="Also play fixed fleets.")
@click.option("--log", "logged", is_flag=True, help="Print each change of the planner.")
@json_option("Write all outcomes to this file.")
def day_command(
    seeds: tuple[int, ...],
    cost_name: str,
    slower: float,
    believed: float,
    rate: float,
    ttft_ms: float,
    tpot_ms: float,
    load_s: float,
    max_groups: int,
    shorter: float,
    fixed: bool,
    logged: bool,
    json_file: str | None,
) -> int:
    """Play a day of half an hour: the load doubles, prompts and outputs change places, a host is lost.

    Each seed is one day. The planner of `weft plan` scales prefill and decode groups. Then fixed fleets of
    as many groups as the planner had on average, rounded up, play the same day: every division with two or
    more groups of each role. Counts the requests outside their limits.
    """
    check_result_file(json_file)
    logging.getLogger("weft").setLevel(logging.CRITICAL)  # losses of hosts are part of the day
    limits = Limits(ttft_ms / 1e3, tpot_ms / 1e3)
    cost = load(cost_name).scaled(slower)
    bench = DayParameters(cost, limits, most=max_groups, load_s=load_s, believed=believed)
    outcomes = []
    for seed in seeds:
        for outcome in _day(bench, seed, rate, shorter, fixed):
            outcomes.append(outcome)
            click.echo(line(seed, outcome))
            for text in outcome.log if logged else ():
                click.echo(f"    {text}")
    write_result(json_file, encode(outcomes))
    return 0


def _day(bench: DayParameters, seed: int, rate: float, shorter: float, fixed: bool) -> Iterator[Outcome]:
    """Yield the outcome of the planner, then of each fixed fleet of the same mean size."""
    day = draw_day(seed, rate, shorter)
    planned = bench.play(day, Groups(prefill=2, decode=2), planned=True, seed=seed)
    yield planned
    for groups in divisions_of(max(math.ceil(planned.size), 4)) if fixed else ():
        yield bench.play(day, groups, seed=seed)


def line(seed: int, one: Outcome) -> str:
    """Return the outcome as one line."""
    share = one.outside / max(one.requests, 1)
    return (
        f"day {seed:<6} {one.fleet:20} mean groups {one.size:4.1f} ({one.prefill:.1f} prefill, "
        f"{one.decode:.1f} decode)  outside {one.outside:5} of {one.requests} ({share:.1%}; TTFT "
        f"{one.ttft_outside}, TPOT {one.tpot_outside})  changes {one.changes}"
    )
