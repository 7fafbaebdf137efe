"""``weft bench``: test checkpoints and in-process workloads; HTTP load is in ``bench_load``."""

from __future__ import annotations

from typing import Any

import click

from weft.bench.workloads import WORKLOADS
from weft.cli import options
from weft.cli.bench import bench_load
from weft.cli.bench.bench_load import PRESETS
from weft.cli.result_file import check_result_file, json_option, write_json
from weft.common import log
from weft.common.errors import ConfigError
from weft.common.progress import progress_bar


@click.group()
def bench() -> None:
    """Measure speed and latency, of Weft or of any server with an OpenAI-compatible API."""


bench.add_command(bench_load.serve)
bench.add_command(bench_load.sweep)


@bench.command("make-checkpoint")
@click.argument("name", required=False)
@click.option("--out", metavar="DIR", type=click.Path(), help="Folder to write. Default: ./NAME.")
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the random weights."
)
@click.option("--list", "listing", is_flag=True, help="List the checkpoints that can be made.")
def make_checkpoint(name: str | None, out: str | None, seed: int, listing: bool) -> int:
    """Write the checkpoint NAME with random weights, in bfloat16 and Hugging Face's format.

    A complete folder stays unchanged.
    """
    from weft.bench import checkpoints

    if listing or name is None:
        if not listing:
            raise ConfigError("give the NAME of a checkpoint; --list shows all names")
        for recipe in checkpoints.RECIPES.values():
            click.echo(f"{recipe.name:<20}{recipe.about}")
        return 0
    click.echo(checkpoints.make(name, out or name, seed))
    return 0


@bench.command(cls=options.Command)
@click.argument("model_name", metavar="[MODEL]", required=False)
@click.option(
    "--workload",
    "names",
    multiple=True,
    type=click.Choice([name for name, one in WORKLOADS.items() if one.concurrency is None]),
    help=f"Workload to run; may be repeated. Default: all. {PRESETS}.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    help="Number of rounds per workload.",
)
@click.option(
    "--repetition", type=click.IntRange(0), default=0, show_default=True, help="Number of the first round."
)
@click.option(
    "--identical",
    type=click.IntRange(2, 1000),
    metavar="N",
    help="Run only the first --workload, N times, and count the requests with different tokens.",
)
@click.option("--alone", is_flag=True, help="With --identical: also run each request by itself and compare.")
@json_option()
@options.settings(options.ENGINE, ("log_level",))
def offline(
    model_name: str | None,
    names: tuple[str, ...],
    rounds: int,
    repetition: int,
    identical: int | None,
    alone: bool,
    json_file: str | None,
    **given: Any,
) -> int:
    """Run workloads on MODEL in this process and report the median round, load time and peak memory.

    Decoding is greedy. The prompts are token ids that depend only on workload and round, so other engines can
    run the same prompts.
    """
    if alone and identical is None:
        raise ConfigError("--alone requires --identical", param="--alone")
    check_result_file(json_file)
    config = options.build(given, model_name)
    log.configure(config.front.log_level)
    settings = options.keywords(config)
    from weft.bench import offline as run

    chosen = [WORKLOADS[name] for name in names] or [w for w in WORKLOADS.values() if w.concurrency is None]
    engine = run.Offline(settings)
    try:
        # Progress counts the warm-up run too.
        total = 1 + len(chosen) * rounds if identical is None else identical
        total += chosen[0].requests if alone else 0
        with progress_bar(total=total, title="bench", unit="run") as bar:

            def tick(done: str) -> None:
                bar.set_postfix_str(done, refresh=False)
                bar.update()

            size = engine.vocab_size
            if identical is None:
                found = run.measure(engine.generate, chosen, rounds, repetition, size, tick)
            else:
                found = run.identical(engine.generate, chosen[0], identical, alone, repetition, size, tick)
        report = run.report(engine, found, settings)
    finally:
        engine.close()
    for line in _offline_lines(report, identical is not None):
        click.echo(line)
    write_json(json_file, report)
    return 0


@bench.command("moe-table")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Device to measure. auto: the GPU if the machine has one.",
)
@click.option(
    "--threads", type=click.IntRange(1, 1024), help="CPU threads. Default: as many as the engine uses."
)
@json_option()
def moe_table(device: str, threads: int | None, json_file: str | None) -> int:
    """Measure the ways to compute routed experts in torch, and use the results from now on.

    The table is written to the user's cache folder, and has priority over Weft's own table. The table matters
    if neither the CPU extension nor --deterministic decides. The measurement takes a few minutes.
    """
    check_result_file(json_file)
    import torch

    from weft.bench import moe_table as run
    from weft.engine.cpu_threads import set_threads
    from weft.ops import moe_table as table

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch finds no CUDA device on this host: use --device cpu", param="--device")
    set_threads(threads)
    with progress_bar(total=run.cases(device), title="moe-table", unit="case") as bar:

        def tick(done: str) -> None:
            bar.set_postfix_str(done, refresh=False)
            bar.update()

        found = run.measure(device, tick)
    table.MEASUREMENTS.save(found)
    for line in run.summary(found):
        click.echo(line)
    click.echo(f"written to {table.MEASUREMENTS.user_file()}")
    write_json(json_file, table.MEASUREMENTS.as_json(found))
    return 0


@bench.command()
@click.option(
    "--ranks",
    multiple=True,
    type=click.IntRange(2, 64),
    help="Number of processes; may be repeated. Default: 2 and 4.",
)
@json_option()
def dispatch(ranks: tuple[int, ...], json_file: str | None) -> int:
    """Measure collectives between processes of the machine, and use the results for --moe-dispatch auto.

    The table is written to the user's cache folder, and has priority over Weft's own table. The measurement
    takes about a minute.
    """
    check_result_file(json_file)
    from weft.bench import dispatch_bench as run
    from weft.moe import exchange_cost

    chosen = ranks or (2, 4)
    found = [run.collectives(count) for count in progress_bar(chosen, title="dispatch", unit="group")]
    exchange_cost.MEASUREMENTS.save(found)
    for line in run.summary(found):
        click.echo(line)
    click.echo(f"written to {exchange_cost.MEASUREMENTS.user_file()}")
    write_json(json_file, exchange_cost.MEASUREMENTS.as_json(found))
    return 0


@bench.command()
@click.option(
    "--threads", type=click.IntRange(1, 1024), help="CPU threads. Default: as many as the engine uses."
)
@json_option()
def machine(threads: int | None, json_file: str | None) -> int:
    """Print what this machine can do, and what Weft's matrix products reach of it.

    The report has cores, NUMA nodes, huge pages, the speed of memory and of float32 products, and one
    product in each format with 1 and with 64 rows. The measurement takes about half a minute and 1
    GB of memory.
    """
    check_result_file(json_file)
    from weft.bench import machine_bench as run
    from weft.engine.cpu_threads import set_threads

    set_threads(threads)
    report = run.measure()
    for line in run.summary(report):
        click.echo(line)
    write_json(json_file, report)
    return 0


def _offline_lines(report: dict[str, Any], identical: bool) -> list[str]:
    """Return the report as lines for the terminal. ``identical``: the report counts equal runs."""
    from weft.bench.offline import headline

    lines = [
        f"{report['model']} {report['dtype']}: ready in {report['load_seconds']:.2f} s, "
        f"peak memory {report['peak_memory'] / 1e9:.2f} GB"
    ]
    found = report["workloads"]
    if identical:
        text = f"{found['workload']} run {found['runs']} times: "
        lines.append(text + f"{found['requests_that_differ']} of {found['requests']} requests differ")
        if "requests_that_differ_alone" in found:
            alone = found["requests_that_differ_alone"]
            lines.append(f"alone against batched: {alone} of {found['requests']} requests differ")
        return lines
    for name, one in found.items():
        rounds = ", ".join(f"{seconds:.2f}" for seconds in one["rounds"])
        lines.append(f"{name}  {headline(WORKLOADS[name], one):<22}{one['about']}; rounds of {rounds} s")
    return lines
