"""The supervisor of a server with several API servers, as a pure state machine.

    starting ──all fronts ready──► serving ──signal──► draining ──all fronts ended──► ended
        │ anything ends, or a signal   │ no front, or no engine left                    ▲
        ╰──────────────────────────────┴────────────────────────────────────────────────╯

A front is an API server. The actions start, kill and drain processes. One rule
replaces processes of both roles (``weft.control.processes.table``). An API server never starts or ends an
engine; API servers only report lost engines. Engines outlive API servers, and end with the server.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeAlias

from weft.common.errors import EngineDead, InvalidRequest, NotFound, Unavailable, WeftError
from weft.common.log import get_logger
from weft.control.processes import table as t
from weft.control.processes.rolling import Quit, RollingRestart, Settings, Switch
from weft.control.processes.scaling import Change, plan_removal, plan_restart

log = get_logger(__name__)

SILENT_S = 30.0
"""Seconds without a message after which an API server counts as lost (hung or stopped)."""
STALL_S = 2.0
"""Tolerated delay of a tick in seconds. A longer delay means that the supervisor process was suspended."""
END_S = 15.0
"""Seconds for an API server to end after ``--drain-timeout``, or after a second signal."""
CONFIG_ERROR = 2
"""Exit status of a process with an invalid configuration."""
FORCED = 130
"""Exit status after a second signal cut off requests."""


class ServerPhase(Enum):
    """Phase of the whole server; see the transitions at the head of the module."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    ENDED = "ended"


# -- events


class ProcessEnded(NamedTuple):
    """A process has ended with ``status``. The event may repeat."""

    role: t.Role
    name: str
    incarnation: int
    status: int


class FrontLostEngine(NamedTuple):
    """An API server has lost an engine: the engine is gone, silent, or makes no progress."""

    name: str
    incarnation: int
    error: WeftError


class FrontIsLost(NamedTuple):
    """An API server does not answer, and must be replaced."""

    name: str
    incarnation: int


class FrontIsReady(NamedTuple):
    """An API server answers requests."""

    name: str
    incarnation: int


class FrontIsAlive(NamedTuple):
    """An API server reports a running event loop."""

    name: str
    incarnation: int
    kept: int = 0
    """Number of begun sequences at no engine."""


class Signalled(NamedTuple):
    """The supervisor process received a stop signal."""

    number: int


class RestartAsked(NamedTuple):
    """Request for a rolling restart: see ``weft.control.processes.rolling``."""

    name: str = ""
    """A group or an engine; "" for all engines."""
    renews: bool = False


class SwitchAsked(NamedTuple):
    """Request to replace all engines together at an idle moment: see ``weft.control.processes.rolling``."""


class ReviveAsked(NamedTuple):
    """An operator revives the retired engines of a group, or one engine: see ``ProcessTable.revive``."""

    name: str


class ScaleAsked(NamedTuple):
    """An operator changes the number of groups. The owner of the processes has prepared the new groups."""

    change: Change


class RemoveAsked(NamedTuple):
    """An operator removes a group, or one engine: see ``scaling.plan_removal``."""

    name: str


class EngineSeen(NamedTuple):
    """A watched engine answers the probe. ``idle``: see ``RollingRestart.seen``."""

    name: str
    incarnation: int
    idle: bool | None


class SupervisorTick(NamedTuple):
    """Time has passed. The event comes several times per second."""


Event: TypeAlias = (
    ProcessEnded
    | FrontLostEngine
    | FrontIsLost
    | FrontIsReady
    | FrontIsAlive
    | Signalled
    | RestartAsked
    | SwitchAsked
    | ReviveAsked
    | ScaleAsked
    | RemoveAsked
    | EngineSeen
    | SupervisorTick
)

# -- actions, besides ``Start`` and ``Kill``

Order: TypeAlias = Literal["drain", "stop"]


class Tell(NamedTuple):
    """Order an API server to finish open requests and end (drain), or to end now (stop)."""

    name: str
    order: Order


class Announce(NamedTuple):
    """Announce that the server is ready for requests."""


class Exit(NamedTuple):
    """End the server with ``status``, and kill all remaining processes."""

    status: int


Action: TypeAlias = t.Action | Quit | Switch | Settings | Tell | Announce | Exit


class Supervisor:
    """State machine for a server's processes: ``on(event, now)`` returns actions. Times are seconds."""

    def __init__(
        self,
        engines: Iterable[str] | Mapping[str, t.Member],
        fronts: Sequence[str],
        *,
        restarts: int,
        drain_timeout: float,
        serves: Callable[[set[str]], bool] = bool,
    ) -> None:
        """Set up the process tables; start nothing.

        ``restarts``: maximum restarts within ``table.WINDOW`` seconds, for the API servers together and for
        each engine group. ``serves``: see ``table.ProcessTable``.
        """
        self.engines = t.ProcessTable("head", engines, restarts, serves)
        # A server of several models has no engines here: its engines come and go with the models.
        self._ends_with_engines = bool(self.engines.entries)
        self.rolling = RollingRestart(self.engines, drain_timeout)
        self.fronts = t.ProcessTable("front", fronts, restarts)
        self.phase = ServerPhase.STARTING
        self._drain_timeout = drain_timeout
        self._deadline = math.inf
        """Draining only: time by which API servers must have ended."""
        self._forced = False
        self._failed = False
        """True if an API server failed while draining."""
        self._carrier = ("", 0)
        """Name and incarnation: see ``carrier``."""
        self._ticked = math.inf
        self._now = -math.inf

    def start(self, now: float) -> list[Action]:
        """Return the actions that start all engines and API servers."""
        return [*self.engines.start(now), *self.fronts.start(now)]

    def on(self, event: Event, now: float) -> list[Action]:
        """Return the actions for ``event`` at time ``now``. Return no action after the end of the server."""
        self._now = now
        actions = [] if self.phase is ServerPhase.ENDED else _HANDLERS[type(event)](self, event)
        if self.fronts.running(*self._carrier) is None:
            ready = [(name, one.incarnation) for name, one in self._running_fronts() if one.ready]
            self._carrier = ready[0] if ready else ("", 0)
        return actions

    @property
    def carrier(self) -> str:
        """Name of the API server that carries out changes for all; "" for none. The choice stays until the
        process has ended, so two processes never carry out changes: a process that starts again takes nothing
        back."""
        return self._carrier[0]

    # -- processes

    def _ended(self, event: ProcessEnded) -> list[Action]:
        """Handle the end of a process, and log it. Return the actions; none for an earlier incarnation.

        During the first start, the server ends. While draining, or without engines, an API server's end is
        accepted. Any other process is replaced.
        """
        entry = self._table(event.role).running(event.name, event.incarnation)
        if entry is None:
            return []
        # A failure during the first start is not retried. Most such failures are configuration errors.
        if self.phase is ServerPhase.STARTING:
            log.error("%s %s ended with status %d", t.LABELS[event.role], event.name, event.status)
            return self._exit(event.status if event.status == CONFIG_ERROR else 1)
        # API servers end on request while draining, and on their own once no engine is left. Replace none.
        if event.role == "front" and (self.phase is ServerPhase.DRAINING or self._engines_over):
            self._failed |= entry.ready and event.status not in (0, FORCED)
            self.fronts.end(event.name, event.incarnation)
            return self._after([])
        planned = entry.draining and not event.status
        log.log(
            logging.INFO if planned else logging.ERROR,
            "%s %s ended with status %d",
            *(t.LABELS[event.role], event.name, event.status),
        )
        return self._lose(event.role, event.name, event.incarnation, EngineDead("the process ended"))

    def _lost(self, event: FrontLostEngine) -> list[Action]:
        """Replace an engine after a loss report."""
        return self._lose("head", event.name, event.incarnation, event.error)

    def _front_lost(self, event: FrontIsLost) -> list[Action]:
        """Replace an API server that does not answer. While draining, end the API server."""
        if self.phase is ServerPhase.DRAINING:
            # A new process would get no order to drain.
            if not self.fronts.end(event.name, event.incarnation):
                return []
            self._failed = True
            return self._after([t.Kill("front", event.name, event.incarnation)])
        return self._lose("front", event.name, event.incarnation, EngineDead("the API server did not answer"))

    def _lose(self, role: t.Role, name: str, incarnation: int, error: WeftError) -> list[Action]:
        """Report the loss to the process table and return the resulting actions."""
        if role == "front":  # the streams of a lost API server end with the API server
            self.rolling.keeps(name, 0)
        return self._after([*self._table(role).lose(name, incarnation, error, self._now)])

    def _after(self, actions: list[Action]) -> list[Action]:
        """Return ``actions``, plus the exit action if no API server is left.

        Without engines the API servers notify clients and end without an order. So waiting restarts are
        cancelled.
        """
        if self.phase is ServerPhase.DRAINING or self._engines_over:
            self.fronts.give_up()
        if not self.fronts.over:
            return actions
        drained = self.phase is ServerPhase.DRAINING and not self._failed and not self._engines_over
        return [*actions, *self._exit((FORCED if self._forced else 0) if drained else 1)]

    @property
    def _engines_over(self) -> bool:
        """True if no engine is left, and none will be started."""
        return self._ends_with_engines and self.engines.over

    def _table(self, role: t.Role) -> t.ProcessTable:
        return self.engines if role == "head" else self.fronts

    # -- fronts

    def _ready(self, event: FrontIsReady) -> list[Action]:
        """Mark an API server as ready.

        Announce the server when the last API server becomes ready. Unknown incarnations are ignored.
        """
        entry = self.fronts.running(event.name, event.incarnation)
        if entry is None:
            return []
        entry.ready = True
        entry.heard = self._now
        if self.phase is ServerPhase.STARTING and self.fronts.ready:
            self.phase = ServerPhase.SERVING
            return [Announce()]
        return []

    def _alive(self, event: FrontIsAlive) -> list[Action]:
        """Note a sign of life from an API server, and its number of kept sequences.

        Return no action. Unknown incarnations are ignored.
        """
        entry = self.fronts.running(event.name, event.incarnation)
        if entry is not None:
            entry.heard = self._now
            self.rolling.keeps(event.name, event.kept)
        return []

    # -- the server

    def _restart(self, event: RestartAsked) -> list[Action]:
        """Begin a rolling restart. Ignored outside the serving phase, and for a name that has no engine."""
        if self.phase is ServerPhase.SERVING:
            with contextlib.suppress(NotFound, InvalidRequest):
                engines = self.engines
                names = plan_restart(event.name, engines.members, engines.leaving | engines.retired)
                self.rolling.begin(names if event.name else (), event.renews)
        return []

    def _switch(self, event: SwitchAsked) -> list[Action]:
        """Begin a switch of operations. Ignored while draining."""
        if self.phase in (ServerPhase.STARTING, ServerPhase.SERVING):
            self.rolling.begin_switch()
        return []

    def _revive(self, event: ReviveAsked) -> list[Action]:
        """Revive retired engines. Ignored outside the serving phase."""
        if self.phase is not ServerPhase.SERVING:
            return []
        return [*self.engines.revive(event.name, self._now)]

    def _scale(self, event: ScaleAsked) -> list[Action]:
        """Start the new groups, and drain the leaving groups. Returning groups take work again."""
        self.rolling.take_back(event.change.returning)
        members = {name: one for group in event.change.new.values() for name, one in group.items()}
        actions: list[Action] = [*self.engines.join(members, self._now)]
        return [*actions, *self.rolling.remove(event.change.leaving, self._now)]

    def _remove(self, event: RemoveAsked) -> list[Action]:
        """Drain a group. Raise NotFound, InvalidRequest, or Unavailable outside the serving phase."""
        if self.phase is not ServerPhase.SERVING:
            raise Unavailable("the server does not serve now")
        engines = self.engines
        names = plan_removal(event.name, engines.members, engines.leaving, engines.retired, engines.serves)
        return [*self.rolling.remove(names, self._now)]

    def _seen(self, event: EngineSeen) -> list[Action]:
        """Pass a probe answer to the rolling restart."""
        self.rolling.seen(event.name, event.incarnation, event.idle)
        return []

    def _signalled(self, event: Signalled) -> list[Action]:
        """Handle a stop signal: the first signal drains, the second signal cuts off requests.

        During the start a signal ends the server.
        """
        if self.phase is ServerPhase.STARTING:
            return self._exit(128 + event.number)
        if self.phase is ServerPhase.SERVING:
            self.phase = ServerPhase.DRAINING
            self._deadline = self._now + self._drain_timeout + END_S
            self.rolling.end()
            return self._after(
                [Tell(n, "drain" if entry.ready else "stop") for n, entry in self._running_fronts()]
            )
        # A closed terminal sends SIGHUP more than once, and so does its shell. SIGHUP never cuts off
        # requests.
        if event.number == signal.SIGHUP or self._forced:
            return []
        self._forced = True
        self._deadline = min(self._deadline, self._now + END_S)
        return [Tell(name, "stop") for name, _ in self._running_fronts()]

    def _tick(self, event: SupervisorTick) -> list[Action]:
        """Check deadlines, start due processes and replace silent API servers.

        Return the actions. After a pause of the supervisor, extend the deadlines of API servers. Exit when a
        drain is late.
        """
        late = max(0.0, self._now - self._ticked - STALL_S)
        self._ticked = self._now
        if late:
            # The supervisor was suspended, so messages could not arrive. Do not count the pause as silence.
            for entry in self.fronts.entries.values():
                entry.heard += late + STALL_S
        if self._now >= self._deadline:
            log.error("the API servers did not end in time")
            return self._exit(FORCED if self._forced else 1)
        actions: list[Action] = [*self.engines.tick(self._now)]
        # In the starting phase any planned end of a process would end the server.
        if self.phase in (ServerPhase.SERVING, ServerPhase.DRAINING):
            actions += self.rolling.tick(self._now)
        if self.phase is ServerPhase.DRAINING:
            return actions
        actions += self.fronts.tick(self._now)
        for name, entry in self._running_fronts():
            # An API server sends nothing while loading, and loading takes as long as the engines' loading.
            if entry.ready and self._now - entry.heard > SILENT_S:
                log.error("no message from API server %s for %g seconds, so it is replaced", name, SILENT_S)
                error = EngineDead("the API server sent no messages")
                actions += self._lose("front", name, entry.incarnation, error)
        return actions

    def _running_fronts(self) -> list[tuple[str, t.ProcessEntry]]:
        """Return the names and entries of all running API servers."""
        return [
            (name, one) for name, one in self.fronts.entries.items() if one.state is t.ProcessState.RUNNING
        ]

    def _exit(self, status: int) -> list[Action]:
        """Enter the ended phase and return the exit action."""
        self.phase = ServerPhase.ENDED
        return [Exit(status)]


_HANDLERS: dict[type, Callable[[Supervisor, Any], list[Action]]] = {
    ProcessEnded: Supervisor._ended,
    FrontLostEngine: Supervisor._lost,
    FrontIsLost: Supervisor._front_lost,
    FrontIsReady: Supervisor._ready,
    FrontIsAlive: Supervisor._alive,
    Signalled: Supervisor._signalled,
    RestartAsked: Supervisor._restart,
    SwitchAsked: Supervisor._switch,
    ReviveAsked: Supervisor._revive,
    ScaleAsked: Supervisor._scale,
    RemoveAsked: Supervisor._remove,
    EngineSeen: Supervisor._seen,
    SupervisorTick: Supervisor._tick,
}
