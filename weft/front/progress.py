"""Is the head alive? A judgement over heartbeats and time, with no clock or socket of its own."""

from __future__ import annotations


class Progress:
    """Times in seconds of one monotonic clock.

    A head is overdue when nothing came from it for ``timeout``, or when for that long it said that it has
    work and its step counter stood still.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._heard = now
        self._moved = now
        self._steps = -1

    def frame(self, now: float) -> None:
        """Any valid message came."""
        self._heard = now

    def beat(self, idle: bool, steps: int, now: float) -> None:
        """A heartbeat came."""
        self._heard = now
        if idle or steps != self._steps:
            self._moved = now
        self._steps = steps

    def overdue(self, now: float) -> str | None:
        """Why the head counts as dead, or None."""
        if now - self._heard > self._timeout:
            return f"the engine has been silent for {self._timeout:g} seconds"
        if now - self._moved > self._timeout:
            return f"the engine made no step in {self._timeout:g} seconds while work waits"
        return None

    def recent(self, now: float, window: float) -> bool:
        """Whether the head both spoke and, having work, stepped in the last ``window`` seconds."""
        return now - self._heard <= window and now - self._moved <= window
