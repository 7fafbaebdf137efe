"""A group that was lost is formed anew: beside the loop that goes on answering, and not for ever."""

from __future__ import annotations

import threading

from weft.common.clock import Clock
from weft.common.errors import EngineDead
from weft.common.log import get_logger
from weft.common.restarts import RestartBudget
from weft.engine.executor import Executor, GroupLost

log = get_logger(__name__)

CLOSE_S = 30.0
MOST, WINDOW = 4, 600.0
"""Recoveries of one group in so many seconds; the next loss ends it."""


class Recovery:
    """The recoveries of one group."""

    def __init__(self, clock: Clock, most: int = MOST, window: float = WINDOW) -> None:
        self._clock = clock
        self._budget = RestartBudget(most, window)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._began = 0.0

    @property
    def active(self) -> bool:
        """Whether the group is being formed."""
        return self._thread is not None

    def begin(self, group: Executor, lost: GroupLost) -> None:
        """Starts to form ``group`` anew. Raises ``lost`` when that was done too often lately."""
        self._began = self._clock.now()
        if not self._budget.grant(self._began):
            log.error("the group was lost %d times in %g seconds", self._budget.most + 1, self._budget.window)
            raise lost
        log.error("%s; its group is formed anew", lost.message)
        self._failure = None
        self._thread = threading.Thread(
            target=self._run, args=(group, lost), name="weft-recovery", daemon=True
        )
        self._thread.start()

    def done(self, wait: float) -> bool:
        """Whether it is over; waits ``wait`` seconds at most. Raises what made it fail."""
        assert self._thread is not None
        self._thread.join(wait)
        if self._thread.is_alive():
            return False
        self._thread = None
        if self._failure is not None:
            raise EngineDead("the group could not be formed anew") from self._failure
        log.info("the group is whole again after %.1f s", self._clock.now() - self._began)
        return True

    def close(self, group: Executor) -> None:
        """Ends it, so that ``group`` can be closed; gives up after ``CLOSE_S`` seconds."""
        until = self._clock.now() + CLOSE_S
        while self._thread is not None and self._thread.is_alive() and self._clock.now() < until:
            group.interrupt()
            self._thread.join(0.1)
        self._thread = None

    def _run(self, group: Executor, lost: GroupLost) -> None:
        try:
            group.recover(lost)
        except BaseException as error:
            self._failure = error
