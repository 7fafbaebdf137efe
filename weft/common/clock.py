"""Time as a dependency: control code is handed ``now``, and never asks for it."""

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
    """A clock that moves when it is told to, and only forwards. Seconds."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance_to(self, time: float) -> None:
        """Moves to ``time``; earlier times change nothing."""
        self._now = max(self._now, time)
