"""``weft bench serve`` and ``weft bench sweep``: load over HTTP."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weft.bench.workloads import WORKLOADS
from weft.cli import options
from weft.cli.result_file import check_result_file, json_option, write_json
from weft.common.errors import ConfigError
from weft.config.flags import SETTINGS
from weft.config.sections.all import Config

if TYPE_CHECKING:
    from weft.bench.serving_bench import RunSettings
    from weft.bench.sweep import Sweep

PRESETS = "; ".join(f"{one.name}: {one.about}" for one in WORKLOADS.values())
_plot_option = click.option(
    "--plot",
    "plot_file",
    type=click.Path(dir_okay=False),
    help="Write a plot (PNG) to this file; requires matplotlib.",
)


def _check_positive(given: dict[str, Any], *names: str) -> None:
    """Raise ConfigError unless all named values are positive or unset."""
    for name in names:
        value = given[name]
        if value is not None and not value > 0:
            raise ConfigError(f"{_flag(name)} must be above 0, not {value}", param=_flag(name))


def _flag(name: str) -> str:
    """Return the flag of a parameter name."""
    return "--" + name.replace("_", "-")


server_options = options.joined(
    click.option("--base-url", help="URL of the server, with or without /v1."),
    click.option(
        "--model-name",
        "served",
        help="Model name in requests. Default: the first model that the server lists.",
    ),
    click.option(
        "--endpoint",
        type=click.Choice(["completions", "chat"]),
        default="completions",
        show_default=True,
        help="completions: token ids if the server accepts them, else text. chat: text.",
    ),
    click.option(
        "--prompts",
        type=click.Choice(["auto", "ids", "text"]),
        default="auto",
        show_default=True,
        help="Form of prompts. auto: token ids if the server accepts them, else text with the "
        "same number of tokens by the server's count.",
    ),
    click.option(
        "--vocab-size",
        type=click.IntRange(64),
        default=16_384,
        show_default=True,
        help="Random ids are drawn from the middle of a vocabulary of this size.",
    ),
    click.option("--key", metavar="KEY", help="API key of the server."),
    click.option(
        "--ignore-eos/--no-ignore-eos",
        default=True,
        show_default=True,
        help="Ignore end-of-sequence tokens, so that outputs have fixed lengths.",
    ),
    click.option("--extra-body", metavar="JSON", help="Additional fields for every request."),
    click.option(
        "--repetition",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        help="Seed of prompts, lengths and times. A new seed avoids hits in prefix caches.",
    ),
)
"""Flags for the choice of a server and the form of requests."""


@click.command()
@server_options
@click.option("--workload", type=click.Choice(list(WORKLOADS)), help=f"Preset of requests. {PRESETS}.")
@click.option(
    "--dataset",
    default="random",
    show_default=True,
    help="Source of requests: random, or a trace file (JSONL).",
)
@click.option(
    "--trace-speed",
    type=float,
    default=1.0,
    show_default=True,
    help="Speed of the trace; 2 is twice as fast.",
)
@click.option("--request-rate", type=float, help="Mean requests per second, at random times.")
@click.option(
    "--burstiness",
    type=float,
    default=1.0,
    show_default=True,
    help="Shape of the gamma distribution of gaps. 1: Poisson. Below 1: bursts. inf: equal gaps.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 65536),
    help="Concurrent requests. Default without a rate or a trace: 8.",
)
@click.option(
    "--num-requests",
    type=click.IntRange(1),
    help="Number of requests. Default: 32 without --duration; all requests of a trace.",
)
@click.option(
    "--duration", type=float, help="Seconds during which requests are sent. Running requests may finish."
)
@click.option("--input-len", default="256", show_default=True, help="Prompt tokens: N, or LOW:HIGH.")
@click.option("--output-len", default="64", show_default=True, help="Output tokens: N, or LOW:HIGH.")
@click.option(
    "--warmup",
    type=click.IntRange(0, 10_000),
    default=4,
    show_default=True,
    help="Number of warm-up requests, which are not counted.",
)
@click.option(
    "--keep-alive/--no-keep-alive",
    default=True,
    show_default=True,
    help="Reuse connections. Requests can fail if the server closes idle connections.",
)
@click.option(
    "--goodput", multiple=True, help="Latency limits in ms, e.g. ttft:500 or ttft:500,tpot:50,e2el:9000."
)
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Maximum seconds per request.")
@json_option()
@_plot_option
def serve(json_file: str | None, plot_file: str | None, **given: Any) -> int:
    """Send load to the server at --base-url and report latency and throughput.

    The load is a closed loop (--concurrency) or an open loop (--request-rate, or a trace). TTFT, TPOT, ITL
    (between chunks) and E2EL cover successful requests; failures are counted by kind. The status is 1 if no
    request succeeded, and 130 after Ctrl-C, which reports the results so far.
    """
    from weft.bench import plots, report, serving_bench

    asked = _asked(given)
    check_result_file(json_file)
    check_result_file(plot_file, "--plot")
    if plot_file is not None:
        plots.require_matplotlib()
    found = serving_bench.measure(asked)
    click.echo(report.table(found))
    write_json(json_file, found)
    if plot_file is not None:
        plots.plot_serving(found, Path(plot_file))
    if found["interrupted"]:
        return 130
    return 0 if found["requests"]["ok"] else 1


def _asked(given: dict[str, Any]) -> RunSettings:
    """Return the run requested by the flags of ``weft bench serve``. Raise ConfigError."""
    from weft.bench import schedule, serving_bench, stats
    from weft.bench.load import Limits

    _check_positive(given, "request_rate", "burstiness", "duration", "trace_speed", "timeout")
    workload = WORKLOADS[given["workload"]] if given["workload"] else None
    lengths = [schedule.parse_lengths(given[name], _flag(name)) for name in ("input_len", "output_len")]
    trace: Sequence[schedule.Planned] = ()
    if given["dataset"] != "random":
        trace = schedule.read_trace(Path(given["dataset"]), given["trace_speed"], lengths[1])
    if trace and (given["request_rate"] is not None or workload):
        raise ConfigError("a trace has its own send times: leave out --request-rate and --workload")
    if workload and (given["request_rate"] is not None or given["num_requests"] or given["duration"]):
        raise ConfigError("--workload is a fixed load: leave out --request-rate, --num-requests, --duration")
    # A workload or a trace has a fixed number of requests; --num-requests can only lower the number.
    requests = given["num_requests"]
    if workload or trace:
        fixed = workload.requests if workload else len(trace)
        requests = min(fixed, requests or fixed)
    elif requests is None and given["duration"] is None:
        requests = 32
    concurrency = given["concurrency"]
    # A closed loop needs a concurrency; an open loop has no limit by default.
    if concurrency is None and given["request_rate"] is None and not trace:
        concurrency = (workload.concurrency or workload.requests) if workload else 8
    return serving_bench.RunSettings(
        **_server(given),
        limits=Limits(
            concurrency=concurrency,
            requests=requests,
            duration=given["duration"],
            request_timeout=given["timeout"],
        ),
        rate=given["request_rate"],
        burstiness=given["burstiness"],
        input_len=schedule.LengthRange(workload.prompt_tokens, workload.prompt_tokens)
        if workload
        else lengths[0],
        output_len=schedule.LengthRange(workload.output_tokens, workload.output_tokens)
        if workload
        else lengths[1],
        trace=trace,
        workload=workload,
        warmup=given["warmup"],
        keep_alive=given["keep_alive"],
        levels=stats.parse_levels(given["goodput"]),
    )


def _server(given: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of ``RunSettings`` from the flags of ``server_options``. Raise ConfigError."""
    from weft.common.client_tls import versioned_url

    if not given["base_url"]:
        raise ConfigError("--base-url is required, e.g. http://127.0.0.1:8000", param="--base-url")
    versioned_url(given["base_url"], "--base-url")
    try:
        extra = json.loads(given["extra_body"] or "{}")
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise ConfigError("--extra-body must be a JSON object", param="--extra-body")
    return {
        "url": given["base_url"],
        "model": given["served"],
        "extra": extra,
        **{
            name: given[name]
            for name in ("endpoint", "prompts", "vocab_size", "key", "ignore_eos", "repetition")
        },
    }


@click.command(cls=options.Command)
@click.argument("model_name", metavar="[MODEL]", required=False)
@server_options
@click.option(
    "--concurrency",
    default="1..64",
    show_default=True,
    help="Concurrent requests: LOW..HIGH (powers of 2), a list, or none.",
)
@click.option(
    "--context",
    default="256..16384",
    show_default=True,
    help="Prompt tokens of single requests, in the same forms.",
)
@click.option(
    "--input-len",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Tokens per request with --concurrency.",
)
@click.option(
    "--output-len",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Tokens per request with --concurrency.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 1000),
    default=2,
    show_default=True,
    help="Requests per concurrent client.",
)
@click.option(
    "--point-seconds", type=float, default=60.0, show_default=True, help="Maximum seconds per point."
)
@click.option(
    "--ready-timeout",
    type=float,
    default=600.0,
    show_default=True,
    help="Maximum seconds until the started server is ready.",
)
@json_option()
@_plot_option
@options.settings(options.ENGINE, ("log_level",))
def sweep(model_name: str | None, json_file: str | None, plot_file: str | None, **given: Any) -> int:
    """Measure at growing concurrency and at growing context.

    With --base-url, measure the given server. Otherwise start `weft serve MODEL` with the engine's flags, end
    the server afterwards, and also report its start-up time and peak memory.
    """
    from weft.bench import plots
    from weft.bench import sweep as sweeps

    _check_positive(given, "point_seconds", "ready_timeout")
    check_result_file(json_file)
    check_result_file(plot_file, "--plot")
    if plot_file is not None:
        plots.require_matplotlib()
    chosen = sweeps.Sweep(
        concurrency=sweeps.powers(given["concurrency"], "--concurrency"),
        context=sweeps.powers(given["context"], "--context"),
        input_len=given["input_len"],
        output_len=given["output_len"],
        rounds=given["rounds"],
        seconds=given["point_seconds"],
    )
    config = options.build(given, model_name)
    found = _sweep(chosen, config, given)
    write_json(json_file, found)
    if plot_file is not None:
        plots.plot_sweep(
            found, str(given["served"] or given["base_url"] or config.model.model), Path(plot_file)
        )
    if found["interrupted"]:
        return 130
    return (
        0
        if any("requests" in p and p["requests"]["ok"] for p in found["concurrency"] + found["context"])
        else 1
    )


def _sweep(chosen: Sweep, config: Config, given: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a sweep against the given or a new server. Raise ConfigError or ServerFailed."""
    from weft.bench import serving_bench
    from weft.bench import sweep as sweeps
    from weft.bench.load import Limits
    from weft.bench.process import ServerProcess

    limits = Limits(concurrency=1, requests=1, duration=None)
    if given["base_url"]:
        base = serving_bench.RunSettings(**_server(given), limits=limits)
        return sweeps.run_sweep(chosen, base, click.echo)
    # SIGTERM raises SystemExit, so that the context manager below also ends the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    command = [sys.executable, "-m", "weft", "serve", *server_arguments(config), "--port", "{port}"]
    with (
        tempfile.TemporaryDirectory(prefix="weft-") as folder,
        ServerProcess(
            command, environment={"WEFT_API_KEY": None}, log_file=Path(folder) / "serve.log"
        ) as server,
    ):
        click.echo(f"starting {config.model.model}", err=True)
        seconds = server.wait_ready(given["ready_timeout"])
        base = serving_bench.RunSettings(**_server({**given, "base_url": server.url}), limits=limits)
        found = sweeps.run_sweep(chosen, base, click.echo)
        memory = server.peak_memory()
    click.echo(f"ready after {seconds:.2f} s; peak memory {memory / 1e9:.2f} GB")
    return {**found, "ready_seconds": round(seconds, 3), "peak_memory": memory}


def server_arguments(config: Config) -> list[str]:
    """Return the configuration as arguments of ``weft serve``: the model and all changed settings."""
    found = options.keywords(config)
    arguments = [str(found.pop("model"))]
    for name, value in found.items():
        setting = SETTINGS[name]
        if setting.kind == "bool":
            arguments.append(setting.flag if value else f"--no-{setting.key}")
        else:
            arguments += [setting.flag, ",".join(map(str, value)) if setting.many else str(value)]
    return arguments
