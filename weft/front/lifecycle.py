"""What the server is doing now, and whether a request may begin. State only; ``server`` moves it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum

from weft.common.errors import Overloaded, Unavailable


class Phase(Enum):
    """STARTING -> READY -> DRAINING; any -> DEAD, and nothing after it."""

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
    """The phase, and the requests that are between their first and last byte.

    ``capacity`` bounds requests (each has at least one sequence); it is the heads' own bound, so that what is
    refused here would be refused there.
    """

    def __init__(self, capacity: int) -> None:
        self.phase = Phase.STARTING
        self.active = 0
        self.capacity = capacity

    def move(self, phase: Phase) -> None:
        """Enters ``phase`` if the table allows it; else stays."""
        if phase in _NEXT[self.phase]:
            self.phase = phase

    def check(self) -> None:
        """Raises Unavailable unless requests may begin. To be called before a request's body is read."""
        if self.phase is Phase.DEAD:
            raise Unavailable("the engine has failed; the server is stopping")
        if self.phase is Phase.DRAINING:
            raise Unavailable("the server is shutting down")
        if self.phase is Phase.STARTING:
            raise Unavailable("the server is still starting")

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Holds a place for one request, whose body has been read: a client that is slow to send takes none.

        Raises Unavailable or Overloaded when it may not begin.
        """
        self.check()
        if self.active >= self.capacity:
            raise Overloaded("the server's queue is full; try again later")
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1
