"""Collectives of simulated ranks: the forming of communicators, and the steps of all ranks.

Every participant learns of the end: complete, or broken. A collective breaks when a participant leaves, or
when its patience is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from testing.cluster.check import require
from weft.sim.timeline import Timeline, TimelineProcess


class Participant(TimelineProcess, Protocol):
    """A rank: the engine's own rank, or a rank process."""

    rank: int


Ended = Callable[[bool], None]
"""Called once at the end, with True if the collective was complete."""


class Collective:
    """One meeting of ``size`` ranks."""

    __slots__ = ("begun", "here", "over", "seconds", "size")

    def __init__(self, size: int, seconds: float) -> None:
        """Create an empty meeting. ``seconds``: from the arrival of the last rank to the end."""
        self.size = size
        self.seconds = seconds
        self.here: dict[int, tuple[Participant, Ended]] = {}
        self.begun = False
        """True if all ranks have come."""
        self.over = False


class Collectives:
    """All collectives of one group, or of an expert-parallel group."""

    def __init__(self, timeline: Timeline, patience: float, delay: float) -> None:
        """Create the collectives. ``patience`` is the maximum number of seconds of a rank's wait.

        ``delay`` is the maximum number of seconds until ranks notice that a rank has left.
        """
        self._timeline = timeline
        self._patience = patience
        self._delay = delay
        self._open: dict[object, Collective] = {}

    def join(self, key: object, size: int, seconds: float, who: Participant, ended: Ended) -> None:
        """Let ``who`` take part in the collective ``key``.

        ``ended(whole)`` is called at the end; ``whole`` is False if ranks were missing. Raise Violation if
        the rank takes part already.
        """
        collective = self._open.get(key)
        if collective is None:
            collective = self._open[key] = Collective(size, seconds)
        require(who.rank not in collective.here, f"rank {who.rank} is twice in {key}")
        collective.here[who.rank] = who, ended
        now = self._timeline.now
        if len(collective.here) == collective.size:
            self._timeline.at(now + collective.seconds, None, self._complete, key, collective)
        elif len(collective.here) == 1:
            self._timeline.at(now + self._patience, None, self._break, key, collective)

    def leave(self, rank: int) -> None:
        """Close the communicators of ``rank``. The other participants notice soon."""
        for key, collective in list(self._open.items()):
            if rank in collective.here:
                del collective.here[rank]
                self._timeline.after(0.0, self._delay, None, self._break, key, collective)

    def _complete(self, key: object, collective: Collective) -> None:
        """End a complete collective as whole.

        While a rank is stalled, wait for the rank, up to the patience.
        """
        if collective.over or len(collective.here) < collective.size:
            return
        awake = max(who.stalled_until for who, _ in collective.here.values())
        if awake > self._timeline.now:
            if not collective.begun:  # the others wait for a stalled rank, but not for ever
                collective.begun = True
                self._timeline.at(self._timeline.now + self._patience, None, self._break, key, collective)
            self._timeline.at(awake, None, self._complete, key, collective)
            return
        self._end(key, collective, True)

    def _break(self, key: object, collective: Collective) -> None:
        if not collective.over and (len(collective.here) < collective.size or collective.begun):
            self._end(key, collective, False)

    def _end(self, key: object, collective: Collective, whole: bool) -> None:
        """End the collective and notify all live participants; a stalled one after waking."""
        collective.over = True
        if self._open.get(key) is collective:
            del self._open[key]
        now = self._timeline.now
        for who, ended in collective.here.values():
            if who.stalled_until > now:
                self._timeline.at(now, who, ended, whole)
            elif who.alive:
                ended(whole)
