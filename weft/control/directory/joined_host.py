"""A host that has ranks of a group, and no engine: a pure state machine of ``weft engine --join``.

    calling ──the head accepts this host, and the engine listens──► serving ──a signal──► leaving ──► ended
       ▲                                                               │
       ╰────────────────── the head is silent ◄────────────────────────╯

A host that leaves asks the head to drain the group. The host ends when the engine has ended all ranks.

A rank process follows the engine by itself: the process keeps the weights when the engine dies, says hello to
the next engine, and ends when no engine comes. This machine decides when a rank needs a new process. The host
outlives the head, and serves the next head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple, TypeAlias

from weft.common.restarts import RestartBudget
from weft.common.signals import Suspensions
from weft.control.directory.engine_host import QUIT_S, SETTLE_S

RESTARTS, WINDOW_S = 20, 600.0
"""Maximum number of restarts of failed ranks per window of seconds, before the host ends with status 1."""
LEAVE_S = SETTLE_S + QUIT_S
"""Maximum seconds of a drain without requests."""
LATE_S = 30.0
"""Maximum seconds from the first report of an engine until the last rank of the engine before ends."""
NO_ENGINE = 4
"""Exit status of a rank without an answer from any engine. The rank is not faulty."""


class JoinPhase(Enum):
    """States of a host that joins, in order."""

    CALLING = "waits for the head"
    SERVING = "serving"
    LEAVING = "waits for the drain of the group"
    ENDED = "ended"


class Answered(NamedTuple):
    """The head answers."""

    head: int
    """Random number of the head's process."""
    why: str | None
    """Empty: the host may work. A text: the reason of a refusal. None: no decision so far."""
    engine: str = ""
    """Address at which the engine waits for ranks; "" without an engine."""


class Silent(NamedTuple):
    """The head does not answer."""


class RankEnded(NamedTuple):
    """The process of a rank has ended."""

    rank: int
    status: int


class RankSuspended(NamedTuple):
    """The process of a rank is stopped (SIGSTOP). The shell repeats the event while the stop lasts."""

    rank: int


class Stop(NamedTuple):
    """A stop signal."""


Event: TypeAlias = Answered | Silent | RankEnded | RankSuspended | Stop


class StartRank(NamedTuple):
    """Start a process for a rank. ``why``: reason of a restart, for the log; "" for a normal start."""

    rank: int
    why: str = ""


class KillRank(NamedTuple):
    """Kill the process of a rank. The end is reported as ``RankEnded``."""

    rank: int


class Leave(NamedTuple):
    """Ask the head to drain the group."""


class Exit(NamedTuple):
    """End the host: kill all ranks and end with ``status``. ``why``: for the log; "" after a signal."""

    status: int
    why: str = ""


Action: TypeAlias = StartRank | KillRank | Leave | Exit


class JoinedHost:
    """All ranks of one group on one host. Times are seconds of one monotonic clock."""

    def __init__(self, ranks: Iterable[int], rank_timeout: float, drain_timeout: float) -> None:
        """``rank_timeout``: seconds after which a suspended rank counts as dead. ``drain_timeout``: maximum
        seconds for the requests of a draining group."""
        self.phase = JoinPhase.CALLING
        self._ranks = tuple(ranks)
        self._timeout, self._drain_timeout, self._left = rank_timeout, drain_timeout, 0.0
        self._due: dict[int, str] = dict.fromkeys(self._ranks, "")
        """Rank without a process -> reason of the restart."""
        self._served: dict[int, tuple[int, str]] = {}
        """Rank that ended in order -> the engine that ended the rank. The rank waits for another engine."""
        self._engine = 0, ""
        """The present or last engine: number of the head, and address."""
        self._before, self._since = self._engine, -math.inf
        """The engine before, and the time at which the present engine replaced the engine before."""
        self._silent = math.inf
        """Time of the first report of a silent head since the last answer."""
        self._suspended = Suspensions(rank_timeout)
        self._budget = RestartBudget(RESTARTS, WINDOW_S)

    def on(self, event: Event, now: float) -> list[Action]:
        """Apply ``event``, which happened at ``now``, and return the actions to carry out, in order."""
        if self.phase is JoinPhase.ENDED:
            return []
        match event:
            case Stop() if self.phase is JoinPhase.SERVING:
                self.phase, self._left = JoinPhase.LEAVING, now
                return [Leave()]
            case Stop():
                return self._exit(0 if self.phase is JoinPhase.CALLING else 130)
            case Answered(why=str(why)) if why:
                return self._exit(2, f"the head refused this host: {why}")
            case RankSuspended(rank):
                # No engine waits longer for the rank.
                return [KillRank(rank)] if self._suspended.report(rank, now) else []
            case _ if self.phase is JoinPhase.LEAVING:
                return self._leave(event, now)
            case Answered(head, "", engine) if engine:
                self._follow((head, engine), now)
            case Answered() | Silent():
                self.phase = JoinPhase.CALLING
            case RankEnded(rank, status):
                return self._end(rank, status, now)
        return self._start()

    def _follow(self, engine: tuple[int, str], now: float) -> None:
        """Note the engine that serves."""
        self.phase = JoinPhase.SERVING
        if engine != self._engine:
            first = not self._engine[1]
            self._before, self._since = self._engine, -math.inf if first else now
            self._engine = engine

    def _start(self) -> list[Action]:
        """Start the ranks without a process, if an engine waits for the ranks."""
        if self.phase is not JoinPhase.SERVING:
            return []
        ready = [rank for rank in self._due if self._served.get(rank) != self._engine]
        for rank in ready:
            self._served.pop(rank, None)
        return [StartRank(rank, self._due.pop(rank)) for rank in ready]

    def _leave(self, event: Event, now: float) -> list[Action]:
        """Return Exit if nothing is left to wait for: no rank, no head, or no time.

        A failed rank is started again, because the engine may have requests.
        """
        if isinstance(event, RankEnded):
            self._suspended.forget(event.rank)
            if event.status not in (0, NO_ENGINE) and self._budget.grant(now):
                return [StartRank(event.rank, _why(event.status))]
            self._due[event.rank] = ""
        if isinstance(event, Answered):
            self._silent = math.inf
        elif isinstance(event, Silent):
            self._silent = min(self._silent, now)
        late = now - self._left >= self._drain_timeout + LEAVE_S
        # The engine is another process than the head, and may finish its requests while the head is silent.
        gone = now - self._silent >= self._timeout
        gone = gone or (isinstance(event, Answered) and event.head != self._engine[0])
        return self._exit(0) if gone or late or len(self._due) == len(self._ranks) else []

    def _end(self, rank: int, status: int, now: float) -> list[Action]:
        """Note the end of a rank. Too many failures end the host."""
        self._suspended.forget(rank)
        self._due[rank] = "" if status in (0, NO_ENGINE) else _why(status)
        if status == 0:  # the engine has ended in order, and no engine follows in this process of the head
            # A rank of the engine before may end late. The present engine needs the rank then.
            self._served[rank] = self._engine if now - self._since >= LATE_S else self._before
        elif status != NO_ENGINE and not self._budget.grant(now):
            return self._exit(1, f"{RESTARTS + 1} ranks ended within {WINDOW_S / 60:g} minutes")
        return self._start()

    def _exit(self, status: int, why: str = "") -> list[Action]:
        self.phase = JoinPhase.ENDED
        return [Exit(status, why)]


def _why(status: int) -> str:
    return f"its process ended with status {status}"
