"""Limits on forming a lost group again. Pure."""

from __future__ import annotations

from weft.common.log import get_logger
from weft.common.restarts import RestartBudget

log = get_logger(__name__)

TRIES = 4
"""Attempts to form a group again after one loss."""
MOST, WINDOW = 4, 600.0
"""Maximum losses within a window of seconds before the group ends. One more loss ends the group."""


class Tries:
    """Attempts already used, and the budget for losses."""

    def __init__(self, budget: RestartBudget | None = None) -> None:
        """``budget``: losses allowed within a time (default: ``MOST`` within ``WINDOW`` seconds)."""
        self.budget = budget or RestartBudget(MOST, WINDOW)
        self.ran = False
        """True after the first epoch of this engine process. Before, different settings are fatal."""
        self.fresh = True
        """True while no rank has been in any epoch. Then a failure ends the start without another attempt."""
        self._left = TRIES

    def run(self) -> None:
        """Record the start of an epoch."""
        self.ran, self.fresh = True, False

    def renew(self, now: float) -> None:
        """Grant new attempts after the loss of an epoch, or none when the budget of losses is spent."""
        self._left = TRIES
        if not self.budget.grant(now):
            log.error("the group was lost %d times in %g seconds", self.budget.most + 1, self.budget.window)
            self._left = 0

    def again(self) -> bool:
        """Use one attempt. Return True if an attempt was left, and a rank has been in an epoch (not
        ``fresh``)."""
        self._left -= 1
        return self._left >= 0 and not self.fresh
