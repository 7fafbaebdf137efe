"""Admission of requests: the phase of the server, and retry times for requests refused for lack of room.

State only; ``front_server`` changes the phase. Each refused request gets a position in a line. Positions
follow the expected ends of running requests, so that refused requests do not all come back at once.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum

from weft.common.errors import Overloaded, Unavailable, WeftError
from weft.control.fleet.instances import Instance, InstanceState


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


def places(instances: Iterable[Instance], elastic: bool = False) -> int:
    """Return the number of instances that take requests now or after a restart.

    A leaving instance, a retired instance, and an instance that loads for the first time do not count.
    ``elastic``: unknown instances may join, so the result is at least 1.
    """
    found = sum(not (one.leaving or one.fresh or one.state is InstanceState.RETIRED) for one in instances)
    return max(found, elastic)


class Lifecycle:
    """The phase, and the number of requests between first and last byte.

    ``capacity`` bounds the requests; each has at least one sequence. The bound equals the engines' own
    bound, so a request refused here would be refused there, too.
    """

    def __init__(self, capacity: Callable[[], int], server: Lifecycle | None = None) -> None:
        """``capacity``: returns the present bound, which changes with the number of engines. ``server``:
        lifecycle of a whole server of several models, for the lifecycle of one of the models. Then the
        server has the phase, and counts the requests, too."""
        self._phase = Phase.STARTING
        self.active = 0
        self._capacity = capacity
        self._server = server
        self.paused = False
        """True while new requests wait for the end of a pause."""

    @property
    def phase(self) -> Phase:
        return self._phase if self._server is None else self._server.phase

    @property
    def capacity(self) -> int:
        """Maximum number of requests at once."""
        return self._capacity()

    def move(self, phase: Phase) -> None:
        """Enter ``phase`` if the table allows the move; otherwise do nothing."""
        if phase in _NEXT[self._phase]:
            self._phase = phase

    def check(self) -> None:
        """Raise Unavailable unless requests may begin. Call before reading a request's body."""
        if self.phase is Phase.DEAD:
            raise Unavailable("the engine has failed; the server is stopping")
        if self.phase is Phase.DRAINING:
            raise Unavailable("the server is shutting down")
        if self.phase is Phase.STARTING:
            raise Unavailable("the server is still starting")

    def full(self) -> WeftError:
        """Return the error for a request without a place."""
        if self.paused:
            return Unavailable("the server is paused, and its queue is full; try again after the pause")
        return Overloaded("the server's queue is full; try again later")

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Hold a place for one request after its body was read. So a slow client takes no place.

        Raises Unavailable or Overloaded if the request may not begin.
        """
        self.check()
        if self.active >= self.capacity:
            raise self.full()
        counted = (self,) if self._server is None else (self, self._server)
        for one in counted:
            one.active += 1
        try:
            yield
        finally:
            for one in counted:
                one.active -= 1


ENDS_KEPT = 64
"""Number of recent ends used for the rate."""
WINDOW = 60.0
"""Maximum age of an end used for the rate, in seconds."""
LEAST_WAIT, MOST_WAIT = 1.0, 60.0
"""Minimum and maximum of the retry time, in seconds."""


class RetryAfter:
    """Rate of ended requests, and the positions given out. ``now``: time of any clock, in seconds."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=ENDS_KEPT)
        self._turn = 0.0

    def ended(self, now: float) -> None:
        """Record the end of a request."""
        self._ends.append(now)

    def refused(self, now: float) -> float:
        """Return the seconds after which a just refused request should retry, between ``LEAST_WAIT`` and
        ``MOST_WAIT``. Each call takes the next position in the line. Without a known rate, the result is
        ``LEAST_WAIT``."""
        rate = self.rate(now)
        if rate is None:
            return LEAST_WAIT
        # The next position is one expected end later.
        self._turn = min(max(self._turn, now) + 1.0 / rate, now + MOST_WAIT)
        return max(self._turn - now, LEAST_WAIT)

    def rate(self, now: float) -> float | None:
        """Return the present rate of ends per second; None with fewer than two ends in the last ``WINDOW``
        seconds. Removes older ends."""
        while self._ends and now - self._ends[0] > WINDOW:
            self._ends.popleft()
        if len(self._ends) < 2:
            return None
        return len(self._ends) / max(now - self._ends[0], 1e-3)
