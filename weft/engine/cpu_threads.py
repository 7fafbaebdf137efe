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

import torch

from weft.common import env
from weft.common.cores import usable_cores
from weft.common.log import get_logger
from weft.config.resolved import EngineConfig
from weft.engine.ranks.ranks import threads_each

log = get_logger(__name__)

LOOK_S = 5.0
"""Seconds between two reads of the usable cores. A read takes about 0.1 ms."""


class CpuThreads:
    """Sets the CPU threads of one rank. Use from the thread that computes: the setting is the thread's."""

    def __init__(
        self,
        config: EngineConfig,
        cores: Callable[[], int] = usable_cores,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the threads to the share of one rank, and log the number.

        Never more threads than torch's own default, which follows OMP_NUM_THREADS. torch respects the CPU
        affinity but not a cgroup quota, so the default alone can be too high.
        """
        self._config = config
        self._usable, self._now = cores, now
        self._cores = self._announced = cores()
        share = threads_each(config, self._cores)
        set_threads(config.runner.threads, share)
        self._limited = bool(env.get("OMP_NUM_THREADS")) or torch.get_num_threads() < share
        """True if the user or torch wants fewer threads than cores: the threads do not grow."""
        self._most = torch.get_num_threads()
        self._next = now() + LOOK_S
        ranks = config.ranks_beside
        log.info("CPU threads: %d (%d cores for %d ranks on this host)", self._most, self._cores, ranks)

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
        before, threads = torch.get_num_threads(), threads_each(self._config, cores)
        if self._limited:
            threads = min(threads, self._most)
        torch.set_num_threads(threads)
        log.info(
            "the usable cores changed from %d to %d: CPU threads %d -> %d",
            self._cores,
            cores,
            before,
            threads,
        )
        self._cores = self._announced = cores


def set_threads(asked: int | None, most: int | None = None) -> None:
    """Set the CPU threads of torch in the process: ``asked``, or at most ``most`` (default: usable cores) and
    at most torch's own default."""
    torch.set_num_threads(asked or min(usable_cores() if most is None else most, torch.get_num_threads()))
