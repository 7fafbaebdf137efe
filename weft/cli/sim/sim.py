"""``weft sim``: effect of settings on latency and throughput, before a deployment."""

from __future__ import annotations

import random
import shlex
from collections.abc import Sequence
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from weft.cli import options
from weft.cli.result_file import check_result_file, json_option, write_result
from weft.cli.sim.sim_agents import agents_command
from weft.cli.sim.sim_day import day_command
from weft.cli.sim.sim_options import POSITIVE, cost_model_option, noise_option, seed_option, workload_options
from weft.cli.sim.sim_plan import plan_command
from weft.common import log
from weft.common.errors import ConfigError
from weft.common.progress import progress_bar
from weft.config.flags import SETTINGS, suggest
from weft.config.resolved import KVConfig
from weft.config.sections.all import Config, SchedulerSection
from weft.config.sizing.budget import with_budget
from weft.scheduler.policy.step_cost import CostModel, StepShape
from weft.sim import Arrival, Report, simulate
from weft.sim.engine import kv_config
from weft.sim.presets import load
from weft.sim.workload import Lengths, background, burst, in_order, poisson, read_trace


class _Sim(options.Command, click.Group):
    """Group that simulates one scheduler if no subcommand is given."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, then the options."""
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)


@click.command(cls=_Sim, invoke_without_command=True, subcommand_metavar="[plan|agents] ...")
@cost_model_option()
@click.option(
    "--requests", type=click.IntRange(1), default=100, show_default=True, help="Number of requests."
)
@click.option(
    "--rate", type=POSITIVE, help="Requests per second (Poisson). Default: all requests arrive at once."
)
@workload_options("512", "64")
@click.option(
    "--background",
    "running",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Background sequences that decode all the time. The table shows the effect of the requests on them.",
)
@click.option(
    "--background-tokens",
    type=click.IntRange(2),
    default=256,
    show_default=True,
    help="Output tokens per background sequence. Then a new background sequence starts.",
)
@click.option(
    "--kv-tokens",
    type=click.IntRange(1),
    help="Tokens that fit into the KV cache. Default: enough for all requests.",
)
@noise_option
@click.option(
    "--host-ms",
    type=click.FloatRange(0),
    default=0.0,
    help="Milliseconds of CPU time to plan a step. --steps-in-flight 2 hides the time.",
)
@click.option(
    "--acceptance",
    type=click.FloatRange(0, 1),
    default=0.7,
    show_default=True,
    help="With --speculative-method: probability that a draft is accepted if all earlier drafts of the "
    "step were.",
)
@click.option("--seconds", type=POSITIVE, help="Stop the run after this many virtual seconds.")
@seed_option
@click.option(
    "--vs",
    "others",
    multiple=True,
    metavar='"FLAG=VALUE ..."',
    help='Another run with these flags changed, e.g. --vs "itl-target-ms=40"; may be repeated.',
)
@json_option("Write all numbers to this file.")
@options.settings(
    ("scheduler", "speculation"), ("max_model_len", "block_size", "enable_prefix_caching", "log_level")
)
def sim(cost_name: str, others: tuple[str, ...], json_file: str | None, **given: Any) -> int:
    """Simulate the scheduler on virtual time: the effect of flags on latency and throughput.

    The scheduler is the real scheduler. A cost model replaces the model and the machine, and limits the
    accuracy: compare rows with each other, and measure before promises.

    The command plan simulates several groups. Faults: make simulate, in a checkout of the repository.
    """
    context = click.get_current_context()
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return 0
    config = _build(given)
    log.configure(config.front.log_level)
    check_result_file(json_file)
    cost = load(cost_name)
    arrivals = _arrivals(given, cost)
    # Check every run before the first simulation starts.
    runs = [("as given", config)]
    runs += [(text, _build({**given, **overrides(text)})) for text in others]
    prepared = [(name, one, _kv(one, arrivals, given["kv_tokens"])) for name, one in runs]
    reports = []
    for name, one, kv in prepared:
        reports.append((name, one, _run(name, one, kv, cost, arrivals, given)))
    click.echo(f"cost model: {cost.about or cost_name}")
    click.echo(table([(name, report) for name, _, report in reports]))
    if json_file is not None:
        found = [
            {"name": name, "scheduler": one.scheduler, "report": report} for name, one, report in reports
        ]
        data = msgspec.json.encode({"cost_model": cost.about or cost_name, "runs": found})
        write_result(json_file, msgspec.json.format(data, indent=2))
    return 0


def _refuse_options(context: click.Context) -> None:
    """Raise UsageError for options in front of a subcommand: each subcommand has its own options."""
    for name in context.params:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flag = "--" + name.replace("_", "-")
            raise click.UsageError(
                f"{flag} is not an option of weft sim {context.invoked_subcommand}", context
            )


def _build(given: dict[str, Any]) -> Config:
    """Return the configuration of a run. The default token budget is that of a GPU."""
    config = options.build(given)
    scheduler = with_budget(config.scheduler, "cuda", config.speculation.drafts)
    return msgspec.structs.replace(config, scheduler=scheduler)


def overrides(text: str) -> dict[str, Any]:
    """Return field name to parsed value of ``flag=value flag=value``.

    Raise ConfigError for an empty text, another form, or a flag without effect on the simulation.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--vs {text[:60]!r}: {error}", param="--vs") from error
    if not words:
        raise ConfigError("--vs is empty: give flags such as itl-target-ms=40", param="--vs")
    result: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        name = key.lstrip("-").replace("-", "_")
        if not equals:
            raise ConfigError(f"--vs takes FLAG=VALUE, not {word[:40]!r}", param="--vs")
        # Only flags that the simulation uses.
        known = [s.key for s in SETTINGS.values() if s.section in ("scheduler", "speculation")]
        if name not in SETTINGS or SETTINGS[name].key not in known:
            near = suggest(name.replace("_", "-"), known)
            raise ConfigError(f"--vs: {key!r} is not a flag of the scheduler.{near}", param="--vs")
        result[name] = SETTINGS[name].parse(value)
    return result


def _arrivals(given: dict[str, Any], cost: CostModel) -> list[Arrival]:
    """Return the workload: background sequences from the start, requests after a quiet period.

    The quiet period measures the background sequences alone.
    """
    rng = random.Random(given["workload_seed"])
    prompt = Lengths.parse(given["prompt_tokens"], "--prompt-tokens")
    output = Lengths.parse(given["output_tokens"], "--output-tokens")
    running = given["running"]
    tokens = given["background_tokens"]
    step = StepShape(decode_rows=running, decode_tokens=running, decode_pairs=running * tokens // 2)
    # Twice the lifetime of a background sequence, so that each is replaced at least once.
    quiet = 2 * tokens * cost.predict(step) if running else 0.0
    if given["trace_file"] is not None:
        traced = read_trace(given["trace_file"])
        requests = [Arrival(one.at + quiet, one.prompt, one.output) for one in traced]
    elif given["rate"] is not None:
        requests = poisson(given["requests"], given["rate"], prompt, output, rng, quiet)
    else:
        requests = burst(given["requests"], prompt, output, rng, quiet)
    return in_order([*background(running, 1, tokens, rng), *requests])


def _kv(config: Config, arrivals: Sequence[Arrival], tokens: int | None) -> KVConfig:
    """Return the cache: as set, or large enough for the workload.

    Raise ConfigError for a cache that is too small.
    """
    longest = max(one.prompt + max(one.output, one.restart_output) for one in arrivals)
    asked = config.model.max_model_len
    length = asked if isinstance(asked, int) else longest
    cache = config.cache
    blocks = -(-length // cache.block_size)
    # The scheduler refuses a sequence that can never fit.
    if tokens is not None and tokens < blocks * cache.block_size:
        raise ConfigError(
            f"--kv-tokens {tokens} does not hold one sequence of {length} tokens (prompt and output): "
            f"set --kv-tokens to at least {blocks * cache.block_size}, or lower --max-model-len and use "
            "shorter requests",
            param="--kv-tokens",
        )
    return kv_config(
        config.scheduler,
        length,
        tokens=tokens or 0,
        block_size=cache.block_size,
        caching=cache.enable_prefix_caching,
        drafts=config.speculation.drafts,
    )


def _run(
    name: str,
    config: Config,
    kv: KVConfig,
    cost: CostModel,
    arrivals: Sequence[Arrival],
    given: dict[str, Any],
) -> Report:
    """Simulate one configuration, with a progress bar, and return the report."""
    section: SchedulerSection = config.scheduler
    with progress_bar(title=f"simulating {name}"[:40], unit="request", delay=1.0, leave=False) as bar:

        def show(done: int, total: int, now: float) -> None:
            bar.total = total
            bar.n = done
            bar.set_postfix_str(f"{now:.1f} s simulated", refresh=False)
            bar.update(0)

        return simulate(
            kv,
            section,
            cost,
            arrivals,
            most_seconds=given["seconds"] or float("inf"),
            progress=show,
            seed=given["workload_seed"],
            noise=given["noise"],
            host=given["host_ms"] / 1e3,
            shared=given["shared_prefix"],
            speculation=config.speculation,
            acceptance=given["acceptance"],
        )


def table(rows: Sequence[tuple[str, Report]]) -> str:
    """Return reports as a table, one column per report. Times are in milliseconds unless stated otherwise."""

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.1f}"

    lines: list[list[str]] = [["", *(name for name, _ in rows)]]

    def line(title: str, cells: Sequence[str]) -> None:
        lines.append([title, *cells])

    reports = [report for _, report in rows]
    line("requests done / refused", [f"{r.done} / {r.refused}" for r in reports])
    line("seconds", [f"{r.seconds:.2f}" for r in reports])
    line("TTFT p50 / p99, ms", [f"{ms(r.ttft.p50)} / {ms(r.ttft.p99)}" for r in reports])
    line("ITL p50 / p99, ms", [f"{ms(r.itl.p50)} / {ms(r.itl.p99)}" for r in reports])
    if any(r.background_itl.count for r in reports):
        # ITL of the background sequences before the first request, and during requests.
        quiet = [r.quiet_itl for r in reports]
        busy = [r.background_itl for r in reports]
        line("background alone, ITL p50 / p99, ms", [f"{ms(q.p50)} / {ms(q.p99)}" for q in quiet])
        line("background beside requests, ms", [f"{ms(b.p50)} / {ms(b.p99)}" for b in busy])
        ratios = [f"{b.p99 / q.p50:.1f}" if q.p50 else "-" for b, q in zip(busy, quiet, strict=True)]
        line("p99 beside / p50 alone", ratios)
    line("prompt tok/s", [f"{r.prompt_rate:.0f}" for r in reports])
    line("output tok/s", [f"{r.output_rate:.0f}" for r in reports])
    line("steps, of them mixed", [f"{r.steps}, {r.mixed_steps}" for r in reports])
    if any(r.drafts for r in reports):
        line("drafts accepted", [f"{r.drafts_accepted} of {r.drafts}" for r in reports])
    line("preemptions", [str(r.preemptions) for r in reports])
    line("device busy", [f"{r.device_share:.0%}" for r in reports])
    widths = [max(len(one[i]) for one in lines) for i in range(len(rows) + 1)]
    return "\n".join(
        "  ".join([one[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(one[1:], widths[1:], strict=True))])
        for one in lines
    )


def _moved(name: str) -> click.Command:
    """Return a hidden command that names the new place of a former command."""

    @click.command(
        name, hidden=True, add_help_option=False, context_settings={"ignore_unknown_options": True}
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(arguments: tuple[str, ...]) -> None:
        raise click.UsageError(
            f"weft sim {name} is no command any more: run make simulate, or python -m testing.cluster, "
            "in a checkout of the repository"
        )

    return command


sim.add_command(agents_command)
sim.add_command(plan_command)
sim.add_command(day_command)
sim.add_command(_moved("explore"))
sim.add_command(_moved("replay"))
