"""Processes that are suspended by a signal (SIGSTOP)."""

from __future__ import annotations

import math
from pathlib import Path


def is_suspended(pid: int) -> bool:
    """Return True if process ``pid`` is suspended. False without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):  # the process has ended, or there is no /proc
        return False


class Suspensions:
    """How long each of several processes has been suspended. Pure. Times are seconds of one clock."""

    def __init__(self, patience: float) -> None:
        """``patience``: seconds after which a suspended process counts as dead."""
        self._patience = patience
        self._seen: dict[str | int, tuple[float, float]] = {}
        """Process -> times of the first and the last report of the present suspension."""

    def report(self, process: str | int, now: float) -> bool:
        """Note that ``process`` is suspended. Return True if the process counts as dead.

        Report at least once per half of the patience: without reports the process has run in between.
        """
        first, last = self._seen.get(process, (now, -math.inf))
        if now - last > self._patience / 2:
            first = now
        self._seen[process] = first, now
        return now - first > self._patience

    def forget(self, process: str | int) -> None:
        """Forget a process that has ended. Idempotent."""
        self._seen.pop(process, None)
