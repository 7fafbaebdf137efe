"""The worker processes of a group on this host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from weft.common import env
from weft.common.log import get_logger
from weft.config.gpus import gpu_environment
from weft.config.resolved import EngineConfig

log = get_logger(__name__)


class RankProcesses:
    """Starts ranks, says which ended, ends them. They end with this process, however it ends.

    Not thread-safe, but for ``dead``.
    """

    def __init__(self, config: EngineConfig, address: str, log_level: str) -> None:
        """``address``: of the control channel that they say hello at."""
        self._engine, self._config = config, msgspec.msgpack.encode(config)
        self._address, self._level = address, log_level
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        # The kernel ties a child's life to the thread that made it: to one that lives as long as this.
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="weft-ranks")

    def spawn(self, rank: int) -> None:
        """Starts the process of ``rank``, in place of one that was killed. Does not wait for it."""
        self._running[rank] = self._maker.submit(self._start, rank).result(60.0)

    def keeps(self, rank: int) -> bool:
        """Whether the process of ``rank`` is on this host."""
        return rank in self._running

    def ended(self) -> list[tuple[int, int]]:
        """(rank, status) of every process that has ended."""
        each = [(rank, process.poll()) for rank, process in list(self._running.items())]
        return [(rank, status) for rank, status in each if status is not None]

    def ranks(self) -> list[int]:
        """Those that were spawned and not killed."""
        return list(self._running)

    def send_signal(self, rank: int, number: int) -> None:
        """To its process, which stays on the books."""
        self._running[rank].send_signal(number)

    def pid(self, rank: int) -> int:
        """Of the rank's process."""
        return self._running[rank].pid

    def dead(self) -> tuple[int, str] | None:
        """The first rank whose process has ended, and how."""
        for rank, process in list(self._running.items()):
            status = process.poll()
            if status is not None:
                how = f"signal {-status}" if status < 0 else f"status {status}"
                return rank, f"its process ended with {how}"
        return None

    def kill(self, rank: int) -> None:
        """Ends the rank's process at once, stopped or not, and takes it off the books."""
        process = self._running.pop(rank, None)
        if process is not None:
            process.kill()
            process.wait(30.0)

    def close(self, seconds: float) -> None:
        """Gives all of them, who were told to stop, ``seconds`` to end; then kills them."""
        for rank, process in list(self._running.items()):
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                log.warning("rank %d did not end and is killed", rank)
            self.kill(rank)
        self._maker.shutdown(wait=False)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "weft.launch.rank_main"]
        command += [str(os.getpid()), self._address, str(rank), self._level]
        environment = env.child_environment(**gpu_environment(self._engine, rank))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        assert process.stdin is not None
        try:
            with process.stdin as pipe:
                pipe.write(self._config)
        except BrokenPipeError:  # it died before it read its configuration; ``dead`` will say so
            pass
        return process


def threads_each(config: EngineConfig, ranks_here: int) -> int:
    """CPU threads of each of ``ranks_here`` ranks on this host; 0 leaves it to torch."""
    if config.runner.threads or ranks_here == 1:
        return config.runner.threads
    return max(1, len(os.sched_getaffinity(0)) // ranks_here)


def ranks_of(replica: int, tensor: int) -> Sequence[int]:
    """The ranks of a replica; the first one is its head."""
    return range(replica * tensor, (replica + 1) * tensor)
