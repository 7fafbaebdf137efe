"""Virtual time: events in order, and the only source of randomness of a run."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from weft.common.errors import WeftError


class TimelineProcess(Protocol):
    """A receiver of events."""

    @property
    def alive(self) -> bool: ...

    @property
    def stalled_until(self) -> float:
        """Time until which the process is stalled. Its events wait."""


class TimelineOwner(TimelineProcess, Protocol):
    """The simulated engine process, as called by the group."""

    name: str

    def group_runs(self) -> None:
        """Begin to work in a new epoch, with empty slots."""

    def group_lost(self) -> None:
        """Drop the epoch, with all steps in flight."""

    def group_failed(self, error: WeftError) -> None:
        """Handle the end of the group: no other epoch follows."""

    def step_counts(self) -> None:
        """Handle the completion of the awaited step."""

    def transfer_news(self) -> None:
        """Schedule the handling of new transfer reports."""


class TimelineClock:
    """The ``Clock`` of a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def now(self) -> float:
        return self._timeline.now

    def advance_to(self, time: float) -> None:
        """Do nothing: events move the time."""


class Timeline:
    """Events by virtual time in seconds. All randomness comes from one seed."""

    def __init__(self, seed: int, log: Callable[[float, str], None] | None = None) -> None:
        """Create an empty timeline. ``log`` receives (virtual seconds, text) for every event."""
        self.rng = random.Random(seed)
        self.now = 0.0
        self.clock = TimelineClock(self)
        self.events = 0
        """Number of events so far."""
        self.counts: Counter[str] = Counter()
        """Counts of occurrences, by name."""
        self._log = log
        self._heap: list[tuple[float, int, Any, Callable[..., object], tuple[Any, ...]]] = []
        self._number = 0

    def at(
        self, time: float, process: TimelineProcess | None, action: Callable[..., object], *arguments: Any
    ) -> None:
        """Schedule ``action`` at ``time``. Skipped if ``process`` is dead by then, postponed while
        ``process`` is stalled."""
        self._number += 1
        heapq.heappush(self._heap, (time, self._number, process, action, arguments))

    def after(
        self,
        least: float,
        most: float,
        process: TimelineProcess | None,
        action: Callable[..., object],
        *arguments: Any,
    ) -> None:
        """Schedule ``action`` after a random delay between ``least`` and ``most`` seconds."""
        self.at(self.now + least + (most - least) * self.rng.random(), process, action, *arguments)

    def advance(self) -> None:
        """Move to the earliest event and run it.

        The event of a dead process is dropped. The event of a stalled process is postponed. Raises IndexError
        without events.
        """
        time, _, process, action, arguments = heapq.heappop(self._heap)
        if time > self.now:
            self.now = time
        if process is not None:
            if not process.alive:
                return
            if (stalled_until := process.stalled_until) > self.now:
                self.counts["events that waited for a stalled process"] += 1
                self.at(stalled_until, process, action, *arguments)
                return
        self.events += 1
        action(*arguments)

    @property
    def logs(self) -> bool:
        """True if notes are logged."""
        return self._log is not None

    def note(self, source: str, arrow: str, target: str, action: object) -> None:
        """Log an occurrence, if a log was given."""
        if self._log is not None:
            self._log(self.now, f"{source} {arrow} {target}  {action}")

    def count(self, name: str, number: int = 1) -> None:
        """Count an occurrence."""
        self.counts[name] += number
