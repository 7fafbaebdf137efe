"""``weft engine``: one group of a topology, alone on its host."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from weft.cli import options
from weft.cli.processes import child
from weft.common import env, log, signals
from weft.common.errors import ConfigError
from weft.common.folder import private_folder
from weft.common.title import set_title
from weft.config.resolved import EngineConfig
from weft.config.sections.all import FrontSection

if TYPE_CHECKING:
    from weft.cli.serve.several_hosts import HostPlace
    from weft.control.directory.host_server import HostGate, HostView
    from weft.control.directory.record import DirectoryWriter, EngineRecord

directory_option = click.option(
    "--directory",
    default=lambda: env.get("WEFT_DIRECTORY"),
    metavar="PLACE",
    help="Where engines publish themselves, and API servers find them: a folder of this host, or of a file "
    "system that all hosts share. For an engine also `port`: its own HTTP port. For an API server also "
    "http://HOST:PORT,.. of engines, or kubernetes:SERVICE. Default: the variable WEFT_DIRECTORY.",
)


@click.command(cls=options.Command)
@click.argument("file", type=click.Path())
@click.option("--group", required=True, metavar="NAME", help="Group of FILE, e.g. decode1.")
@directory_option
@click.option(
    "--advertise",
    default=lambda: env.get("WEFT_ADVERTISE") or None,
    metavar="ADDRESS",
    help="Address of this host for other hosts. Needs group-secret in FILE. Default: only processes of this "
    "host reach the group; with --join the address on the route to the head.",
)
@click.option(
    "--group-secret",
    type=click.Path(),
    help="File with the secret that all hosts share, in place of group-secret of FILE.",
)
@click.option(
    "--join-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Port at --advertise, where the other hosts of the group join. For the head of a group with `hosts` "
    "above 1.",
)
@click.option(
    "--join",
    metavar="HOST:PORT",
    help="Run the ranks of another host of the group. HOST:PORT is --advertise and --join-port of the head.",
)
@click.option(
    "--host-index",
    type=click.IntRange(0, 1023),
    metavar="N",
    help="With --join: number of this host. 0 is the head, which listens at the port of --join. So the "
    "commands of all hosts can be equal except for N.",
)
@click.option("--parent", type=int, hidden=True, help="End when this process ends.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the HTTP port.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="HTTP port with /live, /ready, /metrics and /drain; 0 for a free one. Default: no port.",
)
def engine(
    file: str,
    group: str,
    directory: str,
    advertise: str | None,
    group_secret: str | None,
    join_port: int | None,
    join: str | None,
    host_index: int | None,
    parent: int | None,
    host: str,
    port: int | None,
) -> int:
    """Run one GROUP of the topology FILE, for API servers of `weft front`.

    The group publishes its engines in the directory, and API servers find them there. A group can join, and
    leave, while API servers run. GROUP may have a number that FILE does not list: decode7 has the settings of
    decode0. SIGTERM drains the group: the engines finish their requests, within front.drain-timeout of FILE.
    When an engine process dies, the command ends with a status that is not 0. Let Kubernetes, systemd or a
    loop start the command again.

    The ranks of a group with `hosts: 2` in FILE lie on two hosts. Host 0 is the head, and needs --advertise
    and --join-port. Host 1 runs the same command with --join and --host-index 1, waits for the head, and
    outlives the head.
    """
    from weft.cli.serve.several_hosts import HostPlace
    from weft.config.alone import group_alone, settings_of
    from weft.config.models.alone import topology_of
    from weft.config.secret_file import check_secrets, warn_of_readable_keys

    if parent is not None:
        child.die_with_parent(parent)
    topology = topology_of(file, group)
    name = f"host {host_index} {group}" if host_index else f"host {group}"
    log.configure(topology.front.log_settings, name)
    warn_of_readable_keys(file)
    if (join is None) is not (host_index is None):
        raise ConfigError("--join and --host-index belong together", param="--join")
    place = HostPlace(host_index or 0, join, join_port)
    address = place.address(settings_of(topology, group).config.parallel, advertise)
    config = group_alone(topology, group, address, group_secret, place.number)
    check_secrets([config])
    return run(config, topology.front, directory, None if port is None else (host, port), place)


def run(
    config: EngineConfig,
    front: FrontSection,
    directory: str,
    http: tuple[str, int] | None,
    place: HostPlace,
) -> int:
    """Run this host's share of the group until the group has drained, or an engine process ends. Return the
    exit status.

    ``directory``: see ``directory_for_engine``. ``http``: address of the HTTP port, or None. ``place``: place
    of this host among the hosts of the group. Installs signal handlers; call from the main thread. Raise
    ConfigError.
    """
    from weft.cli.processes.joined_ranks import JoinedRanks
    from weft.cli.serve.several_hosts import open_gate
    from weft.config.hosts import engines_on
    from weft.control.directory.host_gates import JoinGate
    from weft.front.engine_port import EnginePort

    share = f"host {place.number}" if place.number else "host"
    set_title(f"{share} of {config.group}", config.served_names[0])
    child.forbid_core_dumps()
    signal.signal(signals.RESTART, signal.SIG_IGN)
    has_engines = bool(engines_on(config.parallel, place.number))
    writer = _directory(config, directory, http is not None) if has_engines else None
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOPS)
    config, gate = open_gate(config, place)
    folder = private_folder()
    port: EnginePort | None = None
    try:

        def opened(view: HostView) -> str:
            """Open the HTTP port, and return the address; "" without a port."""
            nonlocal port
            if http is None:
                return ""
            port = EnginePort(view, config.served_names[0], *http, key=env.get("WEFT_ADMIN_KEY"))
            click.echo(f"Weft engine {config.group}: http://{port.address}", err=True)
            return port.address

        if writer is not None:
            return _run_engines(config, front, writer, gate, folder, opened)
        assert isinstance(gate, JoinGate), "the head has an engine"
        ranks = JoinedRanks(config, gate, front)
        opened(ranks)
        return ranks.run()
    finally:
        signals.ignore()
        if port is not None:
            port.close()
        shutil.rmtree(folder, ignore_errors=True)


def _directory(config: EngineConfig, place: str, has_port: bool) -> DirectoryWriter:
    """Return the directory of the group. Raise ConfigError if the directory has living engines of the same
    names."""
    from weft.config.hosts import engines_on
    from weft.config.names import instance_name
    from weft.control.directory.backends import directory_for_engine
    from weft.control.directory.host_server import check_names

    directory = directory_for_engine(place, has_port)
    mine = engines_on(config.parallel, config.host.index)
    try:
        check_names(directory, [instance_name(config, replica) for replica in mine])
    except OSError as error:
        raise ConfigError(f"--directory {place}: {error}", param="--directory") from error
    return directory


def facts_of(config: EngineConfig) -> EngineRecord:
    """Return the part of the records that is equal for all engines of a group."""
    from weft.config.fingerprint import fingerprint
    from weft.control.directory.record import EngineRecord
    from weft.types.messages import VERSION

    return EngineRecord(
        name="",
        incarnation=0,
        endpoint="",
        model=config.served_names[0],
        fingerprint="" if config.transfer.role == "encode" else fingerprint(config),
        group=config.group,
        base=config.base,
        role=config.transfer.role,
        tower=config.kv.media is not None and config.kv.media.tower,
        messages=VERSION,
    )


def _run_engines(
    config: EngineConfig,
    front: FrontSection,
    directory: DirectoryWriter,
    gate: HostGate | None,
    folder: Path,
    opened: Callable[[HostView], str],
) -> int:
    """Run the engines of this host. Return the exit status. ``opened`` opens the HTTP port, and returns the
    address."""
    from weft.cli.serve.server import Operations
    from weft.control.directory.host_server import HostServer
    from weft.engine.ranks.processes import start_process
    from weft.engine.server.engine_processes import EngineProcesses

    operations = Operations((config,), False, start_process)
    try:
        group = EngineProcesses(config, folder, front.log_settings, operations.start)
        timeouts = front.drain_timeout, front.engine_timeout
        server = HostServer(group, directory, facts_of(config), *timeouts, gate, config.parallel.rank_timeout)
        server.announce(opened(server))
        return server.run()
    finally:
        operations.close()
