"""How often what died is started again. Pure: the caller has the clock."""

from __future__ import annotations

from collections import deque

MOST_LOSSES = 3
"""Engines, or groups, that a sequence may lose. One that is open whenever one dies may be why it dies."""


class RestartBudget:
    """At most ``most`` restarts in any ``window`` seconds, each noted when it is granted.

    A process that dies again and again is not started for ever, so that its clients get an error.
    """

    def __init__(self, most: int, window: float) -> None:
        self.most = most
        self.window = window
        self.granted = 0
        """Restarts since the beginning."""
        self._times: deque[float] = deque()

    def grant(self, now: float) -> bool:
        """Whether one more may be tried at time ``now``, in seconds, which never falls."""
        while self._times and now - self._times[0] >= self.window:
            self._times.popleft()
        if len(self._times) >= self.most:
            return False
        self._times.append(now)
        self.granted += 1
        return True

    def renew(self) -> None:
        """Forgets the restarts so far: an operator asks for more."""
        self._times.clear()
