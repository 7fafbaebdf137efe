"""Rate-limited log for events that peers can cause at will: log the first event, count further events.

    12:00:01 W .. a connection for transfers was refused: a peer speaks version 3
    12:01:01 W .. 693 more times; the last one: a connection for transfers was refused: there is no proof

``Tally`` decides and is pure. ``CountedLog`` has the logger, the clock and a timer.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

WINDOW_S = 60.0
"""Seconds covered by one count."""
MOST_KINDS = 64
"""Maximum kinds distinguished by one log. Events of further kinds are counted together."""
_OTHERS = "other events"


class EventCount(NamedTuple):
    """Number of events of one kind that were not logged at once."""

    kind: str
    times: int
    last: str
    """Text of the last event."""


class Tally:
    """Decides which events are logged at once, and counts the other events. Times are in seconds."""

    def __init__(self, window: float = WINDOW_S) -> None:
        self._window = window
        self._until: dict[str, float] = {}
        """Kind -> end of the kind's window."""
        self._sums: dict[str, EventCount] = {}

    def add(self, kind: str, text: str, now: float) -> bool:
        """Record an event. Return True if the event must be logged now, False if the event was counted."""
        if kind not in self._until and len(self._until) >= MOST_KINDS:
            kind = _OTHERS
        if now >= self._until.get(kind, now) and kind not in self._sums:
            self._until[kind] = now + self._window
            return True
        before = self._sums.get(kind)
        self._sums[kind] = EventCount(kind, 1 if before is None else before.times + 1, text)
        return False

    def due(self, now: float) -> list[EventCount]:
        """Remove and return the counts with an expired window. A new window of each kind begins at
        ``now``."""
        over = [kind for kind in self._sums if now >= self._until[kind]]
        for kind in over:
            self._until[kind] = now + self._window
        return [self._sums.pop(kind) for kind in over]

    def next_due(self) -> float | None:
        """Return the time at which ``due`` will have a count, or None."""
        return min((self._until[kind] for kind in self._sums), default=None)


class CountedLog:
    """A log with at most one line per kind and window. Safe from any thread."""

    def __init__(self, logger: logging.Logger, window: float = WINDOW_S) -> None:
        self._logger = logger
        self._tally = Tally(window)
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def warn(self, kind: str, *arguments: object) -> None:
        """Log ``kind % arguments`` as a warning, or count the event.

        Events with an equal ``kind`` are counted together. The first count sets a timer for ``flush``.
        """
        text = kind % arguments
        with self._lock:
            log_now = self._tally.add(kind, text, time.monotonic())
            if not log_now and self._timer is None:
                self._wait()
        if log_now:
            self._logger.warning("%s", text)

    def flush(self) -> None:
        """Log the counts with an expired window."""
        with self._lock:
            self._timer = None
            sums = self._tally.due(time.monotonic())
            self._wait()
        for one in sums:
            self._logger.warning("%d more times; the last one: %s", one.times, one.last)

    def _wait(self) -> None:
        """Set a timer for ``flush`` when the next count is due. Call with the lock held."""
        due = self._tally.next_due()
        if due is not None:
            self._timer = threading.Timer(max(0.0, due - time.monotonic()), self.flush)
            self._timer.daemon = True
            self._timer.start()
