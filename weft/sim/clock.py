"""Virtual time."""

from __future__ import annotations


class VirtualClock:
    """A clock that moves when it is told to, and only forwards. Seconds."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance_to(self, time: float) -> None:
        """Moves to ``time``; earlier times change nothing."""
        self._now = max(self._now, time)
