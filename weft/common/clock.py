"""Time as a dependency: control code receives ``now`` and never reads a clock."""

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
    """A clock for tests and simulation, in seconds. Moves only by ``advance_to``, and only forwards."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance_to(self, time: float) -> None:
        """Move to ``time``. Earlier times change nothing."""
        self._now = max(self._now, time)
