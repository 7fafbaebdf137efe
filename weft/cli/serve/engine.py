"""``weft engine``: one group of a topology, alone on its host."""

from __future__ import annotations

import shutil
import signal

import click

from weft.cli import options
from weft.cli.processes import child
from weft.common import env, log, signals
from weft.common.errors import ConfigError
from weft.common.folder import private_folder
from weft.common.title import set_title
from weft.config.resolved import EngineConfig
from weft.config.sections.all import FrontSection

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
    "host reach the group.",
)
@click.option(
    "--group-secret",
    type=click.Path(),
    help="File with the secret that all hosts share, in place of group-secret of FILE.",
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
    """
    from weft.config.alone import group_alone
    from weft.config.secret_file import check_secrets, warn_of_readable_keys
    from weft.config.topology import read_topology

    if parent is not None:
        child.die_with_parent(parent)
    topology = read_topology(file)
    log.configure(topology.front.log_settings, f"host {group}")
    warn_of_readable_keys(file)
    config = group_alone(topology, group, advertise, group_secret)
    check_secrets([config])
    return run(config, topology.front, directory, None if port is None else (host, port))


def run(config: EngineConfig, front: FrontSection, place: str, http: tuple[str, int] | None) -> int:
    """Run the group until it has drained, or an engine process ends. Return the exit status.

    ``place``: see ``directory_for_engine``. ``http``: address of the HTTP port, or None. Installs signal
    handlers; call from the main thread. Raise ConfigError.
    """
    from weft.cli.serve.server import Operations
    from weft.config.fingerprint import fingerprint
    from weft.config.names import instance_name
    from weft.control.directory.backends import directory_for_engine
    from weft.control.directory.host_server import HostServer, check_names
    from weft.control.directory.record import EngineRecord
    from weft.engine.ranks.processes import start_process
    from weft.engine.server.engine_processes import EngineProcesses
    from weft.front.engine_port import EnginePort

    set_title(f"host of {config.group}", config.served_names[0])
    child.forbid_core_dumps()
    signal.signal(signals.RESTART, signal.SIG_IGN)
    directory = directory_for_engine(place, http is not None)
    try:
        check_names(directory, [instance_name(config, n) for n in range(config.parallel.data_parallel_size)])
    except OSError as error:
        raise ConfigError(f"--directory {place}: {error}", param="--directory") from error
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOPS)
    folder = private_folder()
    operations = Operations((config,), False, start_process)
    server_port = None
    try:
        facts = EngineRecord(
            name="",
            incarnation=0,
            endpoint="",
            model=config.served_names[0],
            fingerprint="" if config.transfer.role == "encode" else fingerprint(config),
            group=config.group,
            base=config.base,
            role=config.transfer.role,
        )
        group = EngineProcesses(config, folder, front.log_settings, operations.start)
        server = HostServer(group, directory, facts, front.drain_timeout, front.engine_timeout)
        if http is not None:
            server_port = EnginePort(server, config.served_names[0], *http, key=env.get("WEFT_ADMIN_KEY"))
            server.announce(server_port.address)
            click.echo(f"Weft engine {config.group}: http://{server_port.address}", err=True)
        return server.run()
    finally:
        signals.ignore()
        if server_port is not None:
            server_port.close()
        operations.close()
        shutil.rmtree(folder, ignore_errors=True)
