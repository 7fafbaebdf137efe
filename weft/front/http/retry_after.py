"""Retry times for requests refused for lack of room, from the present rate of ended requests.

Each refused request gets a position in a line. Positions follow the expected ends of running requests, so
that refused requests do not all come back at once.
"""

from __future__ import annotations

from collections import deque

KEPT = 64
"""Number of recent ends used for the rate."""
WINDOW = 60.0
"""Maximum age of an end used for the rate, in seconds."""
LEAST, MOST = 1.0, 60.0
"""Minimum and maximum of the retry time, in seconds."""


class RetryAfter:
    """Rate of ended requests, and the positions given out. ``now``: time of any clock, in seconds."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=KEPT)
        self._turn = 0.0

    def ended(self, now: float) -> None:
        """Record the end of a request."""
        self._ends.append(now)

    def refused(self, now: float) -> float:
        """Return the seconds after which a just refused request should retry, between ``LEAST`` and
        ``MOST``. Each call takes the next position in the line. Without a known rate, the result is
        ``LEAST``."""
        rate = self.rate(now)
        if rate is None:
            return LEAST
        # The next position is one expected end later.
        self._turn = min(max(self._turn, now) + 1.0 / rate, now + MOST)
        return max(self._turn - now, LEAST)

    def rate(self, now: float) -> float | None:
        """Return the present rate of ends per second; None with fewer than two ends in the last ``WINDOW``
        seconds. Removes older ends."""
        while self._ends and now - self._ends[0] > WINDOW:
            self._ends.popleft()
        if len(self._ends) < 2:
            return None
        return len(self._ends) / max(now - self._ends[0], 1e-3)
