"""Log lines for events that others cause at will: the first one is told at once, the rest are counted.

    12:00:01 W .. a connection for transfers was refused: a peer speaks version 3
    12:01:01 W .. 693 more times; the last one: a connection for transfers was refused: there is no proof

``Tally`` decides and is pure; ``CountedLog`` has the logger, the clock and a timer.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

WINDOW_S = 60.0
"""Seconds that one sum covers."""
MOST_KINDS = 64
"""Kinds that one log tells apart; further ones are counted together."""
_OTHERS = "other events"


class Sum(NamedTuple):
    """Events of one kind that were not told when they came."""

    kind: str
    times: int
    last: str
    """The text of the last one."""


class Tally:
    """Which of many events are told at once, and what the rest sum up to. Times are seconds of one clock."""

    def __init__(self, window: float = WINDOW_S) -> None:
        self._window = window
        self._until: dict[str, float] = {}
        """Kind -> when its window ends."""
        self._sums: dict[str, Sum] = {}

    def add(self, kind: str, text: str, now: float) -> bool:
        """Takes in an event. Returns whether to tell it now; else it is a part of a later sum."""
        if kind not in self._until and len(self._until) >= MOST_KINDS:
            kind = _OTHERS
        if now >= self._until.get(kind, now) and kind not in self._sums:
            self._until[kind] = now + self._window
            return True
        before = self._sums.get(kind)
        self._sums[kind] = Sum(kind, 1 if before is None else before.times + 1, text)
        return False

    def due(self, now: float) -> list[Sum]:
        """The sums whose window is over; the next window of these kinds begins now."""
        over = [kind for kind in self._sums if now >= self._until[kind]]
        for kind in over:
            self._until[kind] = now + self._window
        return [self._sums.pop(kind) for kind in over]

    def next_due(self) -> float | None:
        """When ``due`` has something, if nothing comes before; None for never."""
        return min((self._until[kind] for kind in self._sums), default=None)


class CountedLog:
    """A log whose lines are one per kind and window. From any thread."""

    def __init__(self, logger: logging.Logger, window: float = WINDOW_S) -> None:
        self._logger = logger
        self._tally = Tally(window)
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def say(self, kind: str, *arguments: object) -> None:
        """Tells, or counts, ``kind % arguments``. Events are alike whose ``kind`` is equal."""
        text = kind % arguments
        with self._lock:
            told = self._tally.add(kind, text, time.monotonic())
            if not told and self._timer is None:
                self._wait()
        if told:
            self._logger.warning("%s", text)

    def flush(self) -> None:
        """Tells the sums whose window is over."""
        with self._lock:
            self._timer = None
            sums = self._tally.due(time.monotonic())
            self._wait()
        for one in sums:
            self._logger.warning("%d more times; the last one: %s", one.times, one.last)

    def _wait(self) -> None:
        """Has ``flush`` called when a sum is due."""
        due = self._tally.next_due()
        if due is not None:
            self._timer = threading.Timer(max(0.0, due - time.monotonic()), self.flush)
            self._timer.daemon = True
            self._timer.start()
