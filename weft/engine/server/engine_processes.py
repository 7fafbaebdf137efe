"""Start and end the engine processes of a server, and the workers, which outlive engine processes."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import time
from collections.abc import Collection, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from weft.common.cores import usable_cores
from weft.common.errors import ConfigError, InvalidRequest, Unavailable, WeftError
from weft.common.log import get_logger
from weft.common.signals import is_suspended
from weft.config.alone import renewed
from weft.config.gpus import engine_rank, gpu_environment, gpus_here
from weft.config.hosts import engines_on
from weft.config.names import instance_name
from weft.config.resolve import RANKS_EACH_CORE
from weft.config.resolved import EngineConfig
from weft.control.links.link import Address
from weft.control.processes.table import Member
from weft.engine.ranks.processes import ProcessCommand, Start, start_process
from weft.engine.ranks.rank_supervisor import RankSupervisor
from weft.engine.ranks.ranks import RankProcesses, are_supervised, rank_address
from weft.parallel.address import tcp
from weft.parallel.secret import read_keys

log = get_logger(__name__)

REFUSED = 2
"""Exit status of a process with a configuration error."""


class EngineProcesses:
    """The processes of one group on this host: an engine process for each replica. An engine process ends
    with the starting thread: the main thread, or a thread of ``Spares`` for an engine started in advance.

    ``weft.control.processes`` decides when an engine process is started again.
    """

    def __init__(
        self, config: EngineConfig, folder: Path, log_level: str, start: Start = start_process
    ) -> None:
        """``folder``: engine processes listen in a new subfolder of ``folder``.

        No other user may have access to ``folder``. ``log_level``: of the processes. ``start``: starts a
        process.
        """
        parallel = config.parallel
        mine = engines_on(parallel, config.host.index)
        self._replicas = {instance_name(config, replica): replica for replica in mine}
        together = parallel.enable_expert_parallel and parallel.data_parallel_size > 1
        member = Member(
            expert_group=(config.group or "all") if together else "",
            group=config.group,
            role=config.transfer.role,
            base=config.base,
            tower=config.kv.media is not None and config.kv.media.tower,
        )
        self.config = config
        """Settings of the group."""
        self.members = dict.fromkeys(self._replicas, member)
        """Name of each engine process, in order, with the facts for the owner of the engines."""
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ended: list[subprocess.Popen[bytes]] = []
        self._folder = group_folder(folder)
        self._local = LocalEngines(config, self._folder, log_level, start)

    def use(self, name: str, config: EngineConfig) -> EngineConfig:
        """Start all later processes ``name`` with the settings ``config``. Return the former settings."""
        self.config = config
        return self._local.use(self._replicas[name], config)

    def start(self, name: str, incarnation: int) -> Address:
        """Start the engine process ``name`` and return the address.

        Does not wait for the start. Raises OSError.

        Every start has a new address, so messages for an earlier engine process never reach a later engine.
        """
        replica = self._replicas[name]
        expert_group = self.members[name].expert_group
        if (host := self.config.parallel.advertise) is not None:
            return self._start_for_hosts(name, incarnation, host)
        endpoint = f"ipc://{self._folder}/head-{replica}-{incarnation}"
        process = self._local.start(replica, endpoint, start_id=incarnation)
        self._running[name] = process
        return Address(endpoint, process, None, incarnation, expert_group=expert_group)

    def _start_for_hosts(self, name: str, incarnation: int, host: str) -> Address:
        """Start the engine process ``name`` at a port of ``host`` that the system chooses. Raises OSError."""
        file = self._folder / f"address-{incarnation:x}"
        process = self._local.start(
            self._replicas[name], tcp(host, "*"), start_id=incarnation, address_file=str(file)
        )
        self._running[name] = process

        def endpoint() -> str | None:
            return file.read_text() if file.exists() else None

        assert self.config.parallel.group_secret is not None, "checked when the configuration was resolved"
        keys = read_keys(self.config.parallel.group_secret)
        return Address(endpoint, process, keys, incarnation, expert_group=self.members[name].expert_group)

    def is_suspended(self, name: str) -> bool:
        """Return True if the engine process ``name`` runs and is suspended (SIGSTOP)."""
        process = self._running.get(name)
        return process is not None and is_suspended(process.pid)

    def kill(self, name: str, incarnation: int) -> None:
        """Kill a dead or hung engine process, before the next engine starts.

        Unknown names are ignored. ``close`` still returns the status of a process that refused to start.
        """
        old = self._running.pop(name, None)
        if old is not None:
            old.kill()  # also ends a stopped (SIGSTOP) process
            # Keep processes that refused to start, because `close` returns their statuses.
            self._ended = [one for one in self._ended if one.poll() in (None, REFUSED)]
            self._ended.append(old)

    def close(self, seconds: float) -> list[int]:
        """End the processes of the group. The engine processes have received a shutdown.

        Wait up to ``seconds`` for the engine processes and kill the rest. Then end the workers.

        Return the exit status of each engine process. Statuses of replaced engine processes may be included.
        """
        until = time.monotonic() + seconds
        engines = [*self._running.values(), *self._ended]
        ends = [close_engine(engine, max(until - time.monotonic(), 0)) for engine in engines]
        # Workers end last: an engine process sends its workers the shutdown.
        self._local.close(max(until - time.monotonic(), 0))
        return ends


class EngineGroups:
    """The engine processes of all groups of a server: see ``EngineProcesses``."""

    def __init__(
        self, groups: Iterable[EngineConfig], folder: Path, log_level: str, start: Start = start_process
    ) -> None:
        """Prepare all groups. No engine process is started.

        Each group gets a new subfolder of ``folder``. No other user may have access to ``folder``. ``groups``
        need distinct names, and nobody checks the names. A single group may have no name. ``log_level``: of
        the processes. ``start``: starts a process. After an error, the groups made so far are closed.
        """
        self._of: dict[str, EngineProcesses] = {}
        self._groups: list[EngineProcesses] = []
        self._setup = folder, log_level, start
        self._known: dict[str, EngineConfig] = {}
        """Name of every group so far -> its settings. A name outlives its last group."""
        self._prepared: dict[str, EngineConfig] = {}
        """Group -> its new settings, of the last ``prepare``."""
        self._former: dict[str, EngineConfig] = {}
        """Name of an engine process with new settings -> its former settings."""
        self._ends: list[int] = []
        """Exit statuses of the engine processes of groups that have ended."""
        self.members: dict[str, Member] = {}
        """Name of every engine process, in order, with the facts for the owner of the engines."""
        try:
            for config in groups:
                self._open(config)
        except BaseException:
            self.close(0.0)
            raise

    def _open(self, config: EngineConfig) -> None:
        """Add a group."""
        group = EngineProcesses(config, *self._setup)
        self._known[config.group] = config
        self._groups.append(group)
        self._of.update(dict.fromkeys(group.members, group))
        self.members.update(group.members)

    def add(self, groups: Sequence[str], like: str) -> None:
        """Prepare ``groups`` with the settings of the group ``like``, which may have left. Start nothing.

        Raises Unavailable, without a change, if GPUs or cores are too few for all ``groups``.
        """
        config = self._known[like]
        ranks = config.parallel.layout.ranks
        used = {gpu for one in self._groups for gpu in one.config.gpus}
        free = [gpu for gpu in gpus_here(config.parallel, config.device) if gpu not in used]
        if config.device == "cuda" and len(free) < len(groups) * ranks:
            raise Unavailable(
                f"{len(groups)} more groups need {len(groups) * ranks} free GPUs, and {len(free)} are free; "
                "GPUs of a group that drains are free when the group has ended"
            )
        total = sum(one.config.parallel.layout.ranks for one in self._groups) + len(groups) * ranks
        if config.device == "cpu" and total > RANKS_EACH_CORE * usable_cores():
            raise Unavailable(f"{total} ranks are too many for {usable_cores()} CPU cores")
        for number, group in enumerate(groups):
            gpus = tuple(free[number * ranks : (number + 1) * ranks])
            self._open(msgspec.structs.replace(config, group=group, gpus=gpus))

    def forget(self, name: str) -> None:
        """Drop an engine that has left the server. With the last engine of its group, the group ends."""
        group = self._of.pop(name)
        del self.members[name]
        if group not in self._of.values():
            self._groups.remove(group)
            self._ends += group.close(0.0)

    def prepare(self, topology: str, names: Collection[str]) -> None:
        """See ``Starter``."""
        present = [group.config for group in self._groups]
        try:
            new = renewed(topology, present, {self._of[name].config.group for name in names})
        except ConfigError as error:
            raise InvalidRequest(error.message, param="topology") from error
        except (WeftError, OSError):
            raise
        except Exception as error:  # of a library: an operator's text must not end the server
            log.exception("the topology of a restart cannot be resolved")
            what = f"the topology cannot be resolved ({type(error).__name__}); the server's log has more"
            raise InvalidRequest(what, param="topology") from error
        self._prepared, self._former = new, {}

    def use(self, names: Collection[str], new: bool) -> None:
        """See ``Starter``."""
        for name in names:
            group = self._of.get(name)
            # A group that has joined since ``prepare`` keeps its settings.
            if group is None or (config := self._settings(name, group, new)) is None:
                continue
            former = group.use(name, config)
            if new:
                self._former[name] = former
            self._known[config.group] = config

    def _settings(self, name: str, group: EngineProcesses, new: bool) -> EngineConfig | None:
        return self._prepared.get(group.config.group) if new else self._former.pop(name, None)

    def start(self, name: str, incarnation: int) -> Address:
        """Start an engine process and return the address. Does not wait for the start."""
        return self._of[name].start(name, incarnation)

    def kill(self, name: str, incarnation: int) -> None:
        """Kill a dead or hung engine process, before the next engine starts."""
        self._of[name].kill(name, incarnation)

    def close(self, seconds: float) -> list[int]:
        """Call ``EngineProcesses.close`` for all groups, within ``seconds`` in total. Return the exit
        statuses of the engine processes.
        """
        until = time.monotonic() + seconds
        closed = [end for group in self._groups for end in group.close(max(until - time.monotonic(), 0.0))]
        return [*self._ends, *closed]


def group_folder(folder: Path) -> Path:
    """Create a new folder in ``folder`` for the sockets and files of one group and return the path. Two
    groups never share a folder.
    """
    for number in itertools.count():
        with contextlib.suppress(FileExistsError):
            result = folder / f"g{number}"
            result.mkdir(mode=0o700)
            return result
    raise AssertionError("unreachable")


class LocalEngines:
    """Starts the engine processes of the local host, and owns the rank supervisor of the workers. Used from
    the main thread.
    """

    def __init__(
        self, config: EngineConfig, folder: Path, log_level: str, start: Start = start_process
    ) -> None:
        """``folder``: for the files of the engine processes.

        No other user may have access to ``folder``. ``start``: starts a process.
        """
        self._start = start
        self._config = config
        self._of_replica: dict[int, EngineConfig] = {}
        """Settings of the replicas that have other settings than ``_config``."""
        self._folder = folder
        self._level = log_level
        self._rank_supervisor: RankSupervisor | None = None
        """Created when the first engine process with supervised workers starts."""

    def use(self, replica: int, config: EngineConfig) -> EngineConfig:
        """Start all later processes of ``replica`` with the settings ``config``. Return its former ones."""
        former = self._of_replica.get(replica, self._config)
        self._of_replica[replica] = config
        if self._rank_supervisor is not None:
            self._rank_supervisor.use(self._of)
        return former

    def start(
        self, replica: int, endpoint: str, address_file: str = "", start_id: int = 0
    ) -> subprocess.Popen[bytes]:
        """Start an engine process at ``endpoint`` and return the process.

        Does not wait for the start. Raises OSError.

        The first start of a replica with supervised workers creates the rank supervisor. ``address_file``,
        ``start_id``: see ``EngineConfig``.
        """
        pipe = None
        parallel = self._config.parallel
        if are_supervised(parallel, replica):
            self._rank_supervisor = self._rank_supervisor or RankSupervisor(
                parallel.data_parallel_size, self._workers
            )
            pipe = self._rank_supervisor.link(replica)
        own = msgspec.structs.replace(self._of(replica), address_file=address_file, start_id=start_id)
        return start_engine(own, endpoint, self._level, pipe, self._start)

    def close(self, seconds: float) -> None:
        """Wait up to ``seconds`` for workers, which have received a shutdown, then kill the rest."""
        if self._rank_supervisor is not None:
            self._rank_supervisor.close(seconds)
            self._rank_supervisor = None

    def _of(self, replica: int) -> EngineConfig:
        config = self._of_replica.get(replica, self._config)
        return msgspec.structs.replace(config, replica=replica, socket_folder=str(self._folder))

    def _workers(self, replica: int) -> RankProcesses:
        config = self._of(replica)
        return RankProcesses(config, rank_address(config), self._level, self._start)


def start_engine(
    config: EngineConfig,
    endpoint: str,
    log_level: str,
    pipe: Connection | None = None,
    start: Start = start_process,
) -> subprocess.Popen[bytes]:
    """Start an engine process at ``endpoint`` and return the process, which ends with the calling process.

    Does not wait for the start. Raises OSError.

    ``pipe``: connection to the rank supervisor, owned by the engine process from now on and closed here, also
    after an error. Call from the main thread: the kernel ties a child to the starting thread.
    """
    descriptors = () if pipe is None else (pipe.fileno(),)
    environment = gpu_environment(config, engine_rank(config))
    setup = msgspec.msgpack.encode(config)
    try:
        return start(ProcessCommand("engine_main", (endpoint, log_level), setup, environment, descriptors))
    finally:
        if pipe is not None:
            pipe.close()


def close_engine(engine: subprocess.Popen[bytes], seconds: float) -> int:
    """Wait up to ``seconds`` for an engine process, which has received a shutdown, then kill the engine.
    Return the exit status.
    """
    try:
        return engine.wait(seconds)
    except subprocess.TimeoutExpired:
        engine.kill()
        return engine.wait()
