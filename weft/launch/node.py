"""A host that has no head: keeps its ranks of a group running, for whatever head there is on host 0."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from weft.common import log, signals
from weft.common.restarts import RestartBudget
from weft.config.hosts import meeting_place, ranks_on
from weft.config.resolved import EngineConfig
from weft.engine.ranks import RankProcesses
from weft.launch.rank_main import NO_HEAD, WELCOME_S
from weft.parallel.address import own_address, tcp
from weft.parallel.secret import read_keys

logger = log.get_logger(__name__)

RESTARTS, WINDOW = 20, 600.0
"""Ranks that are started anew in so many seconds, before the host gives up."""
AWAY_S = 3600.0
"""Seconds without any head, after which it gives up, too."""
_LOOK = 0.2


class _Stop(Exception):
    """A signal came."""


def serve_node(config: EngineConfig, log_level: str) -> int:
    """Runs the ranks of ``--node-rank`` until the group is shut down (0), or a signal comes (0).

    A rank that ends otherwise is started anew: with it a head that lost it, or another head, forms the group.
    Status 1 when that was tried too often. Raises ConfigError.
    """
    parallel = config.parallel
    host, port = meeting_place(parallel)
    mine = ranks_on(parallel, parallel.node_rank)
    assert parallel.group_secret is not None, "checked when the configuration was resolved"
    read_keys(parallel.group_secret)
    own_address(host, port)
    logger.info("host %d of %d: ranks %s for %s", parallel.node_rank, parallel.nnodes, [*mine], parallel.rdzv)
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
    """``work()``; 0 when a signal that asks to stop cut it short. All of them are ignored from then on."""
    for number in signals.heeded():
        signal.signal(number, _stop)
    try:
        return work()
    except _Stop:
        return 0
    finally:
        signals.ignore()


class HostRanks:
    """Ranks of one group on this host, which are started again whenever they end of themselves."""

    def __init__(
        self, processes: RankProcesses, mine: Sequence[int], rank_timeout: float, budget: RestartBudget
    ) -> None:
        """Starts them. ``budget``: of how often they may be started again."""
        self._processes = processes
        self._timeout = rank_timeout
        self._budget = budget
        self._stopped: dict[int, float] = {}
        self._alone: dict[int, tuple[float, float]] = {}
        """Of ranks that no head answered again and again: when the first of them began to wait, and the last
        end of one."""
        self.left = len(mine)
        """Those that have not been shut down by their head."""
        for rank in mine:
            processes.spawn(rank)

    def look(self) -> bool:
        """Starts again who ended; call it often. False when that was done too often."""
        processes = self._processes
        for rank, status in processes.ended():
            processes.kill(rank)
            self._stopped.pop(rank, None)
            if status == 0:
                self.left -= 1
            elif status == NO_HEAD and self._may_wait(rank, time.monotonic()):
                processes.spawn(rank)
            elif not self._budget.grant(time.monotonic()):
                logger.error("%d ranks ended in %g minutes", RESTARTS + 1, WINDOW / 60)
                return False
            else:
                logger.error("rank %d ended with status %d and is started again", rank, status)
                processes.spawn(rank)
        for rank in processes.ranks():
            _end_stopped(processes, rank, self._stopped, self._timeout)
        return True

    def _may_wait(self, rank: int, now: float) -> bool:
        """Whether ``rank``, which no head answered, may say hello again: for ``AWAY_S`` in a row."""
        began, last = self._alone.get(rank, (now - WELCOME_S, now))
        if now - last > 2 * WELCOME_S:  # it had a head in between
            began = now - WELCOME_S
        self._alone[rank] = began, now
        return now - began < AWAY_S

    def close(self) -> None:
        """Ends them at once."""
        self._processes.close(0.0)


def _end_stopped(processes: RankProcesses, rank: int, stopped: dict[int, float], patience: float) -> None:
    """Ends a rank that was stopped (SIGSTOP) for longer than any head waits for it."""
    if not _is_stopped(processes.pid(rank)):
        stopped.pop(rank, None)
    elif time.monotonic() - stopped.setdefault(rank, time.monotonic()) > patience:
        logger.error("rank %d is stopped and is ended", rank)
        processes.send_signal(rank, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):  # it has ended, or there is no /proc
        return False


def _stop(*_: object) -> None:
    raise _Stop
