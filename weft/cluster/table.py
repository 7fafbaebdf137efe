"""The processes of one role, by name, and the one rule by which what died is started again. Pure.

Every process of a name has a number of its own, its *incarnation*. What is said of an earlier one is old
news, so one that several fronts report as lost is replaced once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

from weft.common.errors import WeftError
from weft.common.log import get_logger
from weft.common.restarts import RestartBudget

log = get_logger(__name__)

WINDOW = 600.0
"""Seconds in which the number of restarts is limited, over all processes of a role."""

Role: TypeAlias = Literal["head", "front"]


class ProcessState(Enum):
    """RUNNING ──lost──► RUNNING (the next incarnation) or RETIRED; RUNNING ──► ENDED, as it was told to."""

    RUNNING = "running"
    ENDED = "ended"
    RETIRED = "retired"


class Start(NamedTuple):
    """Start a process. The caller must not wait for it."""

    role: Role
    name: str
    incarnation: int


class Kill(NamedTuple):
    """Kill the rest of a process at once. It may have ended already."""

    role: Role
    name: str
    incarnation: int


Action: TypeAlias = Start | Kill


@dataclass(slots=True)
class ProcessEntry:
    """The state of one name: its present process, or its end."""

    incarnation: int = 0
    """Incarnation of its last process; 0 before the first."""
    state: ProcessState = ProcessState.RUNNING
    error: WeftError | None = None
    """Of a retired one: how its last process was lost."""
    ready: bool = False
    """Of a front: whether it answers requests."""
    heard: float = -math.inf
    """When its last message came."""


class ProcessTable:
    """Times are seconds of one monotonic clock, which never falls."""

    def __init__(self, role: Role, names: Iterable[str], restarts: int, *, together: bool = False) -> None:
        """``restarts``: how many may be started again in ``WINDOW`` seconds. ``together``: none can work
        without the others.
        """
        self.role = role
        self._entries = {name: ProcessEntry() for name in names}
        self._budget = RestartBudget(restarts, WINDOW)
        self._together = together

    @property
    def entries(self) -> Mapping[str, ProcessEntry]:
        """In order; states change here only."""
        return self._entries

    @property
    def over(self) -> bool:
        """Whether none runs, and none will."""
        return all(entry.state is not ProcessState.RUNNING for entry in self._entries.values())

    @property
    def ready(self) -> bool:
        """Whether all that run answer requests."""
        return all(entry.ready for entry in self._entries.values() if entry.state is ProcessState.RUNNING)

    def running(self, name: str, incarnation: int) -> ProcessEntry | None:
        """The entry, if that is its present process."""
        entry = self._entries.get(name)
        present = (
            entry is not None and entry.state is ProcessState.RUNNING and entry.incarnation == incarnation
        )
        return entry if present else None

    def start(self, now: float) -> list[Action]:
        """The first process of each name."""
        return [self._next(name, entry, now) for name, entry in self._entries.items()]

    def lose(self, name: str, incarnation: int, error: WeftError, now: float) -> list[Action]:
        """A process is gone or unusable: returns the actions that replace it, or retires its name."""
        entry = self.running(name, incarnation)
        if entry is None:
            return []
        actions: list[Action] = [Kill(self.role, name, incarnation)]
        if self._budget.grant(now):
            log.error("%s %s is started again (restart %d)", self.role, name, self._budget.granted)
            return [*actions, self._next(name, entry, now)]
        if self._budget.most:
            log.error("%d %ss died in %g minutes", self._budget.most + 1, self.role, WINDOW / 60)
        for other in self._entries.values() if self._together else (entry,):
            if other.state is ProcessState.RUNNING:
                other.state = ProcessState.RETIRED
                other.error = error
        return actions

    def end(self, name: str, incarnation: int) -> bool:
        """A process ended as it was told to. Whether that is news."""
        entry = self.running(name, incarnation)
        if entry is not None:
            entry.state = ProcessState.ENDED
            entry.ready = False
        return entry is not None

    def _next(self, name: str, entry: ProcessEntry, now: float) -> Start:
        entry.incarnation += 1
        entry.ready = False
        entry.heard = now
        return Start(self.role, name, entry.incarnation)
