"""``weft models``: models available without a download, architectures of downloadable models, and the facts
of one model."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from weft.cli.model_check import check_model, lines_of
from weft.cli.options import Command, build, given_values, settings
from weft.config import families, hub
from weft.config.about import about

_REFUSED = 3
"""Exit status for a model that Weft does not serve."""


_FLAGS = (
    *("quantization", "dtype", "kv_cache_dtype", "max_model_len", "tensor_parallel_size", "tokenizer"),
    *("hf_overrides", "model_impl", "revision", "trust_remote_code"),
)
"""Settings of ``weft serve`` that --check takes."""


@click.command(cls=Command)
@click.option(
    "--check",
    metavar="MODEL",
    help="Show the facts of one model: a folder, hub name or bundled model. Reads no weights. The status is "
    f"{_REFUSED} if `weft serve` with the same flags would refuse the model on this machine.",
)
@settings((), _FLAGS, file=False)
@click.option("--json", "as_json", is_flag=True, help="With --check: print JSON.")
@click.pass_context
def models(ctx: click.Context, check: str | None, as_json: bool, **given: Any) -> None:
    """List bundled models, models in the hub's local cache, and the architectures that Weft runs. With
    --check, show the facts of one model instead, as `weft serve` with the same flags runs the model."""
    if check is None:
        for name in ("json",) if as_json else given_values(given):
            raise click.UsageError(f"--{name.replace('_', '-')} needs --check", ctx)
        _list()
        return
    report = check_model(build(given, check))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        click.echo("\n".join(lines_of(report)))
    if not report.served:
        ctx.exit(_REFUSED)


def _list() -> None:
    """Print the names of models and architectures."""
    click.echo("Bundled models:")
    bundled = hub.bundled_models()
    width = max(map(len, bundled), default=0)
    for name, folder in bundled.items():
        click.echo(f"  {name:{width}}  {about(folder).does}".rstrip())
    cached = hub.cached_models()
    if cached:
        click.echo("\nIn the hub's local cache:")
        for name in cached:
            click.echo(f"  {name}")
    click.echo("\nArchitectures (a folder or hub name whose config.json names one of them):")
    for name in families.FAMILIES:
        click.echo(f"  {name}")
