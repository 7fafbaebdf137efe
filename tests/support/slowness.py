"""Scale deadlines of tests that wait for real processes to the measured slowness of the machine.

Use deadlines only for waits that end early on success. Tests of time-outs have fixed numbers.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable

from weft.common.cores import usable_cores

LOOP = 200_000
REFERENCE_S = 0.010
"""CPU seconds of the loop on a machine on which the deadlines in the tests are ample (a Zen 5 core)."""
MOST = 10.0


def deadline(seconds: float) -> float:
    """Return ``seconds`` of a fast idle machine, converted to the current speed of the local machine."""
    return seconds * slowness()


def until(condition: Callable[[], object], seconds: float = 60.0, every: float = 0.05) -> None:
    """Wait until ``condition``, at most ``seconds`` of a fast machine. Looks grow rare, to one in ``every``
    seconds."""
    end, pause = time.monotonic() + deadline(seconds), 0.002
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(min(pause, every))
        pause *= 2


def slowness() -> float:
    """Return the slowdown relative to an idle fast machine: 1 to ``MOST``.

    The speed of the core and the wait for a core are measured once per process. The load average is read at
    every call, because load may have come since. The worse of the two signs of a busy machine counts.
    """
    speed, contention = _measured()
    load = (os.getloadavg()[0] + 1) / _cores()
    return min(MOST, max(1.0, speed) * max(1.0, contention, load))


@functools.cache
def _cores() -> int:
    return usable_cores()


@functools.cache
def _measured() -> tuple[float, float]:
    """Return (CPU time of a loop relative to a fast core, wall time of the loop divided by its CPU time).

    Three rounds are long enough for a busy machine to preempt the process. The fastest round gives the core's
    speed.
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
