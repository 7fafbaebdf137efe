"""Phase of the server, and admission of requests. State only; ``server`` changes the phase."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum

from weft.common.errors import Overloaded, Unavailable


class Phase(Enum):
    """STARTING -> READY -> DRAINING; any -> DEAD, which is final."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


_NEXT = {
    Phase.STARTING: {Phase.READY, Phase.DRAINING, Phase.DEAD},
    Phase.READY: {Phase.DRAINING, Phase.DEAD},
    Phase.DRAINING: {Phase.DEAD},
    Phase.DEAD: set(),
}


class Lifecycle:
    """The phase, and the number of requests between first and last byte.

    ``capacity`` bounds the requests; each has at least one sequence. The bound equals the engines' own
    bound, so a request refused here would be refused there, too.
    """

    def __init__(self, capacity: Callable[[], int]) -> None:
        """``capacity``: returns the present bound, which changes with the number of engines."""
        self.phase = Phase.STARTING
        self.active = 0
        self._capacity = capacity

    @property
    def capacity(self) -> int:
        """Maximum number of requests at once."""
        return self._capacity()

    def move(self, phase: Phase) -> None:
        """Enter ``phase`` if the table allows the move; otherwise do nothing."""
        if phase in _NEXT[self.phase]:
            self.phase = phase

    def check(self) -> None:
        """Raise Unavailable unless requests may begin. Call before reading a request's body."""
        if self.phase is Phase.DEAD:
            raise Unavailable("the engine has failed; the server is stopping")
        if self.phase is Phase.DRAINING:
            raise Unavailable("the server is shutting down")
        if self.phase is Phase.STARTING:
            raise Unavailable("the server is still starting")

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Hold a place for one request after its body was read. So a slow client takes no place.

        Raises Unavailable or Overloaded if the request may not begin.
        """
        self.check()
        if self.active >= self.capacity:
            raise Overloaded("the server's queue is full; try again later")
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1
