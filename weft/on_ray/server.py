"""``weft up FILE --on ray``: groups as Ray actors, and the API server in this process."""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray

from weft.common.errors import ConfigError, EngineDead
from weft.common.log import get_logger
from weft.config.resolved import EngineConfig
from weft.config.sections.all import FrontSection
from weft.config.topology import Topology
from weft.on_ray.actors import CALL_S, NAMESPACE, fleet_name, insist
from weft.on_ray.fleet_actor import FleetActor
from weft.on_ray.plans import GroupPlan, Offer, Snapshot
from weft.on_ray.ray_directory import RayDirectory, RayOwner
from weft.parallel.secret import read_keys

log = get_logger(__name__)

REACH_S = 5.0
"""Maximum seconds for a connection to the cluster."""
PLACE_S = 30.0
"""Maximum seconds until the fleet actor runs."""
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*=!?[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def up(
    text: str, name: str, named: bool, front: FrontSection, config: EngineConfig, plans: Sequence[GroupPlan]
) -> RayOwner:
    """Start the groups of a topology, or find the running ones. Return the owner of the groups. Call
    ``connect`` first.

    ``text``: see ``text_for_groups``. ``name``: of the server. ``named``: True if the operator gave the name.
    ``config``: of the API server. ``plans``: of the groups. Raise ConfigError if the name belongs to a server
    of another model, or EngineDead if Ray does not answer.
    """
    offer = Offer(
        topology=text,
        model=config.served_names[0],
        named=named,
        restarts=front.engine_restarts,
        drain_timeout=front.drain_timeout,
        plans=tuple(plans),
    )
    try:
        # A fleet actor that ends refuses the offer. Then the next one has the name.
        refused, secret = insist(lambda: _make(name, msgspec.msgpack.encode(offer)), PLACE_S)
    except Exception as error:
        raise EngineDead(f"the fleet actor of {name} does not answer ({type(error).__name__})") from error
    if refused:
        raise ConfigError(
            f"the server {name} runs on this cluster with the model {refused}, and FILE has the model "
            f"{offer.model}: give this server another name with --name, or give --name {name} to replace the "
            "topology",
            param="--name",
        )
    folder = tempfile.TemporaryDirectory(prefix="weft-ray-")
    with folder:
        key = Path(folder.name) / "secret"
        key.touch(mode=0o600)
        key.write_text(secret)
        keys = read_keys(str(key))
    return RayOwner(RayDirectory(name), config.served_names[0], keys, config.transfer.prefill_fallback)


def down(name: str, drain_timeout: float) -> int:
    """Drain and end all groups of a server, and forget the server. Call ``connect`` first. Blocks until then.

    Return 0, or 1 if groups live at the deadline, or if another `weft up` has started groups meanwhile; then
    the server is not forgotten. Raise EngineDead without
    such a server, or without an answer.
    """
    try:
        actor = ray.get_actor(fleet_name(name), namespace=NAMESPACE)
    except ValueError as error:
        raise EngineDead(f"Ray has no server {name!r}") from error
    try:
        groups: list[str] = ray.get(actor.stop.remote(), timeout=PLACE_S)
        log.info("draining %s", ", ".join(groups))
        until = time.monotonic() + drain_timeout + PLACE_S
        while groups and time.monotonic() < until:
            time.sleep(0.5)
            # One late answer is no reason to give up.
            with contextlib.suppress(ray.exceptions.GetTimeoutError):
                groups = ray.get(actor.living.remote(), timeout=CALL_S)
        if groups:
            log.error("not ended in time: %s; the same command waits again", ", ".join(groups))
            return 1
        if not ray.get(actor.forget.remote(), timeout=PLACE_S):
            log.error("another `weft up` has started the server again")
            return 1
        ray.kill(actor)
    except Exception as error:
        raise EngineDead(
            f"the fleet actor of {name} does not answer ({type(error).__name__}), so groups may still run"
        ) from error
    return 0


def plans_of(topology: Topology) -> list[GroupPlan]:
    """Return the groups of a topology for Ray: one GPU and one CPU per rank with ``device: cuda``, else
    ``threads`` CPUs per rank. Raise ConfigError for wrong labels."""
    made = []
    for group in topology.groups:
        parallel, device = group.config.parallel, group.config.runner.device
        several = parallel.data_parallel_size > 1
        engines = (
            [f"{group.name}.{n}" for n in range(parallel.data_parallel_size)] if several else [group.name]
        )
        ranks = parallel.ranks_here
        made.append(
            GroupPlan(
                group=group.name,
                base=group.base,
                role=group.config.transfer.role,
                engines=tuple(engines),
                expert_group=group.name if several and parallel.enable_expert_parallel else "",
                gpus=ranks if device == "cuda" else 0,
                cpus=float(ranks if device == "cuda" else ranks * (group.config.runner.threads or 1)),
                hosts=parallel.hosts,
                labels=_labels(group.name, parallel.ray_labels or ""),
            )
        )
    return made


def _labels(group: str, given: str) -> dict[str, str]:
    """Return ``given``, NAME=VALUE,.., as labels of nodes. Raise ConfigError."""
    labels = [entry.strip() for entry in given.split(",") if entry.strip()]
    for wrong in (label for label in labels if not _LABEL.fullmatch(label)):
        raise ConfigError(
            f"group {group}: --ray-labels {wrong}: write NAME=VALUE, or NAME=!VALUE for all other nodes",
            param="--ray-labels",
        )
    return dict(label.split("=", 1) for label in labels)


def server_name(file: str) -> str:
    """Return the name of a server without ``--name``: the file's name in lower case, digits and -."""
    return re.sub(r"[^a-z0-9-]+", "-", Path(file).stem.lower()).strip("-") or "server"


def connect(address: str) -> None:
    """Connect this process to Ray. ``address``: of the cluster; "" for the cluster of this host, or of the
    environment. Raise EngineDead if no cluster answers."""
    if ray.is_initialized():
        return
    try:
        if ":" in address and "://" not in address:
            # Ray itself would wait for minutes.
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except Exception as error:
        if isinstance(error.__cause__, getattr(ray.exceptions, "AuthenticationError", ())):
            raise EngineDead(
                "the Ray cluster wants another token: set RAY_AUTH_MODE=token with the cluster's token, or "
                "start the cluster with RAY_AUTH_MODE=disabled"
            ) from error
        raise EngineDead(
            f"no Ray cluster answers ({error}); start one with `ray start --head`, or give --ray-address"
        ) from error


def _make(name: str, offer: bytes) -> tuple[str, str]:
    """Return the answer of a fleet actor to an offer, and the secret of the server. Raise errors of Ray."""
    actor = _fleet(name)
    state = msgspec.msgpack.decode(ray.get(actor.snapshot.remote(), timeout=CALL_S), type=Snapshot)
    if state.note:
        log.error("%s", state.note)
    refused: str = ray.get(actor.offer.remote(offer), timeout=PLACE_S)
    return refused, ray.get(actor.secret.remote(), timeout=CALL_S)


def _fleet(name: str) -> Any:
    """Return the fleet actor of a server: the running one, or a new one."""
    return (
        ray.remote(FleetActor)
        .options(
            name=fleet_name(name),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=16,
            num_cpus=0,
        )
        .remote(name, secrets.token_hex(32))
    )
