"""The processes of one kind, by name, and the one rule by which what died is started again. Pure.

Every process of a name has a number of its own, its *incarnation*. What is said of an earlier one is old
news, so one that several fronts report as lost is replaced once. One that dies again and again is started
again later and later, and in the end never: then the others go on, if they still serve something.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

from weft.common.errors import InvalidRequest, NotFound, WeftError
from weft.common.log import get_logger
from weft.common.restarts import RestartBudget

log = get_logger(__name__)

WINDOW = 600.0
"""Seconds in which the number of restarts is limited, over all processes of a group."""
SHORT_S = 60.0
"""Seconds from its start in which the death of a process is one of a row."""
AT_ONCE = 2
"""Deaths in a row after which the next process is started at once."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""Seconds until the next process after one death more than that; each further one doubles them."""

Role: TypeAlias = Literal["head", "front"]


class ProcessState(Enum):
    """RUNNING ──lost──► WAITING (for its time) ──► RUNNING (the next incarnation); RUNNING ──lost──► RETIRED;
    RUNNING or WAITING ──► ENDED, as it was told to; RETIRED ──revived──► RUNNING.
    """

    RUNNING = "running"
    WAITING = "waiting"
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


class Member(NamedTuple):
    """What the table must know of a process."""

    domain: str = ""
    """Processes of one domain work together or not at all; "" is none."""
    group: str = ""
    """Processes of one group share a budget of restarts."""
    role: str = "unified"
    """Of a head: what its group does."""


def members_of(names: Iterable[str] | Mapping[str, Member]) -> dict[str, Member]:
    """``names`` alone are all of one group, and none needs another."""
    return dict(names) if isinstance(names, Mapping) else {name: Member() for name in names}


def named(name: str, members: Mapping[str, Member]) -> list[str]:
    """Return the processes of the group ``name``, or the process of that name."""
    return [one for one, member in members.items() if name in (one, member.group)]


def with_domains(names: Iterable[str], members: Mapping[str, Member]) -> list[str]:
    """Return ``names`` and all processes that work together with them, in the order of ``members``."""
    asked = set(names)
    domains = {members[one].domain for one in asked} - {""}
    return [one for one, member in members.items() if one in asked or member.domain in domains]


def to_revive(name: str, members: Mapping[str, Member], retired: Iterable[str]) -> list[str]:
    """Return the ``retired`` processes that come back when an operator revives ``name``: a group, or one of
    its processes.

    Raises NotFound for a name that nobody has, and InvalidRequest where nothing is retired.
    """
    names = with_domains(named(name, members), members)
    if not name or not names:
        known = ", ".join(dict.fromkeys(member.group or one for one, member in members.items()))
        raise NotFound(f"no group is called {name!r}; there are {known}", param="group")
    gone = set(retired)
    found = [one for one in names if one in gone]
    if not found:
        raise InvalidRequest(
            f"no head of {name!r} is retired; heads that die are started again without a request",
            param="group",
        )
    return found


@dataclass(slots=True)
class ProcessEntry:
    """The state of one name: its present process, or its end."""

    member: Member
    incarnation: int = 0
    """Incarnation of its last process; 0 before the first."""
    state: ProcessState = ProcessState.RUNNING
    error: WeftError | None = None
    """Of a retired one: how its last process was lost."""
    ready: bool = False
    """Of a front: whether it answers requests."""
    draining: bool = False
    """Of one that runs: whether it is to be replaced, and gets no new work."""
    heard: float = -math.inf
    """When its last message came."""
    began: float = -math.inf
    """When its last process was started."""
    deaths: int = 0
    """In a row."""
    due: float = math.inf
    """Of one that waits: when the next process is started."""


class ProcessTable:
    """The processes of one kind and the rule that restarts them. Times are seconds of one monotonic clock,
    which never falls.
    """

    def __init__(
        self,
        role: Role,
        names: Iterable[str] | Mapping[str, Member],
        restarts: int,
        serves: Callable[[set[str]], bool] = bool,
    ) -> None:
        """``restarts``: how many of each group may be started again in ``WINDOW`` seconds. ``serves``: says
        whether processes of these roles serve anything; if not, all are retired.
        """
        self.role = role
        self._entries = {name: ProcessEntry(member) for name, member in members_of(names).items()}
        groups = {entry.member.group for entry in self._entries.values()}
        self._budgets = {group: RestartBudget(restarts, WINDOW) for group in groups}
        self._serves = serves

    @property
    def entries(self) -> Mapping[str, ProcessEntry]:
        """In order; states change here only."""
        return self._entries

    @property
    def over(self) -> bool:
        """Whether none runs, and none will."""
        return not any(_lives(entry) for entry in self._entries.values())

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
        if entry.draining:  # it ended as it was to, or before
            return [*actions, self._next(name, entry, now)]
        budget = self._budgets[entry.member.group]
        entry.deaths = entry.deaths + 1 if now - entry.began < SHORT_S else 1
        if not budget.grant(now):
            if budget.most:
                log.error("%d %ss died in %g minutes", budget.most + 1, self._kind(entry), WINDOW / 60)
            return [*actions, *self._retire(entry, error)]
        wait = _wait(entry.deaths)
        if wait:
            entry.state, entry.ready, entry.due = ProcessState.WAITING, False, now + wait
            log.info("%s %s is started again in %g s (restart %d)", self.role, name, wait, budget.granted)
            return actions
        log.info("%s %s is started again (restart %d)", self.role, name, budget.granted)
        return [*actions, self._next(name, entry, now)]

    def tick(self, now: float) -> list[Action]:
        """Time has passed: starts those whose time has come."""
        due = [(name, entry) for name, entry in self._entries.items() if entry.due <= now]
        return [self._next(name, entry, now) for name, entry in due]

    def _retire(self, lost: ProcessEntry, error: WeftError) -> list[Action]:
        """Its own domain goes with it, and everything once what is left serves nothing."""
        domain = lost.member.domain
        gone = {id(entry) for entry in self._entries.values() if domain and entry.member.domain == domain}
        gone.add(id(lost))
        roles = {e.member.role for e in self._entries.values() if _lives(e) and id(e) not in gone}
        actions: list[Action] = []
        for name, entry in self._entries.items():
            if _lives(entry) and (id(entry) in gone or not self._serves(roles)):
                if entry is not lost and entry.state is ProcessState.RUNNING:
                    actions.append(Kill(self.role, name, entry.incarnation))
                entry.state, entry.due, entry.error = ProcessState.RETIRED, math.inf, error
        return actions

    def revive(self, name: str, now: float) -> list[Action]:
        """Starts retired processes again, with new budgets: those of the group or the process ``name``, and
        of their domains. Without effect once none is left that serves.
        """
        entries = self._entries
        members = {one: entry.member for one, entry in entries.items()}
        retired = [one for one, entry in entries.items() if entry.state is ProcessState.RETIRED]
        if self.over:
            return []
        actions: list[Action] = []
        for one in with_domains(named(name, members), members):
            if one in retired:
                self._budgets[members[one].group].renew()
                entries[one].deaths, entries[one].error = 0, None
                actions.append(self._next(one, entries[one], now))
                log.info("%s %s was retired, and is started again", self.role, one)
        return actions

    def _kind(self, entry: ProcessEntry) -> str:
        return " ".join(filter(None, (self.role, entry.member.group)))

    def end(self, name: str, incarnation: int) -> bool:
        """A process ended as it was told to. Whether that is news."""
        entry = self.running(name, incarnation)
        if entry is not None:
            entry.state = ProcessState.ENDED
            entry.ready = False
        return entry is not None

    def drain(self, name: str, incarnation: int) -> None:
        """Gives this process no new work; it is replaced when it ends, however it ends."""
        if (entry := self.running(name, incarnation)) is not None:
            entry.draining = True

    def give_up(self) -> None:
        """Starts none of the waiting processes again."""
        for entry in self._entries.values():
            if entry.state is ProcessState.WAITING:
                entry.state, entry.due = ProcessState.ENDED, math.inf

    def _next(self, name: str, entry: ProcessEntry, now: float) -> Start:
        entry.incarnation += 1
        entry.state = ProcessState.RUNNING
        entry.ready = entry.draining = False
        entry.heard = entry.began = now
        entry.due = math.inf
        return Start(self.role, name, entry.incarnation)


def _lives(entry: ProcessEntry) -> bool:
    """Whether it has a process, or will have one."""
    return entry.state in (ProcessState.RUNNING, ProcessState.WAITING)


def _wait(deaths: int) -> float:
    """Seconds until the next process of one that died so often in a row."""
    further = deaths - AT_ONCE
    return 0.0 if further <= 0 else min(FIRST_WAIT_S * 2.0 ** min(further - 1, 10), LONGEST_WAIT_S)
