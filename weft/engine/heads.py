"""Starts and ends the head processes of a server, and their workers, which outlive heads."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from weft.cluster.table import Member
from weft.config.gpus import gpu_environment, head_rank
from weft.config.hosts import uses_board
from weft.config.names import instance_name
from weft.config.resolved import EngineConfig
from weft.engine.processes import Command, Start, start_process
from weft.engine.rank_supervisor import RankSupervisor
from weft.engine.ranks import RankProcesses, are_supervised, rank_address
from weft.links.link import Address
from weft.parallel.remote import REFUSED, RemoteHead, RemoteHeads

LEAVE_S = 3.0
"""Least seconds that other hosts get to read on the board that the server ends."""


class HeadProcesses:
    """One group: a head for each replica. Heads live no longer than the thread that starts them, which is a
    thread of ``Spares`` where they waited before.

    What starts them anew is decided elsewhere: see ``weft.cluster``.
    """

    def __init__(
        self, config: EngineConfig, folder: Path, log_level: str, start: Start = start_process
    ) -> None:
        """``folder``: where heads listen, in a folder of this group's own; only this user may enter it.

        Raises ConfigError when other hosts cannot reach this one.
        """
        parallel = config.parallel
        self._replicas = {
            instance_name(config, replica): replica for replica in range(parallel.data_parallel_size)
        }
        together = parallel.enable_expert_parallel and parallel.data_parallel_size > 1
        member = Member(
            domain=(config.group or "all") if together else "",
            group=config.group,
            role=config.transfer.role,
        )
        self.members = dict.fromkeys(self._replicas, member)
        """The names of the heads, in order, and what their owner must know of each."""
        self._remote = RemoteHeads(config) if uses_board(config.parallel) else None
        self._running: dict[str, subprocess.Popen[bytes] | RemoteHead] = {}
        self._ended: list[subprocess.Popen[bytes] | RemoteHead] = []
        self._folder = group_folder(folder)
        self._local = LocalHeads(config, self._folder, log_level, start)

    def start(self, name: str, incarnation: int) -> Address:
        """Starts a head; does not wait for it. Every start has an address of its own, so nothing that was
        meant for one head reaches the next.
        """
        replica = self._replicas[name]
        domain = self.members[name].domain
        if self._remote is not None and replica in self._remote:
            remote = self._remote.start(replica)
            self._running[name] = remote
            return Address(remote.endpoint, remote, self._remote.keys, incarnation, domain=domain)
        endpoint = f"ipc://{self._folder}/head-{replica}-{incarnation}"
        process = self._local.start(replica, endpoint)
        self._running[name] = process
        return Address(endpoint, process, None, incarnation, domain=domain)

    def kill(self, name: str, incarnation: int) -> None:
        """Ends the process of a head that is dead or stopped answering, before the next one starts."""
        old = self._running.pop(name, None)
        if old is not None:
            old.kill()  # also wakes one that was stopped, for its end
            self._ended = [one for one in self._ended if one.poll() in (None, REFUSED)]
            self._ended.append(old)

    def close(self, seconds: float, status: int = 0) -> list[int]:
        """Waits ``seconds`` for all heads, which were told to stop, then kills the rest; then their workers.
        The heads' statuses.

        ``status``: with which the server ends; other hosts are told.
        """
        until = time.monotonic() + seconds
        heads = [*self._running.values(), *self._ended]
        ends = [
            close_head(head, max(until - time.monotonic(), 0))
            for head in heads
            if not isinstance(head, RemoteHead)
        ]
        self._local.close(max(until - time.monotonic(), 0))
        if self._remote is not None:
            ends += [ended for head in heads if isinstance(head, RemoteHead) and (ended := head.poll())]
            self._remote.close(max(until - time.monotonic(), LEAVE_S), status)
        return ends


class HeadGroups:
    """The heads of all groups of a server: see ``HeadProcesses``."""

    def __init__(
        self, groups: Iterable[EngineConfig], folder: Path, log_level: str, start: Start = start_process
    ) -> None:
        """``groups`` have names of their own, unless there is one only. See ``HeadProcesses``."""
        self._of: dict[str, HeadProcesses] = {}
        self._groups: list[HeadProcesses] = []
        self.members: dict[str, Member] = {}
        """The names of all heads, in order, and what their owner must know of each."""
        try:
            for config in groups:
                group = HeadProcesses(config, folder, log_level, start)
                self._groups.append(group)
                self._of.update(dict.fromkeys(group.members, group))
                self.members.update(group.members)
        except BaseException:
            self.close(0.0, 2)
            raise

    def start(self, name: str, incarnation: int) -> Address:
        """Starts a head; does not wait for it."""
        return self._of[name].start(name, incarnation)

    def kill(self, name: str, incarnation: int) -> None:
        """Ends the process of a head that is dead or stopped answering, before the next one starts."""
        self._of[name].kill(name, incarnation)

    def close(self, seconds: float, status: int = 0) -> list[int]:
        """``HeadProcesses.close`` of all groups, in ``seconds`` together. The heads' statuses."""
        until = time.monotonic() + seconds
        return [
            end for group in self._groups for end in group.close(max(until - time.monotonic(), 0.0), status)
        ]


def group_folder(folder: Path) -> Path:
    """A new folder in ``folder`` for the sockets and files of one group: two groups never share a name."""
    for number in itertools.count():
        with contextlib.suppress(FileExistsError):
            result = folder / f"g{number}"
            result.mkdir(mode=0o700)
            return result
    raise AssertionError("unreachable")


class LocalHeads:
    """Starts the heads of this host, and has the rank supervisor for their workers. Used from the main
    thread.
    """

    def __init__(
        self, config: EngineConfig, folder: Path, log_level: str, start: Start = start_process
    ) -> None:
        """``folder``: for the heads' files; only this user may enter it."""
        self._start = start
        self._config = config
        self._folder = folder
        self._level = log_level
        self._rank_supervisor: RankSupervisor | None = None
        """Made when the first head with workers starts."""

    def start(self, replica: int, endpoint: str, incarnation: int = 0) -> subprocess.Popen[bytes]:
        """A head that will listen at ``endpoint``; does not wait for it. ``incarnation``: see
        ``EngineConfig``.
        """
        pipe = None
        parallel = self._config.parallel
        if are_supervised(parallel, replica):
            self._rank_supervisor = self._rank_supervisor or RankSupervisor(
                parallel.data_parallel_size, self._workers
            )
            pipe = self._rank_supervisor.link(replica)
        own = msgspec.structs.replace(self._of(replica), incarnation=incarnation)
        return start_head(own, endpoint, self._level, pipe, self._start)

    def close(self, seconds: float) -> None:
        """Waits ``seconds`` for workers, which were told to stop, then kills the rest."""
        if self._rank_supervisor is not None:
            self._rank_supervisor.close(seconds)
            self._rank_supervisor = None

    def _of(self, replica: int) -> EngineConfig:
        return msgspec.structs.replace(self._config, replica=replica, domain=str(self._folder))

    def _workers(self, replica: int) -> RankProcesses:
        config = self._of(replica)
        return RankProcesses(config, rank_address(config), self._level, self._start)


def start_head(
    config: EngineConfig,
    endpoint: str,
    log_level: str,
    pipe: Connection | None = None,
    start: Start = start_process,
) -> subprocess.Popen[bytes]:
    """Starts a head that will listen at ``endpoint`` and die with this process. Does not wait for it.

    ``pipe``: to the rank supervisor; it is the head's from now on, and closed here. Must be called from
    the main thread: the kernel ties the child to the thread that made it.
    """
    descriptors = () if pipe is None else (pipe.fileno(),)
    environment = gpu_environment(config, head_rank(config))
    setup = msgspec.msgpack.encode(config)
    try:
        return start(Command("head_main", (endpoint, log_level), setup, environment, descriptors))
    finally:
        if pipe is not None:
            pipe.close()


def close_head(head: subprocess.Popen[bytes], seconds: float) -> int:
    """Gives a head ``seconds`` to end (it was told to stop), then kills it. Returns its exit status."""
    try:
        return head.wait(seconds)
    except subprocess.TimeoutExpired:
        head.kill()
        return head.wait()
