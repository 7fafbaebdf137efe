"""``weft sim plan``: number and roles of the groups that a load needs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import click
import msgspec

from weft.cli.result_file import check_result_file, json_option, write_result
from weft.cli.sim.sim_options import (
    POSITIVE,
    cost_model_option,
    limit_options,
    noise_option,
    seed_option,
    workload_options,
)
from weft.common.errors import ConfigError
from weft.common.progress import progress_bar
from weft.config.flags import parse_size
from weft.config.sections.all import SchedulerSection
from weft.config.sizing.budget import with_budget
from weft.control.fleet.policy import DEFAULT_BLOCK
from weft.scheduler.policy.step_cost import CostModel
from weft.sim.deployment import Deployment, Groups, SimulatedOutcome
from weft.sim.engine import kv_config
from weft.sim.images import ImageCosts
from weft.sim.presets import load
from weft.sim.simulated_transfers import Wire
from weft.sim.workload import Arrival, Lengths, poisson, read_trace

_COUNT = click.IntRange(1)


@click.command("plan")
@cost_model_option("a group's steps")
@click.option(
    "--most-groups", type=_COUNT, default=4, show_default=True, help="Maximum number of groups to try."
)
@click.option("--requests", type=_COUNT, default=300, show_default=True, help="Number of requests.")
@click.option("--rate", type=POSITIVE, default=4.0, show_default=True, help="Requests per second (Poisson).")
@workload_options("1000-2000", "64-128")
@limit_options(1000.0, 40.0)
@click.option(
    "--goal",
    type=click.FloatRange(0, 1),
    default=0.95,
    show_default=True,
    help="Share of requests that should meet both limits.",
)
@click.option(
    "--max-num-seqs", type=_COUNT, default=64, show_default=True, help="Maximum running sequences per group."
)
@click.option(
    "--max-num-batched-tokens", type=_COUNT, help="Maximum tokens per step. Default: the default on a GPU."
)
@click.option(
    "--itl-target-ms",
    type=POSITIVE,
    help="Target for the time between two tokens in each group (see weft serve --help).",
)
@click.option(
    "--kv-tokens",
    type=_COUNT,
    help="Tokens that fit into the KV cache of a group. Default: enough for all requests.",
)
@click.option(
    "--position-bytes",
    default="12K",
    show_default=True,
    metavar="SIZE",
    help="Bytes of KV cache per token, all layers together.",
)
@click.option(
    "--bandwidth",
    default="2G",
    show_default=True,
    metavar="SIZE",
    help="Bytes per second that each group can send.",
)
@click.option(
    "--images", type=click.IntRange(0, 256), default=0, show_default=True, help="Images per request."
)
@click.option(
    "--image-tokens",
    type=click.IntRange(1, 1 << 16),
    default=256,
    show_default=True,
    help="Tokens per image, in addition to --prompt-tokens. Each token stands for four patches.",
)
@click.option(
    "--image-repeats",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Share of repeated images.",
)
@click.option(
    "--patch-us",
    type=POSITIVE,
    default=390.0,
    show_default=True,
    help="Microseconds to encode a patch. The default is for a vision tower of 12 layers of width 384 "
    "on one core.",
)
@click.option(
    "--row-bytes",
    default="6K",
    show_default=True,
    metavar="SIZE",
    help="Bytes of an image's embedding per token.",
)
@noise_option
@seed_option
@json_option("Write all numbers to this file.")
def plan_command(json_file: str | None, **given: Any) -> int:
    """Find out how many groups of which role a load needs.

    Simulates an API server with 1 to --most-groups equal groups: all unified, and every division into prefill
    and decode groups; with --images also with encode groups. The fleet and the schedulers are the real ones.
    A cost model replaces the model and the machine, and a bandwidth replaces the transport. Shows the share
    of requests within both limits for each deployment.
    """
    check_result_file(json_file)
    cost = load(given["cost_name"])
    arrivals = _arrivals(given)
    section = _section(given, len(arrivals))
    tried = list(divisions(given["most_groups"], given["images"] > 0))
    outcomes = []
    with progress_bar(title="simulating", unit="deployment", total=len(tried), leave=False) as bar:
        for groups in tried:
            outcomes.append(_run(groups, section, arrivals, cost, given))
            bar.update(1)
    click.echo(f"cost model of a group: {cost.about or given['cost_name']}")
    click.echo(table(outcomes))
    click.echo(advice(outcomes, given["goal"]))
    if json_file is not None:
        data = msgspec.json.encode({"cost_model": cost.about or given["cost_name"], "runs": outcomes})
        write_result(json_file, msgspec.json.format(data, indent=2))
    return 0


def divisions(most: int, images: bool = False) -> Iterator[Groups]:
    """Yield all deployments of 1 to ``most`` groups: unified groups only, and all prefill and decode pairs.

    With ``images``, also yield each deployment with encode groups.
    """
    for number in range(1, most + 1):
        for encode in range(number if images else 1):
            # At least one group remains to make tokens.
            rest = number - encode
            yield Groups(unified=rest, encode=encode)
            for prefill in range(1, rest):
                yield Groups(prefill=prefill, decode=rest - prefill, encode=encode)


def table(outcomes: Sequence[SimulatedOutcome]) -> str:
    """Return a line per deployment. Times are in milliseconds."""
    head = ("groups", "met", "TTFT p50 / p99", "TPOT p50 / p99", "ITL p99", "output tok/s", "busy")
    lines = [head]
    for one in outcomes:
        busy = one.busy.values()
        lines.append(
            (
                str(one.groups),
                f"{one.good:.0%}",
                f"{one.ttft.p50 * 1e3:.0f} / {one.ttft.p99 * 1e3:.0f}",
                f"{one.tpot.p50 * 1e3:.1f} / {one.tpot.p99 * 1e3:.1f}",
                f"{one.itl.p99 * 1e3:.1f}",
                f"{one.output_rate:.0f}",
                " ".join(f"{share:.0%}" for share in busy),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def advice(outcomes: Sequence[SimulatedOutcome], goal: float) -> str:
    """Return a sentence that names the smallest deployment that reaches ``goal``, or the closest deployment
    if none does.

    Among equal sizes, more requests within limits win.
    """
    able = [one for one in outcomes if one.good >= goal]
    if not able:
        best = max(outcomes, key=lambda one: one.good)
        return (
            f"no deployment reaches {goal:.0%}; {best.groups} comes closest with {best.good:.0%}. Try a "
            "larger --most-groups"
        )
    fewest = min(sum(one.groups) for one in able)
    of_those = [one for one in able if sum(one.groups) == fewest]
    # Ties prefer unified groups, then a lower TPOT.
    best = max(of_those, key=lambda one: (one.good, one.groups.unified, -one.tpot.p99))
    return f"the smallest deployment that reaches {goal:.0%}: {best.groups}"


def _arrivals(given: dict[str, Any]) -> list[Arrival]:
    """Return the workload, with images."""
    return [replace(one, images=given["images"]) for one in _without_images(given)]


def _without_images(given: dict[str, Any]) -> list[Arrival]:
    """Return the workload without images: a trace, or Poisson arrivals."""
    if given["trace_file"] is not None:
        return read_trace(given["trace_file"])
    prompt = Lengths.parse(given["prompt_tokens"], "--prompt-tokens")
    output = Lengths.parse(given["output_tokens"], "--output-tokens")
    rng = random.Random(given["workload_seed"])
    return poisson(given["requests"], given["rate"], prompt, output, rng)


def _section(given: dict[str, Any], requests: int) -> SchedulerSection:
    """Return the scheduler settings of each group."""
    asked = SchedulerSection(
        max_num_seqs=given["max_num_seqs"],
        max_num_batched_tokens=given["max_num_batched_tokens"],
        itl_target_ms=given["itl_target_ms"] or 0.0,
        max_queued_requests=max(requests, 1),
    )
    return with_budget(asked, "cuda")


def _run(
    groups: Groups,
    section: SchedulerSection,
    arrivals: Sequence[Arrival],
    cost: CostModel,
    given: dict[str, Any],
) -> SimulatedOutcome:
    """Return the outcome of one simulated deployment.

    Raise ConfigError if the cache cannot hold one sequence.
    """
    images = given["images"] * given["image_tokens"]
    longest = max(one.prompt + one.output for one in arrivals) + images
    tokens = given["kv_tokens"] or 0
    # One block more, because a sequence need not end at a block border.
    if tokens and tokens < longest + DEFAULT_BLOCK:
        raise ConfigError(
            f"--kv-tokens {tokens} does not hold one sequence of {longest} tokens: set --kv-tokens to "
            f"at least {longest + DEFAULT_BLOCK}",
            param="--kv-tokens",
        )
    deployment = Deployment(
        groups,
        kv_config(section, longest, tokens=tokens),
        section,
        cost,
        arrivals,
        Wire(_size(given, "position_bytes"), _size(given, "bandwidth")),
        seed=given["workload_seed"],
        noise=given["noise"],
        shared=given["shared_prefix"],
        images=_images(given),
    )
    return deployment.run((given["ttft_ms"] / 1e3, given["tpot_ms"] / 1e3))


def _images(given: dict[str, Any]) -> ImageCosts | None:
    """Return the image costs, or None without images."""
    if not given["images"]:
        return None
    return ImageCosts(
        tokens=given["image_tokens"],
        patch_seconds=given["patch_us"] / 1e6,
        row_bytes=max(round(_size(given, "row_bytes")), 1),
        repeats=given["image_repeats"],
    )


def _size(given: dict[str, Any], name: str) -> float:
    """Return a size in bytes. Raise ConfigError unless the size is valid and positive."""
    try:
        size = parse_size(given[name])
    except (ConfigError, ValueError):
        size = None
    if not size or size <= 0:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} must be a size such as 12K or 2G", param=flag)
    return size
