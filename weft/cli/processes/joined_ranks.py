"""A host that has ranks of a group, and no engine. This module carries out the decisions of
``weft.control.directory.joined_host``.

    weft engine --join ──starts, watches► ranks ◄──frames, tensors── the engine on another host
            │ ◄── answers, address of the engine ── rendezvous store of the head
"""

from __future__ import annotations

import signal
import time
from collections import deque

import msgspec

from weft.common import signals
from weft.common.log import get_logger
from weft.common.signals import is_suspended
from weft.config.hosts import engine_of, ranks_on
from weft.config.resolved import EngineConfig
from weft.config.sections.all import FrontSection
from weft.control.directory import joined_host as j
from weft.control.directory.engine_host import HostPhase
from weft.control.directory.host_gates import JoinGate
from weft.control.directory.host_server import HostedEngine
from weft.control.directory.record import EngineRecord
from weft.engine.ranks.ranks import RankProcesses

log = get_logger(__name__)

TURN_S = 0.2
"""Seconds between two looks at all rank processes."""


class JoinedRanks:
    """Runs a ``JoinedHost``. Use from the main thread: all processes end with the calling thread."""

    instances: tuple[HostedEngine, ...] = ()
    """This host has no engine."""
    records: tuple[EngineRecord, ...] = ()

    def __init__(self, config: EngineConfig, gate: JoinGate, front: FrontSection) -> None:
        """Set up the host; start nothing. ``gate``: closed at the end of ``run``. ``front``: drain time-out
        and log level."""
        parallel = config.parallel
        ranks = ranks_on(parallel, config.host.index)
        self._replica = parallel.layout.replica(engine_of(parallel, ranks[0]))
        self._processes = RankProcesses(
            msgspec.structs.replace(config, replica=self._replica), "", front.log_settings
        )
        self._machine = j.JoinedHost(ranks, parallel.rank_timeout, front.drain_timeout)
        self._gate = gate
        self._waiting: deque[j.Event] = deque()
        """Events of signal handlers and of other threads."""
        self._status: int | None = None

    @property
    def phase(self) -> HostPhase:
        """The phase of the host, in the words of a group. Safe from any thread."""
        return _PHASES[self._machine.phase]

    def drain(self) -> None:
        """Drain the group and end this host. Safe from any thread."""
        self._waiting.append(j.Stop())

    def run(self) -> int:
        """Serve until a signal comes and the group has drained, the head refuses this host, or too many ranks
        fail. Return the exit status.

        Sets the handlers of ``signals.STOPS``, and leaves these signals ignored.
        """
        try:
            with signals.acting(lambda _: self._waiting.append(j.Stop())):
                while self._status is None:
                    self._turn()
                    time.sleep(TURN_S)
                return self._status
        finally:
            self._processes.close(0.0)
            self._gate.close()

    def _turn(self) -> None:
        """Pass everything that has happened since the last turn to the machine."""
        while self._waiting:
            self._on(self._waiting.popleft())
        for rank, status in self._processes.ended():
            self._processes.kill(rank)
            self._on(j.RankEnded(rank, status))
        for rank in self._processes.ranks():
            if is_suspended(self._processes.pid(rank)):
                self._on(j.RankSuspended(rank))
        self._on(self._gate.answer(self._replica))

    def _on(self, event: j.Event) -> None:
        before = self._machine.phase
        actions = self._machine.on(event, time.monotonic())
        if self._machine.phase is not before:
            log.info("%s", self._machine.phase.value)
        for action in actions:
            match action:
                case j.StartRank(rank, why):
                    if why:
                        log.error("rank %d is started again: %s", rank, why)
                    self._processes.spawn(rank)
                case j.KillRank(rank):
                    log.error("rank %d is suspended (SIGSTOP) and is killed", rank)
                    self._processes.send_signal(rank, signal.SIGKILL)
                case j.Leave():
                    self._gate.leave()
                case j.Exit(status, why):
                    if why:
                        log.error("%s", why)
                    self._status = status


_PHASES = {
    j.JoinPhase.CALLING: HostPhase.WAITING,
    j.JoinPhase.SERVING: HostPhase.SERVING,
    j.JoinPhase.LEAVING: HostPhase.DRAINING,
    j.JoinPhase.ENDED: HostPhase.ENDED,
}
