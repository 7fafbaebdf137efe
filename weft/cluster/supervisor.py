"""The supervisor of a server with several fronts, as a pure state machine: it starts, kills and drains
processes.

    starting ──all fronts ready──► serving ──signal──► draining ──all fronts ended──► ended
        │ anything ends, or a signal   │ no front, or no head left                      ▲
        ╰──────────────────────────────┴────────────────────────────────────────────────╯

Fronts and heads are replaced by the same rule (``weft.cluster.table``). A front never starts or ends a head;
it reports lost heads. Heads outlive fronts, and end with the server.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeAlias

from weft.cluster import table as t
from weft.cluster.rolling import Quit, RollingRestart, Switch
from weft.common.errors import EngineDead, WeftError
from weft.common.log import get_logger

log = get_logger(__name__)

SILENT_S = 30.0
"""Seconds without a message after which a front counts as gone: it hangs, or was stopped."""
STALL_S = 2.0
"""Seconds by which a tick may be late; more, and this process stood still."""
END_S = 15.0
"""Seconds beyond ``--drain-timeout``, or after a second signal, in which a front must have ended."""
CONFIG_ERROR = 2
"""Exit status of a process that its configuration does not let work."""
FORCED = 130
"""Exit status when a second signal cut requests off."""


class ServerPhase(Enum):
    """Of the whole server; the module's docstring has the transitions."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    ENDED = "ended"


# -- events


class ProcessEnded(NamedTuple):
    """A process has ended with ``status``. May come more than once."""

    role: t.Role
    name: str
    incarnation: int
    status: int


class FrontLostHead(NamedTuple):
    """A front has lost a head: the head is gone, silent, or makes no progress."""

    name: str
    incarnation: int
    error: WeftError


class FrontIsReady(NamedTuple):
    """A front answers requests."""

    name: str
    incarnation: int


class FrontIsAlive(NamedTuple):
    """A front reports that its event loop runs."""

    name: str
    incarnation: int


class Signalled(NamedTuple):
    """The supervisor's process got a signal that asks it to stop."""

    number: int


class RestartAsked(NamedTuple):
    """All heads are to be replaced, one after the other: see ``weft.cluster.rolling``."""


class SwitchAsked(NamedTuple):
    """All heads are to be replaced together at an idle moment: see ``weft.cluster.rolling``."""


class ReviveAsked(NamedTuple):
    """An operator asks for the retired heads of a group, or for one of them: see ``ProcessTable.revive``."""

    name: str


class HeadSeen(NamedTuple):
    """A head that is to be replaced, or was, answers. ``idle``: see ``RollingRestart.seen``."""

    name: str
    incarnation: int
    idle: bool | None


class Tick(NamedTuple):
    """Time has passed. Comes several times a second."""


Event: TypeAlias = (
    ProcessEnded
    | FrontLostHead
    | FrontIsReady
    | FrontIsAlive
    | Signalled
    | RestartAsked
    | SwitchAsked
    | ReviveAsked
    | HeadSeen
    | Tick
)

# -- actions, besides ``Start`` and ``Kill``

Order: TypeAlias = Literal["drain", "stop"]


class Tell(NamedTuple):
    """Tell a front to finish its requests and end (drain), or to end now (stop)."""

    name: str
    order: Order


class Announce(NamedTuple):
    """Announce that the server answers requests."""


class Exit(NamedTuple):
    """End the server with ``status``, and all processes that still run."""

    status: int


Action: TypeAlias = t.Action | Quit | Switch | Tell | Announce | Exit


class Supervisor:
    """Decides what the processes of a server do: ``on(event, now)`` returns actions. Times are seconds of
    one monotonic clock, which never falls.
    """

    def __init__(
        self,
        heads: Iterable[str] | Mapping[str, t.Member],
        fronts: Sequence[str],
        *,
        restarts: int,
        drain_timeout: float,
        serves: Callable[[set[str]], bool] = bool,
    ) -> None:
        """``restarts``: of the fronts, and of each group of heads, how many may be started again in
        ``table.WINDOW`` seconds. ``serves``: see ``table.ProcessTable``.
        """
        self.heads = t.ProcessTable("head", heads, restarts, serves)
        self.rolling = RollingRestart(self.heads, drain_timeout)
        self.fronts = t.ProcessTable("front", fronts, restarts)
        self.phase = ServerPhase.STARTING
        self._drain_timeout = drain_timeout
        self._deadline = math.inf
        """While it drains: when fronts must have ended."""
        self._forced = False
        self._failed = False
        """Whether a front that drained ended with an error."""
        self._ticked = math.inf
        self._now = -math.inf

    def start(self, now: float) -> list[Action]:
        """The first processes."""
        return [*self.heads.start(now), *self.fronts.start(now)]

    def on(self, event: Event, now: float) -> list[Action]:
        """What is to be done after ``event``, which happened at ``now``."""
        self._now = now
        return [] if self.phase is ServerPhase.ENDED else _HANDLERS[type(event)](self, event)

    # -- processes

    def _ended(self, event: ProcessEnded) -> list[Action]:
        entry = self._table(event.role).running(event.name, event.incarnation)
        if entry is None:
            return []
        if self.phase is ServerPhase.STARTING:  # nothing is tried twice at the first start
            log.error("%s %s ended with status %d", event.role, event.name, event.status)
            return self._exit(event.status if event.status == CONFIG_ERROR else 1)
        if event.role == "front" and (self.phase is ServerPhase.DRAINING or self.heads.over):
            self._failed |= entry.ready and event.status not in (0, FORCED)
            self.fronts.end(event.name, event.incarnation)
            return self._after([])
        planned = entry.draining and not event.status
        log.log(
            logging.INFO if planned else logging.ERROR,
            "%s %s ended with status %d",
            *(event.role, event.name, event.status),
        )
        return self._lose(event.role, event.name, event.incarnation, EngineDead("the process ended"))

    def _lost(self, event: FrontLostHead) -> list[Action]:
        return self._lose("head", event.name, event.incarnation, event.error)

    def _lose(self, role: t.Role, name: str, incarnation: int, error: WeftError) -> list[Action]:
        return self._after([*self._table(role).lose(name, incarnation, error, self._now)])

    def _after(self, actions: list[Action]) -> list[Action]:
        """``actions``, and the end of the server when no front is left.

        Without heads fronts end by themselves, once they have told their clients.
        """
        if self.phase is ServerPhase.DRAINING or self.heads.over:
            self.fronts.give_up()
        if not self.fronts.over:
            return actions
        drained = self.phase is ServerPhase.DRAINING and not self._failed and not self.heads.over
        return [*actions, *self._exit((FORCED if self._forced else 0) if drained else 1)]

    def _table(self, role: t.Role) -> t.ProcessTable:
        return self.heads if role == "head" else self.fronts

    # -- fronts

    def _ready(self, event: FrontIsReady) -> list[Action]:
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
        entry = self.fronts.running(event.name, event.incarnation)
        if entry is not None:
            entry.heard = self._now
        return []

    # -- the server

    def _restart(self, event: RestartAsked) -> list[Action]:
        if self.phase is ServerPhase.SERVING:
            self.rolling.begin()
        return []

    def _switch(self, event: SwitchAsked) -> list[Action]:
        if self.phase in (ServerPhase.STARTING, ServerPhase.SERVING):
            self.rolling.begin_switch()
        return []

    def _revive(self, event: ReviveAsked) -> list[Action]:
        if self.phase is not ServerPhase.SERVING:
            return []
        return [*self.heads.revive(event.name, self._now)]

    def _seen(self, event: HeadSeen) -> list[Action]:
        self.rolling.seen(event.name, event.incarnation, event.idle)
        return []

    def _signalled(self, event: Signalled) -> list[Action]:
        if self.phase is ServerPhase.STARTING:
            return self._exit(128 + event.number)
        if self.phase is ServerPhase.SERVING:
            self.phase = ServerPhase.DRAINING
            self._deadline = self._now + self._drain_timeout + END_S
            self.rolling.end()
            return self._after(
                [Tell(n, "drain" if entry.ready else "stop") for n, entry in self._running_fronts()]
            )
        # A terminal that is closed sends SIGHUP more than once, and its shell does, too: none of them cuts.
        if event.number == signal.SIGHUP or self._forced:
            return []
        self._forced = True
        self._deadline = min(self._deadline, self._now + END_S)
        return [Tell(name, "stop") for name, _ in self._running_fronts()]

    def _tick(self, event: Tick) -> list[Action]:
        late = max(0.0, self._now - self._ticked - STALL_S)
        self._ticked = self._now
        if late:
            for entry in self.fronts.entries.values():
                entry.heard += late + STALL_S
        if self._now >= self._deadline:
            log.error("fronts did not end in time")
            return self._exit(FORCED if self._forced else 1)
        actions: list[Action] = [*self.heads.tick(self._now)]
        if self.phase is ServerPhase.SERVING:  # before, the end of any process ends the server
            actions += self.rolling.tick(self._now)
        if self.phase is ServerPhase.DRAINING:
            return actions
        actions += self.fronts.tick(self._now)
        for name, entry in self._running_fronts():
            # Before it is ready it loads, which takes as long as the heads' loading.
            if entry.ready and self._now - entry.heard > SILENT_S:
                log.error("front %s has been silent for %g seconds", name, SILENT_S)
                error = EngineDead("the front was silent")
                actions += self._lose("front", name, entry.incarnation, error)
        return actions

    def _running_fronts(self) -> list[tuple[str, t.ProcessEntry]]:
        return [
            (name, one) for name, one in self.fronts.entries.items() if one.state is t.ProcessState.RUNNING
        ]

    def _exit(self, status: int) -> list[Action]:
        self.phase = ServerPhase.ENDED
        return [Exit(status)]


_HANDLERS: dict[type, Callable[[Supervisor, Any], list[Action]]] = {
    ProcessEnded: Supervisor._ended,
    FrontLostHead: Supervisor._lost,
    FrontIsReady: Supervisor._ready,
    FrontIsAlive: Supervisor._alive,
    Signalled: Supervisor._signalled,
    RestartAsked: Supervisor._restart,
    SwitchAsked: Supervisor._switch,
    ReviveAsked: Supervisor._revive,
    HeadSeen: Supervisor._seen,
    Tick: Supervisor._tick,
}
