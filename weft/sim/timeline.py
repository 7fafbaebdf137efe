"""Virtual time: events in order, and the one source of chance of a schedule."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from weft.common.errors import WeftError


class Process(Protocol):
    """Whatever events happen to."""

    @property
    def alive(self) -> bool: ...

    @property
    def stalled_until(self) -> float:
        """It stands still until then; what comes meanwhile waits."""


class Owner(Process, Protocol):
    """The simulated head of a group, as the group calls it."""

    name: str

    def group_runs(self) -> None:
        """An epoch runs, and all slots are empty."""

    def group_lost(self) -> None:
        """The epoch is lost, and so are the steps in flight."""

    def group_failed(self, error: WeftError) -> None:
        """There will be no other epoch."""

    def step_counts(self) -> None:
        """The step that was waited for counts."""

    def room_news(self) -> None:
        """There is something to hear of rooms."""


class TimelineClock:
    """``Clock`` of a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def now(self) -> float:
        return self._timeline.now


class Timeline:
    """Events by virtual time in seconds. Everything random comes from one seed."""

    def __init__(self, seed: int, log: Callable[[float, str], None] | None = None) -> None:
        """``log``: gets (virtual seconds, what happened) of every event."""
        self.rng = random.Random(seed)
        self.now = 0.0
        self.clock = TimelineClock(self)
        self.events = 0
        """How many have happened."""
        self.counts: Counter[str] = Counter()
        """What happened, by name."""
        self._log = log
        self._heap: list[tuple[float, int, Any, Callable[..., object], tuple[Any, ...]]] = []
        self._number = 0

    def at(self, time: float, process: Process | None, what: Callable[..., object], *arguments: Any) -> None:
        """``what`` happens at ``time`` to ``process``, if that lives then, or later if it stands still."""
        self._number += 1
        heapq.heappush(self._heap, (time, self._number, process, what, arguments))

    def after(
        self, least: float, most: float, process: Process | None, what: Callable[..., object], *arguments: Any
    ) -> None:
        """``at`` in so many seconds, between ``least`` and ``most``."""
        self.at(self.now + least + (most - least) * self.rng.random(), process, what, *arguments)

    def advance(self) -> None:
        """Lets the earliest event happen, or wait if its process stands still."""
        time, _, process, what, arguments = heapq.heappop(self._heap)
        if time > self.now:
            self.now = time
        if process is not None:
            if not process.alive:
                return
            if (stalled_until := process.stalled_until) > self.now:
                self.counts["events that waited for a stalled process"] += 1
                self.at(stalled_until, process, what, *arguments)
                return
        self.events += 1
        what(*arguments)

    @property
    def logs(self) -> bool:
        """Whether anybody reads what is noted."""
        return self._log is not None

    def note(self, source: str, arrow: str, target: str, what: object) -> None:
        """For the log."""
        if self._log is not None:
            self._log(self.now, f"{source} {arrow} {target}  {what}")

    def count(self, name: str, number: int = 1) -> None:
        """Counts what happened."""
        self.counts[name] += number
