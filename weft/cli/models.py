"""``weft models``: models available without a download, architectures of downloadable models, and the facts
of one model."""

from __future__ import annotations

import click
import msgspec

from weft.cli.model_check import check_model, lines_of
from weft.config import families, hub
from weft.config.about import about
from weft.config.sections.all import ModelSection

_REFUSED = 3
"""Exit status for a model that Weft does not serve."""


@click.command()
@click.option(
    "--check",
    metavar="MODEL",
    help="Show the facts of one model: a folder, hub name or bundled model. Reads no weights. The status is "
    f"{_REFUSED} if Weft does not serve the model.",
)
@click.option(
    "--quantization",
    type=click.Choice(["none", "int8", "w8a8", "int4", "w4a8", "fp8"]),
    default="none",
    show_default=True,
    help="With --check: format of the weights in memory.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float64", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="With --check: dtype of weights and KV cache.",
)
@click.option("--trust-remote-code", is_flag=True, help="With --check: accept checkpoints that contain code.")
@click.option("--json", "as_json", is_flag=True, help="With --check: print JSON.")
@click.pass_context
def models(
    ctx: click.Context,
    check: str | None,
    quantization: str,
    dtype: str,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """List bundled models, models in the hub's local cache, and the architectures that Weft runs. With
    --check, show the facts of one model instead."""
    if check is None:
        if as_json:
            raise click.UsageError("--json needs --check", ctx)
        _list()
        return
    given = {"quantization": quantization, "dtype": dtype, "trust_remote_code": trust_remote_code}
    report = check_model(msgspec.convert({"model": check, **given}, ModelSection))
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
