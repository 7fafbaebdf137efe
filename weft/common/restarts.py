"""Budget of process restarts. Pure: the caller passes the time."""

from __future__ import annotations

from collections import deque

MOST_LOSSES = 3
"""Limit of losses during one sequence, because the sequence may be the cause. A scheduler ends the sequence
at the third loss of the group in a row without a new token. A fleet permits three losses of engines."""


class RestartBudget:
    """At most ``most`` restarts in any ``window`` seconds, each recorded when granted.

    Beyond the budget, a failing process is not started again, and its clients get an error.
    """

    def __init__(self, most: int, window: float) -> None:
        """``window``: seconds."""
        self.most = most
        self.window = window
        self.granted = 0
        """Total number of granted restarts."""
        self._times: deque[float] = deque()

    def grant(self, now: float) -> bool:
        """Record a restart in ``granted`` and return True, or return False if the budget is used up.

        ``now``: seconds, never decreasing.
        """
        while self._times and now - self._times[0] >= self.window:
            self._times.popleft()
        if len(self._times) >= self.most:
            return False
        self._times.append(now)
        self.granted += 1
        return True

    def renew(self) -> None:
        """Forget the recorded restarts, at an operator's request."""
        self._times.clear()
