"""A host without engine process: keeps its ranks of a group running, for the present engine on host 0."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from weft.cli.processes.rank_main import NO_ENGINE, WELCOME_S
from weft.common import log, signals
from weft.common.restarts import RestartBudget
from weft.config.hosts import meeting_place, ranks_on
from weft.config.resolved import EngineConfig
from weft.engine.ranks.ranks import RankProcesses
from weft.parallel.address import own_address, tcp
from weft.parallel.secret import read_keys

logger = log.get_logger(__name__)

RESTARTS, WINDOW = 20, 600.0
"""Maximum number of rank restarts per window of seconds, before the host gives up."""
AWAY_S = 3600.0
"""Seconds without any engine before the host gives up."""
_LOOK = 0.2


class _Stop(Exception):
    """A stop signal arrived."""


def serve_node(config: EngineConfig, log_level: str) -> int:
    """Run the ranks of ``--node-rank`` until the group shuts down or a signal comes. Return 0.

    A rank that ends for another reason is restarted. With the new rank, the engine (or its replacement) forms
    the group again. Return 1 after too many restarts. Raise ConfigError.
    """
    parallel = config.parallel
    host, port = meeting_place(parallel)
    mine = ranks_on(parallel, parallel.node_rank)
    assert parallel.group_secret is not None, "checked when the configuration was resolved"
    read_keys(parallel.group_secret)
    own_address(host, port)
    logger.info(
        "host %d of %d runs ranks %s for host 0 at %s",
        parallel.node_rank,
        parallel.nnodes,
        [*mine],
        parallel.rdzv,
    )
    processes = RankProcesses(config, tcp(host, port), log_level)
    ranks = HostRanks(processes, [*mine], parallel.rank_timeout, RestartBudget(RESTARTS, WINDOW))

    def keep() -> int:
        while ranks.left:
            time.sleep(_LOOK)
            if not ranks.look():
                return 1
        return 0

    try:
        return until_stopped(keep)
    finally:
        ranks.close()


def until_stopped(work: Callable[[], int]) -> int:
    """Return ``work()``, or 0 if a stop signal interrupts ``work``.

    Later stop signals are ignored for the rest of the process. Call from the main thread.
    """
    for number in signals.heeded():
        signal.signal(number, _stop)
    try:
        return work()
    except _Stop:
        return 0
    finally:
        signals.ignore()


class HostRanks:
    """Ranks of one group on one host. Ranks that end without a shutdown are restarted."""

    def __init__(
        self, processes: RankProcesses, mine: Sequence[int], rank_timeout: float, budget: RestartBudget
    ) -> None:
        """Start the ranks. ``budget``: limit of the restarts."""
        self._processes = processes
        self._timeout = rank_timeout
        self._budget = budget
        self._stopped: dict[int, float] = {}
        self._alone: dict[int, tuple[float, float]] = {}
        """Ranks without an answer from any engine: start of the first wait, and time of the last end."""
        self.left = len(mine)
        """Number of ranks that the engine has not shut down."""
        for rank in mine:
            processes.spawn(rank)

    def look(self) -> bool:
        """Restart ended ranks, and kill ranks that were suspended too long.

        Poll often. A shut-down rank lowers ``left``. Return False once the budget is spent.
        """
        processes = self._processes
        for rank, status in processes.ended():
            processes.kill(rank)
            self._stopped.pop(rank, None)
            if status == 0:
                self.left -= 1
            # A rank without an engine to join is not faulty, so the restart is free.
            elif status == NO_ENGINE and self._may_wait(rank, time.monotonic()):
                processes.spawn(rank)
            elif not self._budget.grant(time.monotonic()):
                logger.error(
                    "%d ranks ended within %g minutes, so this host stops", RESTARTS + 1, WINDOW / 60
                )
                return False
            else:
                logger.error("rank %d ended with status %d and is restarted", rank, status)
                processes.spawn(rank)
        for rank in processes.ranks():
            _end_stopped(processes, rank, self._stopped, self._timeout)
        return True

    def _may_wait(self, rank: int, now: float) -> bool:
        """Return True if ``rank``, which no engine answers, may try again: for ``AWAY_S`` in a row."""
        began, last = self._alone.get(rank, (now - WELCOME_S, now))
        if now - last > 2 * WELCOME_S:  # an engine answered in between
            began = now - WELCOME_S
        self._alone[rank] = began, now
        return now - began < AWAY_S

    def close(self) -> None:
        """Kill all ranks."""
        self._processes.close(0.0)


def _end_stopped(processes: RankProcesses, rank: int, stopped: dict[int, float], patience: float) -> None:
    """Kill a rank that was stopped (SIGSTOP) for more than ``patience`` seconds, with a log line: no engine
    waits longer.

    ``stopped`` keeps the start of each stop.
    """
    if not _is_stopped(processes.pid(rank)):
        stopped.pop(rank, None)
    elif time.monotonic() - stopped.setdefault(rank, time.monotonic()) > patience:
        logger.error("rank %d is suspended (SIGSTOP) and is killed", rank)
        processes.send_signal(rank, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    """Return True if process ``pid`` is stopped (SIGSTOP)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):  # the process has ended, or there is no /proc
        return False


def _stop(*_: object) -> None:
    """Raise `_Stop`, as a signal handler."""
    raise _Stop
