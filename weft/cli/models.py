"""``weft models``: models available without a download, and architectures of downloadable models."""

from __future__ import annotations

import click

from weft.config import families, hub
from weft.config.about import about


@click.command()
def models() -> None:
    """List bundled models, models in the hub's local cache, and the architectures that Weft runs."""
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
