"""The rolling restart: every process of a table is replaced, one after the other, with its work done. Pure.

    all answer ─► drain ─idle, or too late─► quit ─ended─► its next process loads ─answers─► the next one

Processes of one domain are replaced together. One that drains gets nothing new of any front; it ends by the
table's own rule, without a charge to its budget. What of its work is left then goes on elsewhere, as after
any loss. When a process does not come back the restart ends there: the others stay as they are.

A *switch* replaces all processes at once, because the new processes compute with other operations:

    all answer, all idle ─► drain all ─all idle─► Switch, quit all ─ended─► all load ─all answer─► done

The bits of the operations differ. No process of the old operations works beside a process of the new ones,
and no sequence goes from old to new. So no stream and no cached block holds bits of both. Where work outlasts
the drain, the processes start again with the old operations, and the switch waits for the next idle moment. A
server that is never idle never switches.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple, TypeAlias

from weft.cluster import table as t
from weft.common.errors import EngineDead
from weft.common.log import get_logger

log = get_logger(__name__)

SETTLE_S = 1.0
"""Seconds in which every front has read that a process drains, and what it had sent has arrived."""
QUIT_S = 15.0
"""Seconds in which a process that was told to quit must have ended."""


class Quit(NamedTuple):
    """Tell a head to finish its step and end."""

    name: str
    incarnation: int


class Switch(NamedTuple):
    """Start all processes from now on with the new operations. Comes before the ``Quit`` of a switch."""


Action: TypeAlias = t.Action | Quit | Switch


class RollingRestart:
    """Decides which process is replaced next. Times are seconds of one monotonic clock, which never falls."""

    def __init__(self, table: t.ProcessTable, drain_timeout: float) -> None:
        """``drain_timeout``: seconds that a process gets to finish its work."""
        self._table = table
        self._drain_timeout = drain_timeout
        self._asked = False
        """Whether one was asked for that waits until all processes answer."""
        self._left: deque[dict[str, int]] = deque()
        self._unit: dict[str, int] = {}
        """Name -> incarnation, of those that are being replaced."""
        self._idle: dict[str, int] = {}
        """Name -> incarnation, of the watched processes whose last word was that they are idle."""
        self._up: set[str] = set()
        """Of the unit's next processes: those that answer."""
        self._settled = self._deadline = math.inf
        self._told = False
        """Whether the unit was told to quit."""
        self._wants_switch = False
        """True from ``begin_switch`` until all processes were told to quit."""
        self._switching = False
        """True while the unit is all processes, and drains for a switch."""

    @property
    def active(self) -> bool:
        """Whether one is under way. A switch that waits for an idle moment is not."""
        return bool(self._asked or self._unit or self._left)

    @property
    def watched(self) -> dict[str, int]:
        """Name -> present incarnation, of the processes that ``seen`` should be told of."""
        entries = self._table.entries
        waits = self._asked or (self._wants_switch and not self.active)
        return {name: entries[name].incarnation for name in (self._running() if waits else self._unit)}

    def begin(self) -> None:
        """Replaces all processes, once all that run answer. Without effect while one is under way."""
        if not self.active:
            log.info("a rolling restart was asked for")
            self._asked, self._up = True, set()

    def begin_switch(self) -> None:
        """Replaces all processes together, once all answer and none has work. Without effect while a switch
        waits. A restart that is under way, or that is asked for meanwhile, goes first.
        """
        self._wants_switch = True

    def end(self) -> None:
        """Replaces no more: the server ends."""
        self._asked = self._wants_switch = self._switching = False
        self._unit = {}
        self._left.clear()

    def seen(self, name: str, incarnation: int, idle: bool | None) -> None:
        """Notes that this process answers. ``idle``: whether it has no work of any front, and nothing that
        others read, by what it said since it was seen last; None: nothing.
        """
        if self._asked:
            self._up.add(name)
        elif self._unit.get(name) == incarnation or (not self.active and self._wants_switch):
            if idle:
                self._idle[name] = incarnation
            elif idle is not None:
                self._idle.pop(name, None)
        elif name in self._unit and self._table.running(name, incarnation) is not None:
            self._up.add(name)

    def tick(self, now: float) -> list[Action]:
        """What is to be done at ``now``. Comes several times a second."""
        if self._asked and self._up >= set(running := self._running()):
            self._asked = False
            units: dict[str, dict[str, int]] = {}
            for name, entry in running.items():
                units.setdefault(entry.member.domain or f" {name}", {})[name] = entry.incarnation
            self._left.extend(units.values())
        if not self.active and self._wants_switch:
            self._drain_for_switch(now)
        if not self._unit:
            return self._next(now)
        if self._switching and self._incarnations() != self._unit:
            # A process died or came first, and has the old operations. The others leave the drain by a
            # restart of their own; the switch waits for the next idle moment.
            self._switching = False
            return self._abandon(EngineDead("another process began before the switch"), now)
        entries = [self._table.entries[name] for name in self._unit]
        ended = [one.incarnation != self._unit[name] for name, one in zip(self._unit, entries, strict=True)]
        again = [one.incarnation > old + 1 for one, old in zip(entries, self._unit.values(), strict=True)]
        if any(again) or any(one.state is not t.ProcessState.RUNNING for one in entries):
            log.error("the rolling restart ends: %s did not come back", " and ".join(self._unit))
            self._asked = self._wants_switch = False
            self._left.clear()
            return self._abandon(EngineDead("others of its domain did not come back"), now)
        if all(ended):
            if self._up >= self._unit.keys():
                log.info("%s is restarted", " and ".join(self._unit))
                self._unit = {}
                return self._next(now)
            return []
        present = self._present()
        if not self._told:
            if now < self._settled:  # what was said before fronts knew proves nothing
                self._idle.clear()
            done = now >= self._settled and self._idle.items() >= present.items()
            if self._switching and not done and now >= self._deadline:
                # Work came before fronts knew, and lasts. The work goes on with the old operations, since a
                # longer drain would keep all other requests waiting.
                self._switching = False
                return self._abandon(EngineDead("requests came before the switch"), now)
            return self._quit(present, now) if done or now >= self._deadline else []
        if now < self._deadline:
            return []
        error = EngineDead("the process did not end")
        return [one for name, old in present.items() for one in self._table.lose(name, old, error, now)]

    def _drain_for_switch(self, now: float) -> None:
        """Drains all processes if all are idle, and none waits to be started again."""
        running = self._incarnations()
        waits = any(one.state is t.ProcessState.WAITING for one in self._table.entries.values())
        if running and not waits and self._idle.items() >= running.items():
            self._switching = True
            self._left.append(running)
            self._next(now)

    def _present(self) -> dict[str, int]:
        """Return name -> incarnation of the unit's old processes that still run."""
        return {name: old for name, old in self._unit.items() if self._table.running(name, old)}

    def _abandon(self, error: EngineDead, now: float) -> list[Action]:
        """Ends the unit's restart: its old processes would drain for ever, so the table replaces them."""
        present, self._unit = self._present(), {}
        return [one for name, old in present.items() for one in self._table.lose(name, old, error, now)]

    def _incarnations(self) -> dict[str, int]:
        """Return name -> incarnation of all processes that run."""
        return {name: entry.incarnation for name, entry in self._running().items()}

    def _running(self) -> dict[str, t.ProcessEntry]:
        entries = self._table.entries
        return {name: one for name, one in entries.items() if one.state is t.ProcessState.RUNNING}

    def _next(self, now: float) -> list[Action]:
        if not self._left:
            return []
        self._unit = self._left.popleft()
        self._idle, self._up, self._told = {}, set(), False
        self._settled, self._deadline = now + SETTLE_S, now + max(self._drain_timeout, SETTLE_S)
        for name, incarnation in self._unit.items():
            self._table.drain(name, incarnation)
        return []

    def _quit(self, present: dict[str, int], now: float) -> list[Action]:
        self._told, self._deadline = True, now + QUIT_S
        quits: list[Action] = [Quit(name, incarnation) for name, incarnation in present.items()]
        if not self._switching:
            return quits
        self._wants_switch = self._switching = False
        return [Switch(), *quits]
