"""``weft sim agents``: benefit of retained session caches, on traffic like that of coding agents."""

from __future__ import annotations

import click

from weft.common.errors import ConfigError
from weft.common.progress import progress_bar
from weft.config.sections.all import SchedulerSection
from weft.sim.agents import AgentReport, Agents, AgentSimulation
from weft.sim.engine import kv_config
from weft.sim.presets import PRESETS, load


@click.command("agents")
@click.option(
    "--cost-model", "cost_name", default=next(iter(PRESETS)), show_default=True, metavar="NAME|FILE"
)
@click.option(
    "--speed",
    type=click.FloatRange(0, min_open=True),
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
    type=click.FloatRange(0, min_open=True),
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
    seed: int,
) -> int:
    """Simulate sessions of agents: 43 turns of 140,000 input and 400 output tokens, with pauses between
    turns.

    The scheduler and its prefix cache are the real ones. A cost model replaces the model and the machine.
    """
    agents = Agents(sessions=sessions, turns=turns, others=others, every=every, pause=pause)
    if kv_tokens < agents.longest:
        raise ConfigError(
            f"--kv-tokens {kv_tokens} does not hold one sequence of {agents.longest} tokens",
            param="--kv-tokens",
        )
    cost = load(cost_name).scaled(1 / speed)
    section = SchedulerSection(max_num_seqs=64, max_num_batched_tokens=8192, steps_in_flight=2)
    kv = kv_config(section, agents.longest, tokens=kv_tokens)
    reports = []
    for each in seconds:
        with progress_bar(title=f"simulating {each:g} s", unit="turn", leave=False) as bar:

            def show(done: int, total: int, now: float) -> None:
                bar.total, bar.n = total, done
                bar.update(0)

            simulation = AgentSimulation(kv, section, cost, agents, retention=each, seed=seed)
            simulation.run(progress=show)
        reports.append((each, simulation.agent_report()))
    click.echo(table(reports))
    return 0


def table(reports: list[tuple[float, AgentReport]]) -> str:
    """Return the reports as a table, one column per retention."""
    lines = [
        ["--session-retention", *(f"{each:g}" for each, _ in reports)],
        ["turns after the first", *(str(one.turns) for _, one in reports)],
        ["prompt tokens of a turn", *(f"{one.prompt_tokens:.0f}" for _, one in reports)],
        ["of them cached", *(f"{one.hit_rate:.1%}" for _, one in reports)],
        ["TTFT p50 / p99, s", *(f"{one.ttft.p50:.2f} / {one.ttft.p99:.2f}" for _, one in reports)],
        ["TTFT of other prompts", *(f"{o.other_ttft.p50:.2f} / {o.other_ttft.p99:.2f}" for _, o in reports)],
        ["total seconds", *(f"{one.seconds:.0f}" for _, one in reports)],
    ]
    # Titles are aligned left, numbers right.
    wide = max(len(line[0]) for line in lines)
    return "\n".join(
        "  ".join([line[0].ljust(wide), *(cell.rjust(16) for cell in line[1:])]).rstrip() for line in lines
    )
