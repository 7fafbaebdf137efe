"""When a request that was refused for want of room should come again: by how fast others end.

Refused requests are given turns, one for each request that will have ended by then at the present rate, so
that they do not all come back at once.
"""

from __future__ import annotations

from collections import deque

KEPT = 64
"""Ends that the rate is measured by."""
WINDOW = 60.0
"""Seconds after which an end says nothing about the present rate."""
LEAST, MOST = 1.0, 60.0
"""Seconds that a client is told to wait."""


class RetryAfter:
    """The rate of ends, and the turns that were given. ``now`` is any clock's time, in seconds."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=KEPT)
        self._turn = 0.0

    def ended(self, now: float) -> None:
        """A request has ended, and room with it."""
        self._ends.append(now)

    def refused(self, now: float) -> float:
        """Seconds after which the request that was just refused should come again."""
        rate = self.rate(now)
        if rate is None:
            return LEAST
        self._turn = min(max(self._turn, now) + 1.0 / rate, now + MOST)
        return max(self._turn - now, LEAST)

    def rate(self, now: float) -> float | None:
        """Ends a second, at present; None when too few are known."""
        while self._ends and now - self._ends[0] > WINDOW:
            self._ends.popleft()
        if len(self._ends) < 2:
            return None
        return len(self._ends) / max(now - self._ends[0], 1e-3)
