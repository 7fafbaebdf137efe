"""``weft up FILE --on ray``: the groups as Ray actors, and the API server in this process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from weft.cli.serve.front import begin
from weft.common.errors import ConfigError

if TYPE_CHECKING:
    from weft.config.topology import Topology
    from weft.on_ray.plans import GroupPlan

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class RayOptions(NamedTuple):
    """Options of ``weft up`` that need ``--on ray``, and ``--check``."""

    address: str
    name: str
    stop: bool
    check: bool


def check_place(place: str, of_ray: Mapping[str, Any]) -> None:
    """Raise ConfigError for flags that do not fit ``--on PLACE``. ``of_ray``: flag -> value of the flags for
    Ray alone."""
    if place != "ray":
        for flag in (flag for flag, value in of_ray.items() if value):
            raise ConfigError(f"{flag} needs --on ray", param=flag)
        return
    name = of_ray["--name"]
    if name and not _NAME.fullmatch(name):
        raise ConfigError(
            "--name must have at most 64 letters, digits, dots, - and _, and begin with a letter or a digit",
            param="--name",
        )


def up_on_ray(file: str, topology: Topology, chosen: RayOptions) -> int:
    """Start the groups as Ray actors, and serve them in this process. Return the exit status.

    The end of this process ends no group. With ``check``, only print the groups. With ``stop``, only end all
    groups. Everything is checked before this process connects to Ray. Raise ConfigError without Ray.
    """
    from weft.config.alone import face_alone
    from weft.config.sections.tls import server_context
    from weft.front.front_server import bind, serve

    try:
        from weft.on_ray.offered_text import text_for_groups
        from weft.on_ray.server import connect, down, plans_of, server_name, up
    except ImportError as error:
        raise ConfigError(f"--on ray: {error}; install weft[ray]", param="--on") from error
    front = topology.front
    if front.fronts > 1:
        raise ConfigError(
            "--fronts is not for --on ray: start the command several times, each with its own port",
            param="--fronts",
        )
    name = chosen.name or server_name(file)
    if chosen.stop and not chosen.check:
        connect(chosen.address)
        return down(name, front.drain_timeout)
    _check_paths(topology)
    plans = plans_of(topology)
    config = face_alone(_on_one_host(topology))
    server_context(front)
    if chosen.check:
        click.echo(_describe(name, config.served_names[0], plans))
        return 0
    text = text_for_groups(file, front)
    # A port in use ends the command before any group starts.
    with bind(front.host, front.port) as listener:
        begin(config, front)
        connect(chosen.address)
        owner = up(text, name, bool(chosen.name), front, config, plans)
        return serve(config, front, owner, listener=listener)


def _check_paths(topology: Topology) -> None:
    """Raise ConfigError for a model in a relative folder: groups run in other folders, on other hosts."""
    for group in topology.groups:
        path = Path(group.config.model.model)
        if not path.is_absolute() and path.exists():
            raise ConfigError(
                f"group {group.name}: --on ray needs the absolute path of the model, and the same path on "
                f"each node: {path.absolute()}",
                param="--model",
            )


def _on_one_host(topology: Topology) -> Topology:
    """Return the topology for the API server, which starts no ranks. So the file needs no secret for groups
    on several hosts: the fleet actor has a secret."""
    groups = []
    for group in topology.groups:
        parallel = msgspec.structs.replace(group.config.parallel, hosts=1)
        groups.append(group._replace(config=msgspec.structs.replace(group.config, parallel=parallel)))
    return topology._replace(groups=tuple(groups))


def _describe(name: str, model: str, plans: list[GroupPlan]) -> str:
    """Return the plan of the server as text: a line for the server, and a line per group."""
    lines = [f"{model} as server {name} on Ray:"]
    width = max(len(plan.group) for plan in plans)
    for plan in plans:
        gpus = f", {plan.gpus} GPU" if plan.gpus else ""
        each = f" on each of {plan.hosts} nodes" if plan.hosts > 1 else ""
        labels = "".join(f", {name}={value}" for name, value in plan.labels.items())
        lines.append(f"  {plan.group:<{width}}  {plan.role:<7}  {plan.cpus:g} CPU{gpus}{each}{labels}")
    return "\n".join(lines)
