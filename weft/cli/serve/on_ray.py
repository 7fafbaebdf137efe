"""``weft up FILE --on ray``: the groups as Ray actors, and the API server in this process."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from weft.cli.serve.front import begin
from weft.cli.serve.serve import with_keys
from weft.common.errors import ConfigError, EngineDead
from weft.common.log import get_logger
from weft.config.sections.all import Config

if TYPE_CHECKING:
    from weft.config.resolved import EngineConfig
    from weft.config.sections.all import FrontSection
    from weft.config.topology import Topology
    from weft.control.links.owner import Owner
    from weft.front.requests.models.several_models import ModelSet
    from weft.on_ray.plans import GroupPlan
    from weft.on_ray.ray_directory import RayOwner

log = get_logger(__name__)

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


class RayServer(NamedTuple):
    """The groups of one model on Ray."""

    name: str
    text: str
    """Topology for the groups."""
    config: EngineConfig
    """Settings for API servers."""
    plans: list[GroupPlan]


def up_on_ray(file: str, topology: Topology, chosen: RayOptions) -> int:
    """Start the groups as Ray actors, and serve them in this process. Return the exit status.

    The end of this process ends no group. With ``check``, only print the groups. With ``stop``, only end all
    groups. Everything is checked before this process connects to Ray. Raise ConfigError without Ray.
    """
    from weft.config.alone import front_alone

    ray = _ray(topology.front)
    name = chosen.name or ray.server_name(file)
    if chosen.stop and not chosen.check:
        ray.connect(chosen.address)
        return ray.down(name, topology.front.drain_timeout)
    _check_paths(topology)
    config = front_alone(_on_one_host(topology))
    server = _server(file, name, topology, config)
    return _serve([server], topology.front, chosen, lambda owners: (topology.front, owners[0]))


def up_models_on_ray(file: str, given: Mapping[str, Any], chosen: RayOptions) -> int:
    """Start the groups of all models of ``file`` as Ray actors, each model as a server of its own on Ray, and
    serve all models in this process. ``given``: field values of the command line. The rest: see
    ``up_on_ray``."""
    from weft.cli.serve.server import configure_log
    from weft.config.models.alone import models_alone, named_topology
    from weft.config.models.several import read_models, slug
    from weft.config.secret_file import warn_of_readable_keys
    from weft.control.directory.directory_hub import DirectoryHub
    from weft.front.requests.models.model_set import model_set

    settings, section = read_models(file, given)
    front = with_keys(Config(front=section)).front
    configure_log(front)
    warn_of_readable_keys(file)
    ray = _ray(front)
    base = chosen.name or ray.server_name(file)
    names = {one.name: f"{base}-{slug(one.name)}" for one in settings}
    if len(set(names.values())) < len(names):
        raise ConfigError(f"two models have one name on Ray ({', '.join(names.values())}): rename one model")
    if chosen.stop and not chosen.check:
        ray.connect(chosen.address)
        return max(_down(ray, name, front) for name in names.values())
    for one in settings:
        _check_paths(one.topology)
    models = models_alone([one._replace(topology=_on_one_host(one.topology)) for one in settings], front)
    servers = [
        _server(file, names[one.name], named_topology(one)._replace(front=front), model.config, one.name)
        for one, model in zip(settings, models, strict=True)
    ]

    def served(owners: Sequence[RayOwner]) -> tuple[FrontSection, ModelSet]:
        hub = DirectoryHub(dict(zip(names, owners, strict=True)), front.recovery_timeout)
        return model_set(models, None, front, hub)

    return _serve(servers, front, chosen, served)


def _down(ray: Any, name: str, front: FrontSection) -> int:
    """Drain and end the groups of one of several models. Return the status. An error is logged, so that the
    other models end, too."""
    try:
        status: int = ray.down(name, front.drain_timeout)
    except EngineDead as error:
        log.error("%s", error.message)
        return 1
    return status


def _ray(front: FrontSection) -> Any:
    """Return ``weft.on_ray.server``. Raise ConfigError without Ray, and for several API servers."""
    try:
        from weft.on_ray import server
    except ImportError as error:
        raise ConfigError(f"--on ray: {error}; install weft[ray]", param="--on") from error
    if front.fronts > 1:
        raise ConfigError(
            "--fronts is not for --on ray: start the command several times, each with its own port",
            param="--fronts",
        )
    return server


def _server(file: str, name: str, topology: Topology, config: EngineConfig, model: str = "") -> RayServer:
    """Return the groups of one model. ``model``: its name in a file of several models. Raise ConfigError."""
    from weft.on_ray.offered_text import text_for_groups
    from weft.on_ray.server import plans_of

    return RayServer(name, text_for_groups(file, topology.front, model), config, plans_of(topology))


def _serve(
    servers: Sequence[RayServer],
    front: FrontSection,
    chosen: RayOptions,
    served: Callable[[Sequence[RayOwner]], tuple[FrontSection, Owner | ModelSet]],
) -> int:
    """Start or find the groups, and serve. Return the exit status. ``served``: returns the settings of the
    API server, and the owner of the engines or all models, for the owners of all groups."""
    from weft.config.sections.tls import server_context
    from weft.front.front_server import bind, serve
    from weft.on_ray.server import connect, up

    server_context(front)
    if chosen.check:
        for one in servers:
            click.echo(_describe(one.name, one.config.served_names[0], one.plans))
        return 0
    # A port in use ends the command before any group starts.
    with bind(front.host, front.port) as listener:
        begin([one.config for one in servers], front)
        connect(chosen.address)
        named = bool(chosen.name)
        owners = [up(one.text, one.name, named, front, one.config, one.plans) for one in servers]
        section, owner = served(owners)
        return serve(servers[0].config, section, owner, listener=listener)


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
