"""Time as a dependency, so that the same control code runs on a wall clock and on a virtual one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds."""

    def now(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves time forward. Raises ValueError for a negative step."""
        if seconds < 0:
            raise ValueError("a monotonic clock cannot go back")
        self._now += seconds
