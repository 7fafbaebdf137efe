"""Collectives of simulated ranks: stores where an epoch's communicators meet, and steps that all ranks share.

Whoever takes part learns that all did, or that the collective broke: because somebody left it, or by itself
after the patience of a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from weft.sim.check import require
from weft.sim.timeline import Process, Timeline


class Participant(Process, Protocol):
    """A rank: the head's own, or the process of another."""

    rank: int


Ended = Callable[[bool], None]
"""Called once: whether the collective was whole."""


class Collective:
    """One meeting of ``size`` ranks."""

    __slots__ = ("begun", "here", "over", "seconds", "size")

    def __init__(self, size: int, seconds: float) -> None:
        """``seconds``: from the arrival of the last rank to the end."""
        self.size = size
        self.seconds = seconds
        self.here: dict[int, tuple[Participant, Ended]] = {}
        self.begun = False
        """Whether all have come."""
        self.over = False


class Collectives:
    """All that ranks of one domain, or of a group of its own, take part in."""

    def __init__(self, timeline: Timeline, patience: float, delay: float) -> None:
        """``patience``: seconds that a rank waits in a collective. ``delay``: at most until ranks notice that
        one has left.
        """
        self._timeline = timeline
        self._patience = patience
        self._delay = delay
        self._open: dict[object, Collective] = {}

    def join(self, key: object, size: int, seconds: float, who: Participant, ended: Ended) -> None:
        """``who`` takes part in the collective named ``key``, and hears of its end."""
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
        """The communicators of ``rank`` are closed: whoever is in a collective with it hears that soon."""
        for key, collective in list(self._open.items()):
            if rank in collective.here:
                del collective.here[rank]
                self._timeline.after(0.0, self._delay, None, self._break, key, collective)

    def _complete(self, key: object, collective: Collective) -> None:
        if collective.over or len(collective.here) < collective.size:
            return
        awake = max(who.stalled_until for who, _ in collective.here.values())
        if awake > self._timeline.now:
            if not collective.begun:  # they wait for the one that stands still, as long as they wait at all
                collective.begun = True
                self._timeline.at(self._timeline.now + self._patience, None, self._break, key, collective)
            self._timeline.at(awake, None, self._complete, key, collective)
            return
        self._end(key, collective, True)

    def _break(self, key: object, collective: Collective) -> None:
        if not collective.over and (len(collective.here) < collective.size or collective.begun):
            self._end(key, collective, False)

    def _end(self, key: object, collective: Collective, whole: bool) -> None:
        collective.over = True
        if self._open.get(key) is collective:
            del self._open[key]
        now = self._timeline.now
        for who, ended in collective.here.values():
            if who.stalled_until > now:
                self._timeline.at(now, who, ended, whole)
            elif who.alive:
                ended(whole)
