"""Run many schedules of a simulated cluster, and collect violations and counts."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field

from testing.cluster.check import Violation
from testing.cluster.cluster import simulate_cluster

CHUNK = 50
"""Schedules per task of a process."""


@dataclass(slots=True)
class Exploration:
    """Results of many schedules."""

    schedules: int = 0
    events: int = 0
    """Events of all schedules."""
    failures: list[tuple[int, str]] = field(default_factory=list)
    """(seed, violated invariant), in order of seeds."""
    faults: Counter[str] = field(default_factory=Counter)
    """Kind of fault -> number of schedules in which the fault had an effect."""
    counts: Counter[str] = field(default_factory=Counter)
    """Other counts, summed over all schedules."""
    seconds: float = 0.0
    """Seconds of processor time."""

    def add(self, other: Exploration) -> None:
        """Add the results of another part."""
        self.schedules += other.schedules
        self.events += other.events
        self.failures = sorted(self.failures + other.failures)
        self.faults.update(other.faults)
        self.counts.update(other.counts)
        self.seconds += other.seconds


def run_schedules(seeds: range) -> Exploration:
    """Run the schedules of ``seeds`` one after another in this process.

    Return the results; a violation becomes an entry of ``failures``.
    """
    part = Exploration()
    began = time.process_time()
    with silent_log(), rare_collection():
        for seed in seeds:
            try:
                cluster = simulate_cluster(seed)
            except Violation as violation:
                part.failures.append((seed, str(violation)))
            else:
                part.events += cluster.events
                part.faults.update(cluster.faults.keys())
                part.counts.update(cluster.counts)
            part.schedules += 1
    part.seconds = time.process_time() - began
    return part


def explore(
    schedules: int,
    seed: int = 0,
    jobs: int = 1,
    progress: Callable[[int], object] | None = None,
    begin: Callable[[], object] | None = None,
) -> Exploration:
    """Run ``schedules`` schedules, with seeds from ``seed`` on, in ``jobs`` processes.

    Return the results of all.

    ``progress`` is called with the number of newly finished schedules. ``begin`` is called first in each of
    several processes.
    """
    end = seed + schedules
    chunks = [range(first, min(first + CHUNK, end)) for first in range(seed, end, CHUNK)]
    total = Exploration()
    for part in map(run_schedules, chunks) if jobs == 1 else _in_processes(chunks, jobs, begin):
        total.add(part)
        if progress is not None:
            progress(part.schedules)
    return total


def _in_processes(
    chunks: list[range], jobs: int, begin: Callable[[], object] | None
) -> Iterator[Exploration]:
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), begin) as pool:
        for done in as_completed([pool.submit(run_schedules, chunk) for chunk in chunks]):
            yield done.result()


@contextmanager
def rare_collection() -> Iterator[None]:
    """Context with rare cycle collection. A schedule is dropped as a whole, and modules need no scan."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(200_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@contextmanager
def silent_log() -> Iterator[None]:
    """Context without log lines of the simulated code: there are thousands of faults."""
    logger = logging.getLogger("weft")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
