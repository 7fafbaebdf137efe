"""``weft sim agents``: benefit of retained session caches, on traffic like that of coding agents."""

from __future__ import annotations

import itertools

import click

from weft.cli.sim.sim_options import POSITIVE, cost_model_option
from weft.common.errors import ConfigError
from weft.common.progress import progress_bar
from weft.config.flags import parse_size
from weft.config.sections.all import SchedulerSection
from weft.sim.agents import AgentReport, Agents, AgentSimulation
from weft.sim.engine import kv_config
from weft.sim.presets import load
from weft.sim.simulated_store import StoreCosts
from weft.types.tiers import LEVELS

_OUTCOMES = {
    "loads, whole": ("done",),
    "loads, in part": ("cut", "late", "gone", "evicted"),
    "loads not begun": ("slower",),
}
"""Row of the table -> outcomes of loads (weft.scheduler.loads)."""


@click.command("agents")
@cost_model_option()
@click.option(
    "--speed",
    type=POSITIVE,
    default=1000.0,
    show_default=True,
    help="Speed of the machine, relative to the machine of the cost model.",
)
@click.option("--sessions", type=click.IntRange(1), default=6, show_default=True)
@click.option("--turns", type=click.IntRange(2), default=43, show_default=True, help="Turns per session.")
@click.option(
    "--others",
    type=click.IntRange(0),
    default=1700,
    show_default=True,
    help="Number of prompts of 20,000 tokens outside of sessions.",
)
@click.option(
    "--every",
    type=POSITIVE,
    default=2.0,
    show_default=True,
    help="Mean seconds between two prompts outside of sessions.",
)
@click.option(
    "--pause",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help="Mean seconds of four out of five pauses between turns. The mean of the others is 2.5 times "
    "as long.",
)
@click.option(
    "--kv-tokens",
    type=click.IntRange(1),
    default=1_600_000,
    show_default=True,
    help="Tokens that fit into the KV cache.",
)
@click.option(
    "--retention",
    "seconds",
    type=click.FloatRange(0),
    default=(0.0, 300.0),
    multiple=True,
    show_default=True,
    help="Value of --session-retention; may be repeated. The table has one column per value.",
)
@click.option(
    "--kv-host",
    "host",
    metavar="SIZE",
    help="Bytes of host memory of a KV tier. Each level adds a column to each value of --retention.",
)
@click.option("--kv-disk", "disk", metavar="SIZE", help="Bytes of the disk of a KV tier.")
@click.option("--kv-remote", "remote", metavar="SIZE", help="Bytes of the object store of a KV tier.")
@click.option(
    "--kv-host-bandwidth",
    "host_bandwidth",
    default="20G",
    show_default=True,
    metavar="SIZE",
    help="Bytes per second between host memory and the cache.",
)
@click.option(
    "--kv-disk-bandwidth",
    "bandwidth",
    default="2G",
    show_default=True,
    metavar="SIZE",
    help="Bytes per second of the disk.",
)
@click.option(
    "--kv-remote-bandwidth",
    "remote_bandwidth",
    default="200M",
    show_default=True,
    metavar="SIZE",
    help="Bytes per second of the object store. Each request takes 30 ms more.",
)
@click.option(
    "--kv-token-bytes",
    "token_bytes",
    type=click.IntRange(4),
    default=32_768,
    show_default=True,
    help="Bytes of one token in the KV cache. Matters to the KV tier alone.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def agents_command(
    cost_name: str,
    speed: float,
    sessions: int,
    turns: int,
    others: int,
    every: float,
    pause: float,
    kv_tokens: int,
    seconds: tuple[float, ...],
    host: str | None,
    disk: str | None,
    remote: str | None,
    host_bandwidth: str,
    bandwidth: str,
    remote_bandwidth: str,
    token_bytes: int,
    seed: int,
) -> int:
    """Simulate sessions of agents: 43 turns of 140,000 input and 400 output tokens, with pauses between
    turns.

    The scheduler and its prefix cache are the real ones. A cost model replaces the model and the machine.
    """
    agents = Agents(sessions=sessions, turns=turns, others=others, every=every, pause=pause)
    if kv_tokens < agents.longest:
        raise ConfigError(
            f"--kv-tokens {kv_tokens} does not hold one sequence of {agents.longest} tokens: set --kv-tokens "
            f"to at least {agents.longest}",
            param="--kv-tokens",
        )
    cost = load(cost_name).scaled(1 / speed)
    section = SchedulerSection(max_num_seqs=64, max_num_batched_tokens=8192, steps_in_flight=2)
    kv = kv_config(section, agents.longest, tokens=kv_tokens, token_bytes=token_bytes)
    given = (
        ("host", host, host_bandwidth, 1e-4),
        ("disk", disk, bandwidth, 1e-3),
        ("remote", remote, remote_bandwidth, 0.03),
    )
    levels = [
        StoreCosts(_size(size, f"--kv-{level}"), _size(rate, f"--kv-{level}-bandwidth"), latency, level=level)
        for level, size, rate, latency in given
        if size is not None
    ]
    tiers = [levels[:count] for count in range(len(levels) + 1)]
    reports = []
    for each, tier in itertools.product(seconds, tiers):
        with progress_bar(title=f"simulating {each:g} s", unit="turn", leave=False) as bar:

            def show(done: int, total: int, now: float) -> None:
                bar.total, bar.n = total, done
                bar.update(0)

            simulation = AgentSimulation(kv, section, cost, agents, retention=each, seed=seed, levels=tier)
            simulation.run(progress=show)
        reports.append((each, "+".join(one.level for one in tier), simulation.agent_report()))
    click.echo(table(reports))
    return 0


def _size(text: str, flag: str) -> int:
    """Return the bytes of a size. Raise ConfigError that names ``flag``."""
    size = parse_size(text)
    if size is None:
        raise ConfigError(f"{flag} {text!r} is not a size: write 512M, 20G or a number of bytes", param=flag)
    return size


def table(reports: list[tuple[float, str, AgentReport]]) -> str:
    """Return the reports as a table, one column per retention and tier ("" without a tier)."""
    lines = [
        ["--session-retention", *(f"{each:g}" for each, _, _ in reports)],
        ["turns after the first", *(str(one.turns) for _, _, one in reports)],
        ["prompt tokens of a turn", *(f"{one.prompt_tokens:.0f}" for _, _, one in reports)],
        ["of them cached", *(f"{one.hit_rate:.1%}" for _, _, one in reports)],
        ["TTFT p50 / p99, s", *(f"{one.ttft.p50:.2f} / {one.ttft.p99:.2f}" for _, _, one in reports)],
        [
            "TTFT of other prompts",
            *(f"{one.other_ttft.p50:.2f} / {one.other_ttft.p99:.2f}" for _, _, one in reports),
        ],
        ["total seconds", *(f"{one.seconds:.0f}" for _, _, one in reports)],
    ]
    if any(tier for _, tier, _ in reports):
        lines.insert(1, ["KV tier", *(tier or "none" for _, tier, _ in reports)])
        for level in [one for one in LEVELS if any(one in report.loaded for _, _, report in reports)]:
            shares = [f"{report.loaded.get(level, 0):.1%}" for _, _, report in reports]
            lines.insert(-3, [f"loaded from {level}", *shares])
        for name, outcomes in _OUTCOMES.items():
            counts = [sum(one.loads.get(outcome, 0) for outcome in outcomes) for _, _, one in reports]
            lines.append([name, *map(str, counts)])
    # Titles are aligned left, numbers right.
    wide = max(len(line[0]) for line in lines)
    return "\n".join(
        "  ".join([line[0].ljust(wide), *(cell.rjust(16) for cell in line[1:])]).rstrip() for line in lines
    )
