"""``weft up``: a server of several groups with different settings, from a topology file."""

from __future__ import annotations

from typing import Any

import click

from weft.cli import options
from weft.cli.processes.spares import open_spares
from weft.cli.serve.on_ray import RayOptions, check_place, up_models_on_ray, up_on_ray
from weft.cli.serve.serve import with_keys
from weft.config.resolved import EngineConfig
from weft.config.sections.all import Config, FrontSection


@click.command(cls=options.Command)
@click.argument("file", type=click.Path())
@click.option(
    "--on",
    "place",
    type=click.Choice(["host", "ray"]),
    default="host",
    show_default=True,
    help="Where the groups run: on this host, or where Ray places them (weft[ray]).",
)
@click.option("--ray-address", default="", help="With --on ray: the cluster. Default: that of this host.")
@click.option("--name", default="", help="With --on ray: name of the server. Default: that of FILE.")
@click.option("--stop", is_flag=True, help="With --on ray: drain and end all groups of the server.")
@click.option("--check", is_flag=True, help="Only check FILE, and print the groups that would start.")
@options.settings(("front",), file=False)
def up(file: str, place: str, ray_address: str, name: str, stop: bool, check: bool, **given: Any) -> int:
    """Serve the groups of the topology FILE over an OpenAI-compatible API.

    FILE is YAML. Top-level keys are flags of an engine and hold for all groups. `front` has flags of the
    server; flags on the command line win. `groups` is a list: each group has a role (unified, prefill, decode
    or encode), a count and its own flags. `models` lists several models in place of `groups`. The folder
    examples has ready-made files. SIGUSR1 restarts all groups, one after the other, without loss of a
    request.
    """
    from weft.cli.serve.server import configure_log, run
    from weft.cli.serve.several_models import up_models
    from weft.config.models.several import has_models, refuse_models
    from weft.config.secret_file import check_secrets, warn_of_readable_keys
    from weft.config.sections.tls import server_context
    from weft.config.topology import read_topology, resolve_groups

    check_place(place, {"--ray-address": ray_address, "--name": name, "--stop": stop})
    if has_models(file):
        values = options.given_values(given)
        if place == "ray":
            return up_models_on_ray(file, values, RayOptions(ray_address, name, stop, check))
        return up_models(file, values, with_keys, check=check)
    topology = read_topology(file, options.given_values(given))
    front = with_keys(Config(front=topology.front)).front
    refuse_models(front, "a topology of one model")
    configure_log(front)
    warn_of_readable_keys(file)
    if place == "ray":
        return up_on_ray(file, topology._replace(front=front), RayOptions(ray_address, name, stop, check))
    groups = resolve_groups(topology._replace(front=front))
    check_secrets(groups)
    if check:
        server_context(front)
        click.echo(describe(groups, front))
        return 0
    with open_spares(front, torchless=all(group.scripted for group in groups)) as spares:
        return run(groups, front, spares)


def describe(groups: tuple[EngineConfig, ...], front: FrontSection) -> str:
    """Return the plan of the server as text: a line for the server, and a line per group."""
    one = groups[0]
    ranks = sum(group.parallel.layout.ranks for group in groups)
    lines = [
        f"{one.served_names[0]} ({one.dtype}, {one.device}) on {front.host}:{front.port}: "
        f"{_count(front.fronts, 'front')}, {_count(len(groups), 'group')}, {_count(ranks, 'rank')}"
    ]
    width = max(len(group.group) for group in groups)
    for group in groups:
        parallel = group.parallel
        layout = [f"{parallel.layout.ranks} x {group.device}"]
        layout += [f"tp {parallel.tensor_parallel_size}"] if parallel.tensor_parallel_size > 1 else []
        layout += [f"dp {parallel.data_parallel_size}"] if parallel.data_parallel_size > 1 else []
        layout += ["ep"] if parallel.enable_expert_parallel else []
        layout += [f"GPUs {','.join(group.gpus)}"] if group.gpus else []
        # Encode groups have no pools.
        pools = "; ".join(pool.describe(group.dtype) for pool in group.kv.pools) or "no cache"
        pools += _images(group)
        lines.append(f"  {group.group:<{width}}  {group.transfer.role:<7}  {', '.join(layout)}: {pools}")
    return "\n".join(lines)


def _images(group: EngineConfig) -> str:
    """Return the group's part in image encoding as text; "" if the group takes no embeddings."""
    media = group.kv.media
    if group.transfer.role == "encode":
        return "; encodes images"
    if media is None or not group.transfer.take_embeddings:
        return ""
    return "; images from encode groups, or its own tower" if media.tower else "; images from encode groups"


def _count(number: int, what: str) -> str:
    """Return the number with its noun, in plural if needed."""
    return f"{number} {what}{'s' * (number != 1)}"
