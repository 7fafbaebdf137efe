"""How often a group that was lost is formed anew. Pure."""

from __future__ import annotations

from weft.common.log import get_logger
from weft.common.restarts import RestartBudget

log = get_logger(__name__)

TRIES = 4
"""Of forming a group that was lost."""
MOST, WINDOW = 4, 600.0
"""How many losses of one group are followed by another epoch within so many seconds; one more ends it."""


class Tries:
    """How often one group was formed anew, and may be."""

    def __init__(self, budget: RestartBudget | None = None) -> None:
        self.budget = budget or RestartBudget(MOST, WINDOW)
        self.ran = False
        """Whether there was an epoch under this head: till then a rank that differs ends the start."""
        self.fresh = True
        """Whether no rank was in any epoch yet: then a failure is not tried again, and ends the start."""
        self._left = TRIES

    def run(self) -> None:
        """An epoch runs."""
        self.ran, self.fresh = True, False

    def renew(self, now: float) -> None:
        """The epoch that ran was lost: there may be some tries, unless that was so too often."""
        self._left = TRIES
        if not self.budget.grant(now):
            log.error("the group was lost %d times in %g seconds", self.budget.most + 1, self.budget.window)
            self._left = 0

    def again(self) -> bool:
        """Whether there may be another one."""
        self._left -= 1
        return self._left >= 0 and not self.fresh
