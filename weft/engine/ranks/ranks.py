"""The worker processes of a group on one host."""

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
from weft.config.hosts import replica_spans
from weft.config.resolved import EngineConfig
from weft.config.sections.all import ParallelSection
from weft.engine.ranks.processes import ProcessCommand, Start, start_process

log = get_logger(__name__)


class Ranks(Protocol):
    """The worker processes of one group on the engine's host, as seen by the engine process."""

    outlive: bool
    """True if the processes outlive the engine process and serve the next engine."""

    def spawn(self, rank: int) -> bool:
        """Start the process of ``rank`` unless already running. Return True if already running. Does not wait
        for the start.
        """

    def keeps(self, rank: int) -> bool:
        """Return True if the process of ``rank`` is on the local host."""

    def dead(self) -> list[tuple[int, str]]:
        """Return (rank, description of the end) of each ended process. Does not block. Safe from any
        thread.
        """

    def kill(self, rank: int) -> None:
        """Kill the rank's process at once and forget the process."""

    def close(self, seconds: float) -> None:
        """Release the processes when the engine process ends. Processes with ``outlive`` False have received
        a shutdown and get ``seconds`` to end.
        """


START_S = 60.0
"""Maximum seconds for the system to start a process."""


class RankProcesses:
    """Starts and ends worker processes and reports ended ones. The processes end with the owning process in
    every case.

    Not thread-safe, except ``dead``.
    """

    outlive = False

    def __init__(
        self, config: EngineConfig, address: str, log_level: str, start: Start = start_process
    ) -> None:
        """``address``: the control channel at which ranks say hello.

        ``log_level``: of the processes. ``start``: starts a process.
        """
        self._begin = start
        self._engine, self._config = config, msgspec.msgpack.encode(config)
        self._address = address
        self._level = log_level
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        # The kernel kills a child at the end of the starting thread. The thread here lives as long as the
        # object.
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="weft-ranks")

    def use(self, config: EngineConfig) -> None:
        """Start all later processes with the settings ``config``."""
        self._engine, self._config = config, msgspec.msgpack.encode(config)

    def spawn(self, rank: int) -> bool:
        """Start the process of ``rank`` unless already running. Return True if already running. Does not wait
        for the hello.

        Raises EngineDead if the system cannot start a process within ``START_S`` seconds.
        """
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
        """Return True if this object has started the process of ``rank`` and has not killed the process."""
        return rank in self._running

    def ended(self) -> list[tuple[int, int]]:
        """Return (rank, exit status) of every ended process."""
        each = [(rank, process.poll()) for rank, process in list(self._running.items())]
        return [(rank, status) for rank, status in each if status is not None]

    def ranks(self) -> list[int]:
        """Return the ranks spawned and not killed."""
        return list(self._running)

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to the rank's process, which stays registered."""
        self._running[rank].send_signal(number)

    def pid(self, rank: int) -> int:
        """Return the process id of ``rank``."""
        return self._running[rank].pid

    def dead(self) -> list[tuple[int, str]]:
        """Return (rank, description of the end) of each ended process. See ``Ranks``."""
        return [(rank, end_of(status)) for rank, status in self.ended()]

    def kill(self, rank: int) -> None:
        """Kill the rank's process at once, wait for the end and forget the process.

        Unknown ranks are ignored.
        """
        process = self._running.pop(rank, None)
        if process is not None:
            process.kill()
            process.wait(30.0)

    def close(self, seconds: float) -> None:
        """Wait up to ``seconds`` for all ranks, which have received a shutdown, then kill the rest and forget
        all.
        """
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
        return self._begin(ProcessCommand("rank_main", arguments, self._config, environment))


def end_of(status: int) -> str:
    """Return a description of the exit status of a process."""
    return f"its process ended with {f'signal {-status}' if status < 0 else f'status {status}'}"


def threads_each(config: EngineConfig, cores: int) -> int:
    """Return the CPU threads of each rank: the setting, or the host's ``cores`` divided among all ranks of
    all groups.

    With more threads than cores, spinning threads would take cores from each other (docs/adr/0007).
    """
    return config.runner.threads or max(1, cores // config.ranks_beside)


def rank_address(config: EngineConfig) -> str:
    """Return the address at which supervised ranks say hello, equal for all successive engine processes of
    the replica. A replica over several hosts has no such address (see ``weft.types.rendezvous``)."""
    return f"ipc://{config.socket_folder}/ranks{config.replica}"


def are_supervised(parallel: ParallelSection, replica: int) -> bool:
    """Return True if the server's rank supervisor owns the workers on the engine's host. Such workers outlive
    an engine process.
    """
    return parallel.tensor_parallel_size > 1 and not replica_spans(parallel, replica)


def ranks_of(replica: int, tensor: int) -> Sequence[int]:
    """Return the ranks of a replica. The first rank is the engine's."""
    return range(replica * tensor, (replica + 1) * tensor)
