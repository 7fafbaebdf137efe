"""``weft up FILE --on ray``: groups as Ray actors, and the API server in this process."""

from __future__ import annotations

import functools
import re
import secrets
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import ray

from weft.common.errors import ConfigError, EngineDead
from weft.common.log import get_logger
from weft.config.alone import face_alone
from weft.config.resolved import EngineConfig
from weft.config.sections.all import FrontSection
from weft.config.topology import Topology, serves
from weft.on_ray.actors import CALL_S, NAMESPACE, FleetActor, fleet_name
from weft.on_ray.fleet_state import GroupPlan
from weft.on_ray.ray_directory import RayDirectory, RayOwner
from weft.parallel.secret import read_keys

log = get_logger(__name__)

REACH_S = 5.0
"""Maximum seconds for a connection to the cluster."""
PLACE_S = 30.0
"""Maximum seconds until the fleet actor runs."""


def up(text: str, name: str, topology: Topology, address: str) -> tuple[EngineConfig, RayOwner]:
    """Start the groups of a topology, or find the running ones. Return the API server's configuration, and
    the owner of the groups.

    ``text``: the topology file. ``name``: of the server. ``address``: of the Ray cluster; "" for the cluster
    of this host, or of the environment. Raise ConfigError, or EngineDead if Ray does not answer.
    """
    config = face_alone(topology)
    _connect(address)
    actor = _fleet(name, text, topology.front)
    try:
        ray.get(actor.want.remote(msgspec.msgpack.encode(plans_of(topology, config))), timeout=PLACE_S)
        _, secret = ray.get(actor.settings.remote(), timeout=CALL_S)
    except Exception as error:
        raise EngineDead(f"Ray does not run the fleet of {name} ({type(error).__name__})") from error
    folder = tempfile.TemporaryDirectory(prefix="weft-ray-")  # removed at the end of the process
    key = Path(folder.name) / "secret"
    key.touch(mode=0o600)
    key.write_text(secret)
    with folder:
        keys = read_keys(str(key))
    served = functools.partial(serves, fallback=config.transfer.prefill_fallback)
    return config, RayOwner(RayDirectory(name), config.served_names[0], keys, served)


def down(name: str, address: str, drain_timeout: float) -> int:
    """Drain and end all groups of a server, and forget the server. Return 0. Blocks until then.

    Raise EngineDead without such a server.
    """
    _connect(address)
    try:
        actor = ray.get_actor(fleet_name(name), namespace=NAMESPACE)
        groups: list[str] = ray.get(actor.stop.remote(), timeout=CALL_S)
        log.info("draining %s", ", ".join(groups))
        until = time.monotonic() + drain_timeout + PLACE_S
        while ray.get(actor.living.remote(groups), timeout=CALL_S) and time.monotonic() < until:
            time.sleep(0.5)
        ray.kill(actor)
    except Exception as error:
        raise EngineDead(f"Ray has no server {name!r} ({type(error).__name__})") from error
    return 0


def plans_of(topology: Topology, face: EngineConfig) -> list[GroupPlan]:
    """Return the groups of a topology for Ray: one GPU per rank with ``device: cuda``, else one CPU."""
    made = []
    for group in topology.groups:
        parallel, device = group.config.parallel, group.config.runner.device
        if parallel.nnodes > 1:
            raise ConfigError(f"group {group.name} spans several hosts, which --on ray does not place yet")
        several = parallel.data_parallel_size > 1
        engines = (
            [f"{group.name}.{n}" for n in range(parallel.data_parallel_size)] if several else [group.name]
        )
        ranks = parallel.layout.ranks
        made.append(
            GroupPlan(
                group=group.name,
                base=group.base,
                role=group.config.transfer.role,
                engines=tuple(engines),
                expert_group=group.name if several and parallel.enable_expert_parallel else "",
                gpus=ranks if device == "cuda" else 0,
                cpus=float(ranks if device == "cuda" else group.config.runner.threads or 1),
            )
        )
    return made


def server_name(file: str) -> str:
    """Return the name of a server: the file's name in letters that Ray's names may have."""
    return re.sub(r"[^a-z0-9-]+", "-", Path(file).stem.lower()).strip("-") or "server"


def _connect(address: str) -> None:
    """Connect this process to Ray. Raise EngineDead if no cluster answers."""
    if ray.is_initialized():
        return
    try:
        if ":" in address and "://" not in address:
            # Ray itself would wait for minutes.
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except Exception as error:
        raise EngineDead(
            f"no Ray cluster answers ({error}); start one with `ray start --head`, or give --ray-address"
        ) from error


def _fleet(name: str, text: str, front: FrontSection) -> Any:
    """Return the fleet actor of a server: the running one, with the present topology, or a new one."""
    made = ray.remote(FleetActor).options(
        name=fleet_name(name),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=8,
        num_cpus=0,
    )
    actor: Any = made.remote(name, text, secrets.token_hex(32), front.engine_restarts)
    actor.change.remote(text)
    return actor
