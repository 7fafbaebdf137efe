"""One group that runs alone, as a pure state machine: ``weft engine``.

    waiting ──all hosts are present──► starting
    starting ──all engines answer──► serving ──signal, or an order──► draining ──all idle──► ending ──► ended
        │ an engine ends                │ an engine ends                 ╰── --drain-timeout ──╯  ▲
        ╰───────────────────────────────┴─────────────────────────────────────────────────────────╯

Only a group over several hosts begins with ``waiting``: the head waits for the other hosts, and another host
waits for the head.

The machine publishes the engines in the directory, and renews the records. The machine restarts nothing: when
an engine process ends, the group ends with a status, and whoever started the group starts the group again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple, TypeAlias

from weft.control.directory.record import RENEW_S

SETTLE_S = 2.0
"""Seconds from the publication of a drain until an idle engine ends. API servers read the directory
meanwhile, and send the last requests."""
QUIT_S = 10.0
"""Maximum seconds from the order to end until the engines are killed."""


class HostPhase(Enum):
    """States of a group that runs alone, in order."""

    WAITING = "waiting for hosts"
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    ENDING = "ending"
    ENDED = "ended"


class Seen(NamedTuple):
    """A probe of an engine that has loaded its model and answers."""

    name: str
    idle: bool | None
    """True if the engine has no sequence and no transfer. None if unknown since the last probe."""


class Ended(NamedTuple):
    """An engine process has ended."""

    name: str
    status: int


class Admitted(NamedTuple):
    """The engines of this host may start: all hosts are present, or the head accepts this host."""


class Refused(NamedTuple):
    """The head refuses this host."""

    why: str


class Leaving(NamedTuple):
    """Another host of the group will end. The group drains and ends with status 1, because the
    group can start again with the host."""


class Others(NamedTuple):
    """A report about the other hosts of an expert-parallel group."""

    busy: bool
    """True if another draining host has requests, which need the engines of all hosts."""


class Stop(NamedTuple):
    """A stop signal."""


class Drain(NamedTuple):
    """An operator's order to drain, by HTTP or by the directory."""


class Tick(NamedTuple):
    """Nothing has happened; time has passed."""


Event: TypeAlias = Seen | Ended | Admitted | Refused | Leaving | Others | Stop | Drain | Tick


class Start(NamedTuple):
    """Start all engines."""


class Publish(NamedTuple):
    """Publish all engines, or renew their records."""

    draining: bool


class Quit(NamedTuple):
    """Order all engines to finish their step and end."""


class Exit(NamedTuple):
    """End the group: withdraw the records, kill what is left and end with ``status``."""

    status: int


Action: TypeAlias = Start | Publish | Quit | Exit


class EngineHost:
    """All engine processes of one group. Times are seconds of one monotonic clock."""

    def __init__(self, names: Iterable[str], drain_timeout: float, waits: bool = False) -> None:
        """``drain_timeout``: maximum seconds for the requests of a draining group. ``waits``: True for a
        group over several hosts. Otherwise the caller starts the engines."""
        self.phase = HostPhase.WAITING if waits else HostPhase.STARTING
        self._names = frozenset(names)
        self._answered: set[str] = set()
        self._idle: set[str] = set()
        """Draining: engines without work, by their last probe."""
        self._others_busy = False
        self._ended: set[str] = set()
        self._drain_timeout = drain_timeout
        self._status = 0
        """Exit status after a drain."""
        self._renewed = -math.inf
        self._since = -math.inf
        """Time at which the present phase began."""

    @property
    def ready(self) -> bool:
        """True if all engines answer and none drains."""
        return self.phase is HostPhase.SERVING

    @property
    def idle(self) -> bool:
        """True if no engine that has answered has work. Meaningful while the group drains."""
        return self._idle >= self._answered

    def on(self, event: Event, now: float) -> list[Action]:
        """Apply ``event``, which happened at ``now``, and return the actions to carry out, in order."""
        if self.phase is HostPhase.ENDED:
            return []
        match event:
            case Seen(name, idle):
                self._see(name, idle, now)
            case Ended(name, status):
                return self._end(name, status, now)
            case Others(busy):
                self._others_busy = busy
            case Refused():
                return self._exit(2, now)
            case Admitted() if self.phase is HostPhase.WAITING:
                self._enter(HostPhase.STARTING, now)
                return [Start(), *self._pass_time(now)]
            case Stop() | Drain() if self.phase is HostPhase.WAITING:
                return self._exit(0, now)
            case Stop() if self.phase is HostPhase.STARTING and not self._answered:
                return self._exit(0, now)  # no engine has ever had a request
            case Leaving() if self.phase in (HostPhase.STARTING, HostPhase.SERVING):
                self._status = 1
                self._enter(HostPhase.DRAINING, now)
                return [self._publish(now)]
            case Stop() if self._status:  # the first signal; another host was faster
                self._status = 0
            case Stop() if self.phase in (HostPhase.DRAINING, HostPhase.ENDING):
                return self._exit(130, now)  # a second signal
            case Stop() | Drain() if self.phase in (HostPhase.STARTING, HostPhase.SERVING):
                self._enter(HostPhase.DRAINING, now)
                return [self._publish(now)]
        return self._pass_time(now)

    def _see(self, name: str, idle: bool | None, now: float) -> None:
        """Note the answer of a probe. With the last answer, a starting group serves."""
        self._answered.add(name)
        if idle is not None:
            (self._idle.add if idle else self._idle.discard)(name)
        if self.phase is HostPhase.STARTING and self._answered == self._names:
            self._enter(HostPhase.SERVING, now)
            self._renewed = -math.inf  # publish at once that the engines answer

    def _end(self, name: str, status: int, now: float) -> list[Action]:
        """Note the end of an engine. An unordered end ends the group, with the engine's status or 1."""
        if self.phase is not HostPhase.ENDING:
            return self._exit(status if status > 0 else 1, now)
        self._ended.add(name)
        return self._exit(self._status, now) if self._ended == self._names else []

    def _pass_time(self, now: float) -> list[Action]:
        """Return what is due: the renewal of records, the end of a drain, or the end of patience."""
        waited = now - self._since
        if self.phase is HostPhase.WAITING:
            return []  # there is nothing to publish
        if self.phase is HostPhase.DRAINING:
            # Engines that never answered have no work.
            idle = waited >= SETTLE_S and self.idle and not self._others_busy
            if idle or not self._answered or waited >= self._drain_timeout:
                self._enter(HostPhase.ENDING, now)
                return [Quit()]
        if self.phase is HostPhase.ENDING and waited >= QUIT_S:
            return self._exit(self._status, now)
        return [self._publish(now)] if now >= self._renewed + RENEW_S else []

    def _publish(self, now: float) -> Publish:
        self._renewed = now
        return Publish(self.phase in (HostPhase.DRAINING, HostPhase.ENDING))

    def _exit(self, status: int, now: float) -> list[Action]:
        self._enter(HostPhase.ENDED, now)
        return [Exit(status)]

    def _enter(self, phase: HostPhase, now: float) -> None:
        self.phase, self._since = phase, now
        if phase is HostPhase.DRAINING:
            self._idle.clear()  # only reports from after the drain count
