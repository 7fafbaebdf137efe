"""Process table: the processes of a server by name, and the rule for restarts. Pure.

Each process of a name has a separate *incarnation* number. Reports about an earlier incarnation are ignored.
So a process is replaced once, even when several API servers report the same loss. Repeated deaths delay the
next restart more and more. Without a restart left in the group's budget, a process is retired together with
its expert-parallel group. The other processes go on as long as the remaining roles can serve requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

from weft.common.errors import WeftError
from weft.common.log import get_logger
from weft.common.restarts import RestartBudget

log = get_logger(__name__)

WINDOW = 600.0
"""Length of the restart window in seconds. The limit counts restarts over all processes of a group."""
SHORT_S = 60.0
"""Lifetime in seconds below which a death counts as a repeated death."""
AT_ONCE = 2
"""Number of repeated deaths with an immediate restart."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""Seconds of the first delay, doubled by each further death, and the maximum delay."""

Role: TypeAlias = Literal["head", "front"]
Condition: TypeAlias = Literal["running", "draining", "leaving", "waiting", "ended", "retired"]
LABELS: dict[Role, str] = {"head": "engine", "front": "API server"}
"""Names of the roles in log lines."""


class ProcessState(Enum):
    """States of a process name.

    RUNNING ──lost──► WAITING (for its restart time) ──► RUNNING (the next incarnation)
    RUNNING ──lost, no restart left──► RETIRED ──revived──► RUNNING
    RUNNING or WAITING ──► ENDED (on request)

    A leaving process has no next state: the name is removed.
    """

    RUNNING = "running"
    WAITING = "waiting"
    ENDED = "ended"
    RETIRED = "retired"


class Start(NamedTuple):
    """Start a process. The caller must not wait for the process."""

    role: Role
    name: str
    incarnation: int


class Kill(NamedTuple):
    """Kill the process and its children at once. The process may have ended already."""

    role: Role
    name: str
    incarnation: int


class Forget(NamedTuple):
    """Drop everything that is kept for ``name``, which has left the server. ``Kill`` came before."""

    role: Role
    name: str


Action: TypeAlias = Start | Kill | Forget


class Member(NamedTuple):
    """Properties of a process that the table uses."""

    expert_group: str = ""
    """Name of the expert-parallel group; "" if none. Its members fail together."""
    group: str = ""
    """Name of the group. All processes of a group share a restart budget."""
    role: str = "unified"
    """Role of the group of an engine process."""
    base: str = ""
    """Name of the group without its number; "" for a group without a name. See ``scaling``."""
    tower: bool = False
    """True if the process encodes images."""


def members_of(names: Iterable[str] | Mapping[str, Member]) -> dict[str, Member]:
    """Return the members by name. Plain names become members of one group without a name."""
    return dict(names) if isinstance(names, Mapping) else {name: Member() for name in names}


def named(name: str, members: Mapping[str, Member]) -> list[str]:
    """Return the names of all processes in group ``name``, or of the process called ``name``."""
    return [one for one, member in members.items() if name in (one, member.group)]


def with_expert_groups(names: Iterable[str], members: Mapping[str, Member]) -> list[str]:
    """Return ``names`` and all members of the same expert-parallel groups, in the order of ``members``."""
    asked = set(names)
    expert_groups = {members[one].expert_group for one in asked} - {""}
    return [one for one, member in members.items() if one in asked or member.expert_group in expert_groups]


@dataclass(slots=True)
class ProcessEntry:
    """State of one name: the present process, or how the last process ended."""

    member: Member
    incarnation: int = 0
    """Incarnation of the newest process; 0 before the first start."""
    state: ProcessState = ProcessState.RUNNING
    error: WeftError | None = None
    """How the last process was lost that nobody had ordered to end; None if there was none."""
    ready: bool = False
    """API server only: True if the process answers requests."""
    draining: bool = False
    """Running only: True if the process is about to be replaced and gets no new work."""
    heard: float = -math.inf
    """Time of the last message from the process."""
    began: float = -math.inf
    """Start time of the newest process."""
    deaths: int = 0
    """Number of deaths in a row."""
    due: float = math.inf
    """Waiting only: start time of the next process."""
    leaving: bool = False
    """True if the name leaves the server: no process is started again, and the last end removes the name."""

    @property
    def condition(self) -> Condition:
        """The state, with the reason of a drain."""
        if self.state is not ProcessState.RUNNING or not self.draining:
            return self.state.value
        return "leaving" if self.leaving else "draining"


class ProcessTable:
    """All processes of one role, and the rule for restarts.

    All times are in seconds on one monotonic clock.
    """

    def __init__(
        self,
        role: Role,
        names: Iterable[str] | Mapping[str, Member],
        restarts: int,
        serves: Callable[[set[str]], bool] = bool,
    ) -> None:
        """Set up one entry per name.

        ``restarts``: maximum restarts per group within ``WINDOW`` seconds. ``serves``: return True if
        processes of the given roles can serve requests. If the remaining roles cannot, all processes are
        retired.
        """
        self.role = role
        self._entries = {name: ProcessEntry(member) for name, member in members_of(names).items()}
        groups = {entry.member.group for entry in self._entries.values()}
        self._restarts = restarts
        self._budgets = {group: RestartBudget(restarts, WINDOW) for group in groups}
        self._past: dict[str, int] = {}
        """Name that has left -> its last incarnation. A later process of the name gets a higher number."""
        self.trial: Collection[str] = ()
        """Names whose next process has new settings. A death of such a process takes no budget."""
        self.serves = serves
        self.first = self.members
        """Members at the start of the server. A later group has the settings of an earlier one."""

    @property
    def entries(self) -> Mapping[str, ProcessEntry]:
        """Entries by name, in start order. Only the table changes ``state``."""
        return self._entries

    @property
    def members(self) -> dict[str, Member]:
        """Members by name, in start order."""
        return {name: entry.member for name, entry in self._entries.items()}

    @property
    def leaving(self) -> frozenset[str]:
        """Names of the leaving processes."""
        return frozenset(name for name, entry in self._entries.items() if entry.leaving)

    @property
    def retired(self) -> frozenset[str]:
        """Names without a process that do not wait for a restart."""
        return frozenset(name for name, entry in self._entries.items() if not _lives(entry))

    @property
    def over(self) -> bool:
        """True if no process runs and none is waiting to start."""
        return not any(_lives(entry) for entry in self._entries.values())

    @property
    def ready(self) -> bool:
        """True if every running process answers requests."""
        return all(entry.ready for entry in self._entries.values() if entry.state is ProcessState.RUNNING)

    def running(self, name: str, incarnation: int) -> ProcessEntry | None:
        """Return the entry if ``incarnation`` is the running process of ``name``, else None.

        Unknown names give None.
        """
        entry = self._entries.get(name)
        present = (
            entry is not None and entry.state is ProcessState.RUNNING and entry.incarnation == incarnation
        )
        return entry if present else None

    def start(self, now: float) -> list[Action]:
        """Return the actions that start the first process of each name."""
        return [self._next(name, entry, now) for name, entry in self._entries.items()]

    def join(self, members: Mapping[str, Member], now: float) -> list[Action]:
        """Add new names and return the actions that start their first processes."""
        actions: list[Action] = []
        for name, member in members.items():
            assert name not in self._entries, name
            self._entries[name] = ProcessEntry(member, self._past.pop(name, 0))
            self._budgets.setdefault(member.group, RestartBudget(self._restarts, WINDOW))
            actions.append(self._next(name, self._entries[name], now))
        return actions

    def leave(self, names: Iterable[str]) -> list[Action]:
        """Mark ``names`` as leaving. Return the actions that remove the names without a process.

        A running process drains; the caller ends the process later (``RollingRestart``).
        """
        actions: list[Action] = []
        for name in names:
            entry = self._entries[name]
            entry.leaving = True
            if entry.state is ProcessState.RUNNING:
                entry.draining = True
            else:
                actions.append(self._remove(name))
        return actions

    def stay(self, names: Iterable[str]) -> None:
        """Undo ``leave``: the processes of ``names`` take work again."""
        for name in names:
            self._entries[name].leaving = self._entries[name].draining = False

    def _remove(self, name: str) -> Forget:
        """Remove a name and return the action that drops what is kept for the name."""
        entry = self._entries.pop(name)
        self._past[name] = entry.incarnation
        if all(one.member.group != entry.member.group for one in self._entries.values()):
            self._budgets.pop(entry.member.group)  # a later group of the name begins with a full budget
        log.info("%s %s has left the server", LABELS[self.role], name)
        return Forget(self.role, name)

    def lose(self, name: str, incarnation: int, error: WeftError, now: float) -> list[Action]:
        """Handle the loss of a process: return the actions that kill and replace the process, or retire the
        name. Logged.

        Return no action for an earlier incarnation. A draining process is replaced at once, without a charge
        to the restart budget; a process on ``trial`` a little later. Repeated early deaths delay the restart.
        Without budget, the name and its expert-parallel group are retired with ``error``.
        """
        entry = self.running(name, incarnation)
        if entry is None:
            return []
        actions: list[Action] = [Kill(self.role, name, incarnation)]
        if entry.leaving:
            return [*actions, self._remove(name)]
        # A planned replacement: the process ended on request, or died just before.
        if entry.draining:
            return [*actions, self._next(name, entry, now)]
        entry.error = error
        if name in self.trial:  # not at once: the owner returns the former settings first
            entry.state, entry.ready, entry.due = ProcessState.WAITING, False, now + FIRST_WAIT_S
            return actions
        # Only deaths soon after the start count in a row.
        budget = self._budgets[entry.member.group]
        entry.deaths = entry.deaths + 1 if now - entry.began < SHORT_S else 1
        # A budget of 0 restarts is a choice, not an error to log.
        if not budget.grant(now):
            if budget.most:
                deaths, kind = budget.most + 1, self._kind(entry)
                log.error("%d %s died within %g minutes: no further restart", deaths, kind, WINDOW / 60)
            return [*actions, *self._retire(entry, error)]
        wait = _wait(entry.deaths)
        if wait:
            entry.state, entry.ready, entry.due = ProcessState.WAITING, False, now + wait
            log.info("%s %s is restarted in %g s (restart %d)", LABELS[self.role], name, wait, budget.granted)
            return actions
        log.info("%s %s is restarted (restart %d)", LABELS[self.role], name, budget.granted)
        return [*actions, self._next(name, entry, now)]

    def tick(self, now: float) -> list[Action]:
        """Return the actions that start all waiting processes with a due time up to ``now``."""
        due = [(name, entry) for name, entry in self._entries.items() if entry.due <= now]
        return [self._next(name, entry, now) for name, entry in due]

    def _retire(self, lost: ProcessEntry, error: WeftError) -> list[Action]:
        """Retire ``lost`` and the members of the same expert-parallel group. Retire all if the rest cannot
        serve.

        Return the actions that kill the other retired processes.
        """
        expert_group = lost.member.expert_group
        gone = {
            id(entry)
            for entry in self._entries.values()
            if expert_group and entry.member.expert_group == expert_group
        }
        gone.add(id(lost))
        # The remaining roles decide if the server can still serve requests.
        lasting = [e for e in self._entries.values() if _lives(e) and not e.leaving]
        roles = {e.member.role for e in lasting if id(e) not in gone}
        actions: list[Action] = []
        for name, entry in self._entries.items():
            if _lives(entry) and (id(entry) in gone or not self.serves(roles)):
                if entry is not lost and entry.state is ProcessState.RUNNING:
                    actions.append(Kill(self.role, name, entry.incarnation))
                entry.state, entry.due, entry.error = ProcessState.RETIRED, math.inf, error
        return actions

    def revive(self, name: str, now: float) -> list[Action]:
        """Start the retired processes of group or process ``name``, and of its expert-parallel group, with
        new budgets. Return the actions.

        Return no action for an unknown name, or if no process is alive any more: the server is about to end.
        """
        entries = self._entries
        members = {one: entry.member for one, entry in entries.items()}
        retired = [one for one, entry in entries.items() if entry.state is ProcessState.RETIRED]
        if self.over:
            return []
        actions: list[Action] = []
        for one in with_expert_groups(named(name, members), members):
            if one in retired:
                # Without a new budget the next death would retire the group again.
                self._budgets[members[one].group].renew()
                entries[one].deaths, entries[one].error = 0, None
                actions.append(self._next(one, entries[one], now))
                log.info("%s %s was retired and is restarted", LABELS[self.role], one)
        return actions

    def _kind(self, entry: ProcessEntry) -> str:
        """Return the processes of ``entry``'s budget as log text: ``engines of group decode``."""
        group = f" of group {entry.member.group}" if entry.member.group else ""
        return f"{LABELS[self.role]}s{group}"

    def end(self, name: str, incarnation: int) -> bool:
        """Mark a process as ended on request. Return False for an earlier incarnation."""
        entry = self.running(name, incarnation)
        if entry is not None:
            entry.state, entry.ready = ProcessState.ENDED, False
        return entry is not None

    def drain(self, name: str, incarnation: int) -> None:
        """Mark a process as draining: no new work, and a replacement after any end of the process."""
        if (entry := self.running(name, incarnation)) is not None:
            entry.draining = True

    def undrain(self, name: str, incarnation: int) -> None:
        """Undo ``drain``: the process takes work again, unless the process leaves."""
        entry = self.running(name, incarnation)
        if entry is not None and not entry.leaving:
            entry.draining = False

    def give_up(self) -> None:
        """Cancel the restart of all waiting processes."""
        for entry in self._entries.values():
            if entry.state is ProcessState.WAITING:
                entry.state, entry.due = ProcessState.ENDED, math.inf

    def _next(self, name: str, entry: ProcessEntry, now: float) -> Start:
        """Advance the incarnation, reset the entry and return the start action."""
        entry.incarnation += 1
        entry.state = ProcessState.RUNNING
        entry.ready = entry.draining = False
        entry.heard = entry.began = now
        entry.due = math.inf
        return Start(self.role, name, entry.incarnation)


def _lives(entry: ProcessEntry) -> bool:
    """Return True if the entry has a process or waits for a restart."""
    return entry.state in (ProcessState.RUNNING, ProcessState.WAITING)


def _wait(deaths: int) -> float:
    """Return the restart delay in seconds after ``deaths`` deaths in a row."""
    further = deaths - AT_ONCE
    # The limit on the exponent avoids an overflow after very many deaths.
    return 0.0 if further <= 0 else min(FIRST_WAIT_S * 2.0 ** min(further - 1, 10), LONGEST_WAIT_S)
