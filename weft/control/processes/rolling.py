"""The rolling restart replaces every process of a table, one after the other, after a drain. Pure.

    all answer ─► drain ─idle, or too late─► quit ─ended─► its next process loads ─answers─► the next one

All processes of an expert-parallel group are replaced together. A draining process gets no new work. The
process table starts the replacement, without a charge to the restart budget. Unfinished work then continues
elsewhere, as after any loss. If a replacement does not come up, the rolling restart ends there; the remaining
processes stay as before.

A restart may bring new settings. Each process gets the settings when its turn begins. If a process does not
come up, the process starts again with the former settings, and the rolling restart ends.

Processes that leave the server drain and quit in the same way, and are not started again.

A *switch* replaces all processes at once, because the new processes compute with other operations:

    all answer, all idle ─► drain all ─all idle─► Switch, quit all ─ended─► all load ─all answer─► done

The two sets of operations differ in the last bits. No process with old operations works beside a process with
new ones, and no sequence moves from old to new. So no stream and no cached block mixes bits of both. If work
outlasts the drain, the processes start again with the old operations, and the switch waits for the next idle
moment. A server without an idle moment never switches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from weft.common.errors import EngineDead
from weft.common.log import get_logger
from weft.control.processes import table as t

log = get_logger(__name__)

SETTLE_S = 1.0
"""Seconds for every API server to learn of a drain, and for requests already on the way to arrive."""
ABSENT_S = 10.0
"""Seconds without an answer until a requested restart reports for which process it waits."""
BUSY = "engines restart or leave already; new settings are possible afterwards: try again later"
"""Refusal of new settings while ``RollingRestart.active``."""
RENEWS = "groups restart with new settings; new groups are possible afterwards: try again later"
"""Refusal of new groups while ``RollingRestart.renews``."""
ALL: frozenset[str] = frozenset()
"""Stands for all names of a requested restart."""
QUIT_S = 15.0
"""Seconds for a process to end after the order to quit."""


class Quit(NamedTuple):
    """Order an engine to finish the current step and end."""

    name: str
    incarnation: int


class Switch(NamedTuple):
    """Start all later processes with the new operations. Precedes the ``Quit`` actions of a switch."""


class Settings(NamedTuple):
    """Start all later processes of ``names`` with their new settings, or with the former ones again."""

    names: tuple[str, ...]
    new: bool


Action: TypeAlias = t.Action | Quit | Switch | Settings


class RollingRestart:
    """Decide which process is replaced next. All times are in seconds on one monotonic clock."""

    def __init__(self, table: t.ProcessTable, drain_timeout: float) -> None:
        """Bind to ``table``; replace nothing yet.

        ``drain_timeout``: seconds for a process to finish its work.
        """
        self._table = table
        self._drain_timeout = drain_timeout
        self._asked = False
        """True while a requested restart waits until all processes answer."""
        self._later: list[frozenset[str]] = []
        """Restarts to begin after the present one, by the names of their processes."""
        self.renews = False
        """True if the present restart brings new settings."""
        self._only: frozenset[str] | None = None
        """Names that the present restart replaces; empty for all, None without a restart."""
        self._left: deque[dict[str, int]] = deque()
        """Units (name -> incarnation) to replace after the current unit."""
        self._unit: dict[str, int] = {}
        """Name -> old incarnation of the processes under replacement."""
        self._idle: dict[str, int] = {}
        """Name -> incarnation of the watched processes with an idle last report."""
        self._up: set[str] = set()
        """Names of the processes that answer: before a restart of all, later of the unit's next processes."""
        self._settled = self._deadline = math.inf
        self._told = False
        """True after the unit got the order to quit."""
        self._wants_switch = False
        """True from ``begin_switch`` until all processes got the order to quit."""
        self._switching = False
        """True while the unit is all processes and drains for a switch."""
        self._kept: dict[str, int] = {}
        """API server -> number of begun sequences at no engine."""
        self._waits_since = math.inf
        """Time of the first ``tick`` in which the requested restart waited for answers."""

    @property
    def active(self) -> bool:
        """True during a restart or a switch. A switch that waits for an idle moment does not count."""
        return bool(self._asked or self._unit or self._left)

    @property
    def watched(self) -> dict[str, int]:
        """Name -> present incarnation of the processes to probe.

        The caller reports each answer to ``seen``.
        """
        entries = self._table.entries
        waits = self._asked or (self._wants_switch and not self.active)
        names = self._running() if waits else self._unit
        return {name: entries[name].incarnation for name in names if name in entries}

    def begin(self, only: Iterable[str] = (), renews: bool = False) -> None:
        """Begin to replace the processes ``only``, or all, once all running processes answer. ``renews``:
        with new settings; allowed only while no restart is ``active``.

        During a restart or a removal, the request waits for its end. During a restart of all processes, a
        request for all has no effect.
        """
        asked = frozenset(only)
        if self.active:
            if (asked or self._only != ALL) and asked not in self._later:
                self._later.append(asked)
        else:
            self._only, self.renews = asked, renews
            log.info("a rolling restart of %s was requested", ", ".join(sorted(asked)) or "all engines")
            self._asked, self._up, self._waits_since = True, set(), math.inf

    def remove(self, names: Iterable[str], now: float) -> list[Action]:
        """Drain and end ``names``, which leave the server. Work waits at most ``drain_timeout``.

        A replacement that is under way finishes first.
        """
        actions: list[Action] = [*self._table.leave(names)]
        entries = self._table.entries
        unit = {name: entries[name].incarnation for name in names if name in entries}
        if unit:
            log.info("%s drains and leaves the server", " and ".join(unit))
            # A replacement that waits for its turn has become pointless.
            others = (one for one in self._left if not one.keys() <= unit.keys())
            self._left = deque([unit, *others])
        return actions if self._unit else [*actions, *self._next(now)]

    @property
    def returnable(self) -> list[str]:
        """Names that leave and may stay after all, newest removal first. No such process has the order to
        quit."""
        # A name may also be in the unit of a restart, which began before the removal.
        units = [*self._left, *([] if self._told else [self._unit])]
        names = dict.fromkeys(name for unit in units for name in unit)
        return [name for name in names if name in self._table.leaving]

    def take_back(self, names: Iterable[str]) -> None:
        """Cancel the removal of ``names``, which are ``returnable``: the processes take work again."""
        back = list(names)
        self._table.stay(back)
        for name in back:
            # A later unit is the removal; the present unit may be a restart of the same process.
            unit = next((later for later in self._left if name in later), self._unit)
            del unit[name]
        self._left = deque(unit for unit in self._left if unit)
        for name, incarnation in self._unit.items():
            self._table.drain(name, incarnation)  # a restart under way goes on
        if back:
            log.info("%s stays in the server", " and ".join(back))

    def begin_switch(self) -> None:
        """Request a switch, once all processes answer and are idle. No effect while a switch waits.

        A rolling restart goes first, even if requested later.
        """
        self._wants_switch = True

    def end(self) -> None:
        """Cancel the restart because the server ends: processes that drain take work again.

        Without these processes, requests that wait for an engine would wait in vain until the end of the
        server. A unit with the order to quit is still replaced, for the same requests.
        """
        self._asked = self._wants_switch = self._switching = False
        self._left.clear()
        self._later.clear()
        if not self._told:
            for name, incarnation in self._present().items():
                self._table.undrain(name, incarnation)
            self._unit = {}

    def seen(self, name: str, incarnation: int, idle: bool | None) -> None:
        """Note a probe answer of a process.

        ``idle``: True without sequences of any API server and without memory that a transfer reads. None if
        the process has not reported since the last call.
        """
        # Three cases: all processes before a restart, old processes of the unit, its new processes.
        if self._asked:
            self._up.add(name)
        if self._unit.get(name) == incarnation or (not self.active and self._wants_switch):
            if idle:
                self._idle[name] = incarnation
            elif idle is not None:
                self._idle.pop(name, None)
        elif name in self._unit and self._table.running(name, incarnation) is not None:
            self._up.add(name)

    def keeps(self, front: str, kept: int) -> None:
        """Note that the API server ``front`` has ``kept`` begun sequences at no engine, for instance paused.

        A switch waits for the end of these sequences: each continues later from tokens of the old operations.
        """
        self._kept[front] = kept

    def tick(self, now: float) -> list[Action]:
        """Return the actions that are due at ``now``. The caller polls several times per second.

        Begins a requested restart, moves from one unit to the next, and cancels the restart if a replacement
        dies. A unit past its deadline ends with work in flight. All changes of processes go through the
        table.
        """
        if self._asked:
            self._report_absent(now)
        if self._asked and self._up >= self._running().keys():
            self._asked = False
            self._left.extend(self._units())
        if not self.active:
            self._only, self.renews = None, False
            if self._later:
                self.begin(self._later.pop(0))
        if not self.active and self._wants_switch:
            self._drain_for_switch(now)
        if not self._unit:
            return self._next(now)
        if self._switching and self._incarnations() != self._unit:
            # A process died before the switch, and its replacement has the old operations. Replace the rest
            # of the unit without a switch, because drained processes get no work. The switch waits for the
            # next idle moment.
            self._switching = False
            return self._abandon(EngineDead("another process started before the switch"), now)
        # A process that has left the server has no entry any more.
        left = {name: entry for name, entry in self._table.entries.items() if name in self._unit}
        # An incarnation more than 1 above the old number means that the replacement died too.
        again = [one.incarnation > self._unit[name] + 1 for name, one in left.items()]
        if any(again) or any(one.state is not t.ProcessState.RUNNING for one in left.values()):
            return self._cancel(now)
        if all(one.incarnation != self._unit[name] for name, one in left.items()):
            # A replacement that leaves the server need not come up: its own drain has deadlines.
            if self._up >= {name for name, one in left.items() if not one.leaving}:
                if left:
                    log.info("%s is restarted", " and ".join(left))
                self._unit = {}
                return self._next(now)
            return []
        present = self._present()
        if not self._told:
            # Ignore idle reports from before every API server knew of the drain: new work may still be on the
            # way.
            if now < self._settled:
                self._idle.clear()
            done = now >= self._settled and self._idle.items() >= present.items()
            done = done and not (self._switching and any(self._kept.values()))
            if self._switching and not done and now >= self._deadline:
                # Work arrived before the API servers knew of the drain, and outlasts the drain. Continue with
                # the old operations: a longer drain would block all other requests.
                self._switching = False
                return self._abandon(EngineDead("requests arrived before the switch"), now)
            return self._quit(present, now) if done or now >= self._deadline else []
        if now < self._deadline:
            return []
        error = EngineDead("the process did not end")
        return [one for name, old in present.items() for one in self._table.lose(name, old, error, now)]

    def _units(self) -> list[dict[str, int]]:
        """Return the units of the requested restart: name -> incarnation of processes replaced together."""
        units: dict[str, dict[str, int]] = {}
        for name, entry in self._running().items():
            if entry.leaving or (self._only and name not in self._only):
                continue
            # A process without an expert-parallel group is a unit alone; the space keeps its key unique.
            units.setdefault(entry.member.expert_group or f" {name}", {})[name] = entry.incarnation
        return list(units.values())

    def _cancel(self, now: float) -> list[Action]:
        """End the restart, because a replacement did not start. Processes that leave the server still do."""
        log.error("the rolling restart is cancelled: %s did not start again", " and ".join(self._unit))
        self._asked = self._wants_switch = False
        self._later.clear()
        leaving, unit = self._table.leaving, self._unit
        self._left = deque(unit for unit in self._left if unit.keys() <= leaving)
        back = self._return_settings(unit, now) if self.renews else []
        error = EngineDead("another engine of the expert-parallel group did not start again")
        return [*back, *self._abandon(error, now)]

    def _return_settings(self, unit: dict[str, int], now: float) -> list[Action]:
        """Return the actions that start the processes of ``unit`` with their former settings."""
        log.error("%s: the former settings hold again", " and ".join(unit))
        actions: list[Action] = [Settings(tuple(unit), False)]
        for name, old in unit.items():
            entry = self._table.entries.get(name)
            if entry is None or entry.leaving:
                continue
            if entry.state is t.ProcessState.RUNNING and entry.incarnation != old:
                # Draining: the replacement costs no restart of the budget.
                self._table.drain(name, entry.incarnation)
                error = EngineDead("the process has the new settings")
                actions += self._table.lose(name, entry.incarnation, error, now)
        return actions

    def _drain_for_switch(self, now: float) -> None:
        """Drain all processes if all running processes are idle and none is waiting for a restart."""
        running = self._incarnations()
        waits = any(one.state is t.ProcessState.WAITING for one in self._table.entries.values())
        kept = any(self._kept.values())
        if running and not waits and not kept and self._idle.items() >= running.items():
            self._switching = True
            self._left.append(running)
            self._next(now)

    def _report_absent(self, now: float) -> None:
        """Log once which processes a requested restart waits for."""
        absent = sorted(self._running().keys() - self._up)
        if self._waits_since == math.inf:
            self._waits_since = now
        elif absent and ABSENT_S <= now - self._waits_since < math.inf:
            self._waits_since = -math.inf  # no second report
            log.warning("the rolling restart waits for %s, which does not answer", " and ".join(absent))

    def _present(self) -> dict[str, int]:
        """Return name -> incarnation of the unit's old processes that still run."""
        return {name: old for name, old in self._unit.items() if self._table.running(name, old)}

    def _abandon(self, error: EngineDead, now: float) -> list[Action]:
        """Drop the unit.

        Return the actions that replace the old processes: drained processes never get work again.
        """
        present, self._unit = self._present(), {}
        return [one for name, old in present.items() for one in self._table.lose(name, old, error, now)]

    def _incarnations(self) -> dict[str, int]:
        """Return name -> incarnation of all running processes."""
        return {name: entry.incarnation for name, entry in self._running().items()}

    def _running(self) -> dict[str, t.ProcessEntry]:
        """Return name -> entry of all running processes."""
        entries = self._table.entries
        return {name: one for name, one in entries.items() if one.state is t.ProcessState.RUNNING}

    def _next(self, now: float) -> list[Action]:
        """Begin the next unit, if any: drain its processes until a time-out. Return the action that brings
        new settings, if the restart does."""
        self._table.trial = ()
        if not self._left or (self.renews and not self._refresh()):
            return []
        self._unit = self._left.popleft()
        self._idle, self._up, self._told = {}, set(), False
        self._settled, self._deadline = now + SETTLE_S, now + max(self._drain_timeout, SETTLE_S)
        for name, incarnation in self._unit.items():
            self._table.drain(name, incarnation)
        stay = tuple(name for name in self._unit if name not in self._table.leaving)
        self._table.trial = stay if self.renews else ()
        return [Settings(stay, True)] if self.renews and stay else []

    def _refresh(self) -> bool:
        """Note the next unit's present incarnations: the successor of a process that died before its turn has
        the former settings. Return True if all run. A retired process ends the restart."""
        unit, leaving, entries = self._left[0], self._table.leaving, self._table.entries
        stay = {name: entries[name] for name in unit if name in entries and name not in leaving}
        unit.update({name: entry.incarnation for name, entry in stay.items()})
        if any(entry.state is t.ProcessState.RETIRED for entry in stay.values()):
            log.error("the rolling restart is cancelled: %s died before its turn", " and ".join(stay))
            self._left = deque(unit for unit in self._left if unit.keys() <= leaving)
            return False
        return all(entry.state is t.ProcessState.RUNNING for entry in stay.values())

    def _quit(self, present: dict[str, int], now: float) -> list[Action]:
        """Return the actions that order the unit's processes to end, after `Switch` in a switch.

        Begins the deadline of ``QUIT_S`` seconds.
        """
        self._told, self._deadline = True, now + QUIT_S
        quits: list[Action] = [Quit(name, incarnation) for name, incarnation in present.items()]
        if not self._switching:
            return quits
        self._wants_switch = self._switching = False
        return [Switch(), *quits]
