"""CPU threads of an engine's process, also when the usable cores change while the server runs.

    usable cores change (cpu.max, cpuset, taskset)
         ├─ no request runs ──► the threads follow, and a log line gives both numbers
         ├─ requests run ─────► a warning; the threads follow when no request runs
         └─ --threads is set ─► a warning; the threads stay

The bits of the C++ operations do not depend on the number of threads, so a later answer has the same tokens
(docs/determinism.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from weft.common import env
from weft.common.cores import allowed_cores, usable_cores
from weft.common.log import get_logger
from weft.config.resolved import EngineConfig
from weft.engine.ranks.ranks import threads_each

log = get_logger(__name__)

LOOK_S = 5.0
"""Seconds between two reads of the usable cores. A read takes about 0.1 ms."""


class Default(NamedTuple):
    """torch's default number of threads, and the cores of the CPU affinity for which torch chose it."""

    threads: int
    cores: int


AT_IMPORT = Default(torch.get_num_threads(), allowed_cores())
"""torch chooses once per process. A spare process may have imported torch while other cores were allowed."""


class CpuThreads:
    """Sets the CPU threads of one rank. Use from the thread that launches the steps: torch's setting is the
    thread's, and ``DeviceQueue`` hands the number to a thread of its own."""

    def __init__(
        self,
        config: EngineConfig,
        cores: Callable[[], int] = usable_cores,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the threads to the share of one rank (``share_of``), and log the number."""
        self._config = config
        self._usable, self._now = cores, now
        self._cores = self._announced = cores()
        torch.set_num_threads(share_of(config, self._cores))
        self._next = now() + LOOK_S
        _log_threads(config, self._cores)

    def look(self, idle: bool) -> None:
        """Read the usable cores if due, and follow a change. ``idle``: True if no request runs."""
        pending = self._announced != self._cores
        if self._now() < self._next and not (idle and pending):
            return
        self._next = self._now() + LOOK_S
        cores = self._usable()
        if cores == self._cores:
            self._announced = cores
        elif self._config.runner.threads:
            log.warning(
                "the usable cores changed from %d to %d; --threads keeps %d threads",
                self._cores,
                cores,
                torch.get_num_threads(),
            )
            self._cores = self._announced = cores
        elif idle:
            self._follow(cores)
        elif cores != self._announced:
            log.warning(
                "the usable cores changed from %d to %d; %d threads stay until no request runs",
                self._cores,
                cores,
                torch.get_num_threads(),
            )
            self._announced = cores

    def _follow(self, cores: int) -> None:
        """Set the threads for ``cores`` usable cores."""
        before, threads = torch.get_num_threads(), share_of(self._config, cores)
        torch.set_num_threads(threads)
        log.info(
            "the usable cores changed from %d to %d: CPU threads %d -> %d",
            self._cores,
            cores,
            before,
            threads,
        )
        self._cores = self._announced = cores


def share_of(config: EngineConfig, cores: int) -> int:
    """Return the CPU threads of one rank on a host with ``cores`` usable cores: the setting, or the share of
    the rank and at most ``most_threads``."""
    return config.runner.threads or min(threads_each(config, cores), most_threads())


def most_threads() -> int:
    """Return the number of OMP_NUM_THREADS, or else torch's default for the present CPU affinity.

    torch may take fewer threads than allowed cores, e.g. one per physical core. The ratio stays.
    """
    number = env.get("OMP_NUM_THREADS").partition(",")[0].strip()  # further numbers are of nested regions
    if number.isdecimal() and int(number):
        return int(number)
    return max(1, -(-AT_IMPORT.threads * allowed_cores() // AT_IMPORT.cores))


def take_threads(config: EngineConfig) -> None:
    """Set the CPU threads of a program with an engine to the share of one rank, and log the number. Numbers
    of the program below the share stay."""
    cores = usable_cores()
    set_threads(config.runner.threads, threads_each(config, cores))
    _log_threads(config, cores)


def set_threads(asked: int | None, most: int | None = None) -> None:
    """Set the CPU threads of torch in the process: ``asked``, or at most ``most`` (default: usable cores) and
    at most the present number, which a program may have set. torch respects the CPU affinity but not a cgroup
    quota, so torch's default alone can be too high."""
    torch.set_num_threads(asked or min(usable_cores() if most is None else most, torch.get_num_threads()))


def _log_threads(config: EngineConfig, cores: int) -> None:
    ranks = config.ranks_beside
    log.info("CPU threads: %d (%d cores for %d ranks on this host)", torch.get_num_threads(), cores, ranks)
