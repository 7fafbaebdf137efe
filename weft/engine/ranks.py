"""The worker processes of a group on this host."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from weft.common.errors import EngineDead
from weft.common.log import get_logger
from weft.config.gpus import gpu_environment
from weft.config.hosts import meeting_place, replica_spans, uses_board
from weft.config.resolved import EngineConfig
from weft.config.sections import ParallelSection
from weft.engine.processes import Command, Start, start_process
from weft.parallel.address import own_address, tcp

log = get_logger(__name__)


class Ranks(Protocol):
    """The worker processes of one group on this host, as its head sees them."""

    outlive: bool
    """Whether the processes outlive the head, for the next one."""

    def spawn(self, rank: int) -> bool:
        """Starts the process of ``rank``, unless it runs; returns whether it ran. Does not wait for it."""

    def keeps(self, rank: int) -> bool:
        """Whether the process of ``rank`` is on this host."""

    def dead(self) -> list[tuple[int, str]]:
        """(rank, how it ended) of processes that have ended. Never waits. From any thread."""

    def kill(self, rank: int) -> None:
        """Kills the rank's process at once, and forgets it."""

    def close(self, seconds: float) -> None:
        """Called when the head ends. Ranks that do not outlive it were told to stop; they get ``seconds`` for
        that.
        """


START_S = 60.0
"""Seconds within which the system starts a process."""


class RankProcesses:
    """Starts and ends ranks, and tells which have ended. They end with this process, however it ends.

    Not thread-safe, but for ``dead``.
    """

    outlive = False

    def __init__(
        self, config: EngineConfig, address: str, log_level: str, start: Start = start_process
    ) -> None:
        """``address``: the control channel where ranks say hello."""
        self._begin = start
        self._engine, self._config = config, msgspec.msgpack.encode(config)
        self._address = address
        self._level = log_level
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        # The kernel ends a child with the thread that made it: this one runs as long as this object.
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="weft-ranks")

    def spawn(self, rank: int) -> bool:
        """Starts the process of ``rank``, unless it runs; returns whether it ran. Does not wait for it."""
        process = self._running.get(rank)
        if process is not None and process.poll() is None:
            return True
        try:
            self._running[rank] = self._maker.submit(self._start, rank).result(START_S)
        except TimeoutError:
            slow = (
                f"the process of rank {rank} could not be started within {START_S:g} s: the host is too busy"
            )
            raise EngineDead(slow) from None
        return False

    def keeps(self, rank: int) -> bool:
        """Whether the process of ``rank`` is on this host."""
        return rank in self._running

    def ended(self) -> list[tuple[int, int]]:
        """(rank, status) of every process that has ended."""
        each = [(rank, process.poll()) for rank, process in list(self._running.items())]
        return [(rank, status) for rank, status in each if status is not None]

    def ranks(self) -> list[int]:
        """Ranks that were spawned and not killed."""
        return list(self._running)

    def send_signal(self, rank: int, number: int) -> None:
        """Sends a signal to the rank's process, which stays known."""
        self._running[rank].send_signal(number)

    def pid(self, rank: int) -> int:
        """Process id of ``rank``."""
        return self._running[rank].pid

    def dead(self) -> list[tuple[int, str]]:
        """See ``Ranks``."""
        return [(rank, end_of(status)) for rank, status in self.ended()]

    def kill(self, rank: int) -> None:
        """Kills the rank's process at once, and forgets it."""
        process = self._running.pop(rank, None)
        if process is not None:
            process.kill()
            process.wait(30.0)

    def close(self, seconds: float) -> None:
        """Waits ``seconds`` for all ranks, which were told to stop, then kills the rest."""
        until = time.monotonic() + seconds
        for rank, process in list(self._running.items()):
            try:
                process.wait(max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                if seconds:
                    log.warning("rank %d did not end and is killed", rank)
            self.kill(rank)
        self._maker.shutdown(wait=False)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        arguments = self._address, str(rank), self._level
        environment = gpu_environment(self._engine, rank)
        return self._begin(Command("rank_main", arguments, self._config, environment))


def end_of(status: int) -> str:
    """How a process ended, in words, from its exit status."""
    return f"its process ended with {f'signal {-status}' if status < 0 else f'status {status}'}"


def threads_each(config: EngineConfig, cores: int) -> int:
    """CPU threads of each rank: as set, or its host's ``cores`` divided among all ranks of all groups.

    More threads than cores would spin for each other's core (docs/adr/0007).
    """
    return config.runner.threads or max(1, cores // config.ranks_beside)


def rank_address(config: EngineConfig) -> str:
    """Where supervised ranks say hello: the same address for all heads that their replica has over time.

    Not where a replica, one of several, lies over hosts: each of its heads listens elsewhere, see the board.
    """
    if not replica_spans(config.parallel, config.replica):
        return f"ipc://{config.domain}/ranks{config.replica}"
    host, port = meeting_place(config.parallel)
    return tcp(own_address(host, port), port)


def are_supervised(parallel: ParallelSection, replica: int) -> bool:
    """Whether the workers on the head's host belong to the server's rank supervisor, and outlive the head."""
    moves = uses_board(parallel) and replica_spans(parallel, replica)
    return parallel.tensor_parallel_size > 1 and not moves


def ranks_of(replica: int, tensor: int) -> Sequence[int]:
    """The ranks of a replica. The first one is its head."""
    return range(replica * tensor, (replica + 1) * tensor)
