"""The head processes of a server, and their workers, which outlive them: started, started anew, ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from weft.common import env, log, signals
from weft.common.clock import Clock, SystemClock
from weft.common.restarts import RestartBudget
from weft.config.gpus import gpu_environment, head_rank
from weft.config.hosts import uses_board
from weft.config.resolved import EngineConfig
from weft.engine.keeper import Keeper
from weft.engine.ranks import RankProcesses, are_kept, rank_address
from weft.links.link import Address
from weft.parallel.remote import RemoteHead, RemoteHeads

logger = log.get_logger(__name__)

WINDOW = 600.0
"""Seconds in which the number of restarts is limited, over all heads."""
LEAVE_S = 3.0
"""Seconds that other hosts get at least to read that the server ends."""


class HeadProcesses:
    """One head for each replica. Heads live no longer than the thread that starts them."""

    def __init__(
        self, config: EngineConfig, folder: Path, log_level: str, restarts: int, clock: Clock | None = None
    ) -> None:
        """``folder``: where heads listen; only this user may enter it. ``restarts``: how many heads may be
        started anew in ``WINDOW`` seconds. Raises ConfigError when other hosts cannot reach this one.
        """
        self._config, self._folder, self._level = config, folder, log_level
        self._clock = clock or SystemClock()
        self._budget = RestartBudget(restarts, WINDOW)
        self._remote = RemoteHeads(config) if uses_board(config.parallel) else None
        self._running: dict[int, subprocess.Popen[bytes] | RemoteHead] = {}
        self._ended: list[subprocess.Popen[bytes] | RemoteHead] = []
        self._started = 0
        self._local = LocalHeads(config, folder, log_level)

    def start(self, replica: int) -> Address:
        """Starts the head of ``replica``; does not wait for it. Every start has an address of its own, so
        nothing that was meant for one head reaches the next.
        """
        if self._remote is not None and replica in self._remote:
            head = self._remote.start(replica)
            self._running[replica] = head
            return Address(head.endpoint, head, self._remote.keys)
        endpoint = f"ipc://{self._folder}/head{self._started}"
        self._started += 1
        process = self._local.start(replica, endpoint)
        self._running[replica] = process
        return Address(endpoint, process)

    def respawn(self, instance: str) -> Address | None:
        """Ends what is left of a head that is dead, or stopped answering, and starts it anew.

        ``instance``: its number, in digits. None when that was done too often lately.
        """
        replica = int(instance)
        old = self._running.pop(replica, None)
        if old is not None:
            old.kill()  # also wakes one that was stopped, for its end
            self._ended.append(old)
        if not self._budget.grant(self._clock.now()):
            if self._budget.most:
                logger.error("%d engines died in %g minutes", self._budget.most + 1, WINDOW / 60)
            return None
        logger.error("the engine is started again (restart %d)", self._budget.granted)
        return self.start(replica)

    def close(self, seconds: float, status: int = 0) -> list[int]:
        """Gives all heads, which were told to stop, ``seconds`` to end, then kills them; then their workers.
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


class LocalHeads:
    """Starts heads of this host, and keeps those of their workers that outlive them. From the main thread."""

    def __init__(self, config: EngineConfig, folder: Path, log_level: str) -> None:
        """``folder``: for their files; only this user may enter it."""
        self._config, self._folder, self._level = config, folder, log_level
        self._keeper: Keeper | None = None
        """Where heads have such workers."""

    def start(self, replica: int, endpoint: str, life: int = 0) -> subprocess.Popen[bytes]:
        """A head that will listen at ``endpoint``; does not wait for it. ``life``: see ``EngineConfig``."""
        pipe, parallel = None, self._config.parallel
        if are_kept(parallel, replica):
            self._keeper = self._keeper or Keeper(parallel.data_parallel_size, self._workers)
            pipe = self._keeper.link(replica)
        own = msgspec.structs.replace(self._of(replica), life=life)
        return start_head(own, endpoint, self._level, pipe)

    def close(self, seconds: float) -> None:
        """Gives workers, which were told to stop, ``seconds`` to end, then kills them."""
        if self._keeper is not None:
            self._keeper.close(seconds)
            self._keeper = None

    def _of(self, replica: int) -> EngineConfig:
        return msgspec.structs.replace(self._config, replica=replica, domain=str(self._folder))

    def _workers(self, replica: int) -> RankProcesses:
        config = self._of(replica)
        return RankProcesses(config, rank_address(config), self._level)


def start_head(
    config: EngineConfig, endpoint: str, log_level: str, pipe: Connection | None = None
) -> subprocess.Popen[bytes]:
    """Starts a head that will listen at ``endpoint`` and die with this process. Does not wait for it.

    ``pipe``: to whoever keeps its workers; it is the head's from now on, and closed here. Must be called from
    the main thread: the kernel ties the child to the thread that made it.
    """
    command = [sys.executable, "-m", "weft.launch.head_main", str(os.getpid()), endpoint, log_level]
    descriptors = () if pipe is None else (pipe.fileno(),)
    command += map(str, descriptors)
    environment = env.child_environment(**gpu_environment(config, head_rank(config)))
    with signals.blocked():
        head = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=descriptors)
    if pipe is not None:
        pipe.close()
    assert head.stdin is not None
    try:
        with head.stdin as stdin:
            stdin.write(msgspec.msgpack.encode(config))
    except BrokenPipeError:
        # It died before it read its configuration; whoever watches it sees that.
        pass
    return head


def close_head(head: subprocess.Popen[bytes], seconds: float) -> int:
    """Gives a head ``seconds`` to end (it was told to stop), then kills it. Returns its exit status."""
    try:
        return head.wait(seconds)
    except subprocess.TimeoutExpired:
        head.kill()
        return head.wait()
