"""Deadlines of tests that wait for real processes, longer on a machine that is shown to be slow.

Only for waits that end early when all is well: a test that waits for a time-out to pass has its own numbers.
"""

from __future__ import annotations

import functools
import os
import time

from weft.common.cores import usable_cores

LOOP = 200_000
REFERENCE_S = 0.010
"""CPU seconds of the loop on a machine on which the deadlines in the tests are ample (a Zen 5 core)."""
MOST = 10.0


def deadline(seconds: float) -> float:
    """``seconds`` of a fast machine with cores to spare, in those of this one, now."""
    return seconds * slowness()


def slowness() -> float:
    """How many times longer work may take here than on an idle fast machine: 1 to ``MOST``.

    The core's speed and the wait for a core are measured once a process. The load is read anew: it may have
    come since. Of the two signs of a busy machine the worse counts.
    """
    speed, contention = _measured()
    load = (os.getloadavg()[0] + 1) / _cores()
    return min(MOST, max(1.0, speed) * max(1.0, contention, load))


@functools.cache
def _cores() -> int:
    return usable_cores()


@functools.cache
def _measured() -> tuple[float, float]:
    """CPU time of a loop over its time on a fast core, and its wall time over its CPU time.

    Long enough, in three rounds, that a busy machine takes the core away meanwhile; the fastest round is the
    core's own speed.
    """
    wall, cpu, fastest = 0.0, 0.0, float("inf")
    for _ in range(3):
        begun, used = time.perf_counter(), time.process_time()
        total = 0
        for number in range(LOOP):
            total += number * number
        spent = time.process_time() - used
        wall += time.perf_counter() - begun
        cpu += spent
        fastest = min(fastest, spent)
    return fastest / REFERENCE_S, wall / cpu
