"""Many schedules of a simulated cluster: which violate an invariant, and what all of them went through."""

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

from weft.sim.check import Violation
from weft.sim.cluster import simulate_cluster

CHUNK = 50
"""Schedules that a process takes at a time."""


@dataclass(slots=True)
class Exploration:
    """What came of schedules."""

    schedules: int = 0
    events: int = 0
    """Of all schedules."""
    failures: list[tuple[int, str]] = field(default_factory=list)
    """(seed, which invariant), in order of seeds."""
    faults: Counter[str] = field(default_factory=Counter)
    """Schedules in which a kind of fault was seen to happen."""
    counts: Counter[str] = field(default_factory=Counter)
    """What else happened, over all schedules."""
    seconds: float = 0.0
    """Of processor time."""

    def add(self, other: Exploration) -> None:
        """Takes in another part."""
        self.schedules += other.schedules
        self.events += other.events
        self.failures = sorted(self.failures + other.failures)
        self.faults.update(other.faults)
        self.counts.update(other.counts)
        self.seconds += other.seconds


def run_schedules(seeds: range) -> Exploration:
    """Runs the schedules of ``seeds`` one after another, in this process."""
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
    """Runs ``schedules`` schedules, of ``seed`` and the seeds after it, in ``jobs`` processes.

    ``progress`` hears how many more are done. ``begin`` is called first in each process of several.
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
    """Looks rarely for cycles, a schedule being one that is dropped as a whole, and not among modules."""
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
    """Without the log lines of the code that is run: there are faults by the thousand."""
    logger = logging.getLogger("weft")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
