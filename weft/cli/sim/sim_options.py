"""Options that commands of the simulator and of the planner share."""

from __future__ import annotations

import click

from weft.cli.options import Decorator, joined
from weft.sim.presets import PRESETS

POSITIVE = click.FloatRange(0, min_open=True)


def cost_model_option(of: str = "steps", note: str = "") -> Decorator:
    """Return ``--cost-model``. ``of``: the modelled steps. ``note``: a further sentence of the help."""
    return click.option(
        "--cost-model",
        "cost_name",
        default=next(iter(PRESETS)),
        show_default=True,
        metavar="NAME|FILE",
        help=f"Cost model of {of}: {' or '.join(PRESETS)}, or a file written by bench/cost_model.py.{note}",
    )


def workload_options(prompt: str, output: str) -> Decorator:
    """Return the options of the lengths of requests. ``prompt``, ``output``: default numbers of tokens."""
    return joined(
        click.option(
            "--prompt-tokens",
            default=prompt,
            show_default=True,
            help="Prompt tokens per request: 512, or a range 100-2000.",
        ),
        click.option(
            "--output-tokens",
            default=output,
            show_default=True,
            help="Output tokens per request: 64, or a range 10-200.",
        ),
        click.option(
            "--shared-prefix",
            type=click.IntRange(0),
            default=0,
            help="Prompt tokens that all requests share.",
        ),
        click.option(
            "--trace-file",
            help='Requests from a file: JSONL of {"at": s, "prompt_tokens": n, "output_tokens": n}.',
        ),
    )


def limit_options(ttft_ms: float, tpot_ms: float) -> Decorator:
    """Return ``--ttft-ms`` and ``--tpot-ms``, with these defaults in milliseconds."""
    return joined(
        click.option(
            "--ttft-ms",
            type=POSITIVE,
            default=ttft_ms,
            show_default=True,
            help="Limit of the time to the first token.",
        ),
        click.option(
            "--tpot-ms",
            type=POSITIVE,
            default=tpot_ms,
            show_default=True,
            help="Limit of the mean time between two tokens of a request.",
        ),
    )


noise_option = click.option(
    "--noise",
    type=click.FloatRange(0, 2),
    default=0.05,
    show_default=True,
    help="Spread of step times: standard deviation of the logarithm.",
)
seed_option = click.option(
    "--workload-seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed of the run. Equal seeds give equal runs.",
)
