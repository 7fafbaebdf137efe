"""A group that runs alone, as processes. This module carries out the decisions of
``weft.control.directory.engine_host``.

    weft engine ──starts, watches► engine processes ◄──zmq── API servers
        │ publishes ────► directory ────────read by────────────►│
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from weft.common import signals
from weft.common.counted_log import CountedLog
from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.common.signals import Suspensions
from weft.control.directory import engine_host as h
from weft.control.directory.record import RENEW_S, DirectoryWriter, EngineRecord
from weft.control.fleet.instance_table import LISTEN_S
from weft.control.links.link import Address
from weft.control.links.probe import EngineProbe
from weft.control.processes.table import Member
from weft.types.messages import EngineStats, Role

log = get_logger(__name__)

STALL_S = 5.0
"""Seconds between two turns after which this process stood still."""
TURN_S = 0.2
"""Seconds between two looks at all engine processes."""


class GroupStarter(Protocol):
    """Starts and ends the engine processes of one group. The implementation is
    ``weft.engine.server.engine_processes.EngineProcesses``."""

    members: dict[str, Member]

    def start(self, name: str, incarnation: int) -> Address:
        """Start the process and return its address, without a wait for readiness."""

    def is_suspended(self, name: str) -> bool:
        """Return True if the process is suspended (SIGSTOP)."""

    def close(self, seconds: float) -> list[int]:
        """Wait up to ``seconds`` for the engine processes, and kill the rest. Return the exit statuses."""


class HostGate(Protocol):
    """Connects a host of several to the others. Used from one thread."""

    def look(self) -> h.Admitted | h.Refused | h.Leaving | None:
        """Return the present decision of the other hosts; None if the engines of this host must wait. Never
        waits."""

    def drain(self, idle: bool) -> bool:
        """Report that this host drains, and whether the engines of this host are ``idle``. Return True if
        another draining host has requests."""

    def close(self) -> None:
        """Leave the other hosts."""


class HostedEngine(NamedTuple):
    """An engine of the group, for the HTTP port."""

    name: str
    role: Role
    alive: bool
    stats: EngineStats


class HostView(Protocol):
    """A host of a group, as the HTTP port sees the host. Safe from any thread."""

    @property
    def phase(self) -> h.HostPhase: ...

    @property
    def instances(self) -> Sequence[HostedEngine]:
        """The engines of this host with their last counters."""

    @property
    def records(self) -> Sequence[EngineRecord]:
        """The records as last published."""

    def drain(self) -> None:
        """Order the host to drain and end."""


class HostServer:
    """Runs an ``EngineHost``. Use from the main thread: all processes end with the calling thread."""

    def __init__(
        self,
        group: GroupStarter,
        directory: DirectoryWriter,
        facts: EngineRecord,
        drain_timeout: float,
        engine_timeout: float,
        gate: HostGate | None = None,
        rank_timeout: float = math.inf,
    ) -> None:
        """Set up the group; start nothing. ``facts``: a record with the values that all engines of the group
        share; name, incarnation, endpoint and expert group are replaced. ``engine_timeout``: seconds without
        progress after which an engine counts as dead. ``gate``: of a group over several hosts, closed at the
        end of ``run``. ``rank_timeout``: seconds after which a suspended engine of such a group counts as
        dead: the other hosts wait no longer."""
        self._timeout = engine_timeout
        self._turned = time.monotonic()
        self._group, self._directory, self._facts = group, directory, facts
        self._host = h.EngineHost(group.members, drain_timeout, gate is not None)
        self._gate, self._suspended = gate, Suspensions(rank_timeout)
        self._records: dict[str, EngineRecord] = {}
        """Records of the engines whose address is known."""
        self._addresses: dict[str, Address] = {}
        self._started = math.inf
        """Start time of the engines."""
        self._probes: dict[str, EngineProbe] = {}
        self._waiting: deque[h.Event] = deque()
        """Events of signal handlers and of other threads."""
        self._status: int | None = None
        self._trouble = CountedLog(log)

    @property
    def phase(self) -> h.HostPhase:
        """The phase of the group. Safe from any thread."""
        return self._host.phase

    @property
    def instances(self) -> list[HostedEngine]:
        """The engines with their last counters. Safe from any thread."""
        role: Role = self._facts.role  # type: ignore[assignment]
        return [
            HostedEngine(name, role, probe.answers, probe.stats) for name, probe in list(self._probes.items())
        ]

    @property
    def records(self) -> list[EngineRecord]:
        """The records as last published. Safe from any thread."""
        return list(self._records.values())

    def announce(self, port: str) -> None:
        """Publish ``port``, HOST:PORT of the group's HTTP port, from now on. Call before ``run``."""
        self._facts = msgspec.structs.replace(self._facts, port=port)

    def drain(self) -> None:
        """Order the group to drain and end. Safe from any thread."""
        self._waiting.append(h.Drain())

    def run(self) -> int:
        """Serve until the group has drained, or an engine process ends. Return the exit status.

        Sets the handlers of ``signals.STOPS``, and leaves these signals ignored.
        """
        try:
            with signals.acting(lambda _: self._waiting.append(h.Stop())):
                if self._gate is None:
                    self._start()
                while self._status is None:
                    self._turn()
                    time.sleep(TURN_S)
                return self._status
        finally:
            self._end()

    def _start(self) -> None:
        """Start all engine processes."""
        for name in self._group.members:
            address = self._group.start(name, new_incarnation())
            self._addresses[name], self._started = address, time.monotonic()
            self._probes[name] = EngineProbe(address)

    def _turn(self) -> None:
        """Pass everything that has happened since the last turn to the machine."""
        while self._waiting:
            self._on(self._waiting.popleft())
        if self._gate is not None and (event := self._gate.look()) is not None:
            self._on(event)
        if self._gate is not None and self._host.phase is h.HostPhase.DRAINING:
            self._on(h.Others(self._gate.drain(self._host.idle)))
        for name, address in self._addresses.items():
            if (status := address.process.poll()) is not None:
                self._on(h.Ended(name, status))
            elif self._gate is not None and self._is_suspended(name):
                log.error("engine %s is suspended (SIGSTOP)", name)
                self._on(h.Ended(name, 1))
        now = time.monotonic()
        stood_still = now - self._turned > STALL_S
        if stood_still:  # the engines may have been stopped too
            self._started += now - self._turned
        self._turned = now
        for name, probe in self._probes.items():
            probe.look()
            if probe.answers:
                self._on(h.Seen(name, probe.idle))
            if not probe.connected and now - self._started > LISTEN_S:
                log.error("engine %s did not listen within %g seconds", name, LISTEN_S)
                self._on(h.Ended(name, 1))
            elif stood_still:  # messages of the meantime may still be under way
                probe.moved = now
            elif probe.answers and now - probe.moved > self._timeout:
                log.error("engine %s has made no progress for %g seconds", name, self._timeout)
                self._on(h.Ended(name, 1))
        if any(self._asked(record) for record in self._records.values()):
            self._on(h.Drain())
        self._on(h.Tick())

    def _is_suspended(self, name: str) -> bool:
        """Return True if the engine process has been suspended for too long."""
        return self._group.is_suspended(name) and self._suspended.report(name, time.monotonic())

    def _asked(self, record: EngineRecord) -> bool:
        try:
            return self._host.ready and self._directory.asked_to_drain(record)
        except OSError:  # the next renewal logs the trouble
            return False

    def _on(self, event: h.Event) -> None:
        before = self._host.phase
        actions = self._host.on(event, time.monotonic())
        if self._host.phase is not before:
            log.info("group %s: %s", self._facts.group, self._host.phase.value)
        if isinstance(event, h.Ended) and before is not h.HostPhase.ENDING:
            log.error("engine %s ended with status %d, so the group ends", event.name, event.status)
        if isinstance(event, h.Refused) and before is not h.HostPhase.ENDED:
            log.error("the head refused this host: %s", event.why)
        for action in actions:
            match action:
                case h.Start():
                    self._start()
                case h.Publish(draining):
                    self._publish(draining)
                case h.Quit():
                    for probe in self._probes.values():
                        probe.quit()
                case h.Exit(status):
                    self._status = status

    def _publish(self, draining: bool) -> None:
        """Publish each engine whose address is known. A failure is logged; the next renewal tries again."""
        for name, address in self._addresses.items():
            place = address.endpoint if isinstance(address.endpoint, str) else address.endpoint()
            if place is None:
                continue
            before = self._records.get(name)
            record = msgspec.structs.replace(
                self._facts,
                name=name,
                incarnation=address.incarnation,
                endpoint=place,
                expert_group=address.expert_group,
                ready=self._probes[name].answers,
                draining=draining,
                beat=0 if before is None else before.beat + 1,
            )
            self._records[name] = record
            try:
                self._directory.publish(record)
            except OSError as error:
                self._trouble.warn("the directory of engines cannot be written (%s)", error)

    def _end(self) -> None:
        """Withdraw all records, close the probes and end the engine processes."""
        for record in self._records.values():
            try:
                self._directory.withdraw(record)
            except OSError as error:  # the record expires
                self._trouble.warn("the directory of engines cannot be written (%s)", error)
        for probe in self._probes.values():
            probe.close()
        self._group.close(0.0)
        if self._gate is not None:
            self._gate.close()


def new_incarnation() -> int:
    """Return a number of 63 bits for a process: milliseconds since 1970, then 21 random bits.

    Of two processes of one name, the later one has the greater number, if the clocks of the hosts agree. API
    servers use the greater one: see ``Leases``.
    """
    milliseconds = int(time.time() * 1000) % (1 << 42)
    return (milliseconds << 21) | secrets.randbits(21)


def check_names(directory: DirectoryWriter, names: Iterable[str]) -> None:
    """Raise ConfigError if living engines in the directory have one of ``names``.

    A record whose beat stands still is that of a dead engine. The check takes two renewals if there is such
    a record, else no time.
    """
    before = {name: record for name, record in directory.read().items() if name in set(names)}
    until = time.monotonic() + 2 * RENEW_S if before else -math.inf
    while time.monotonic() < until:
        time.sleep(TURN_S)
        now = directory.read()
        for name, record in before.items():
            found = now.get(name)
            if found is not None and (found.incarnation, found.beat) != (record.incarnation, record.beat):
                raise ConfigError(
                    f"--group: an engine {name!r} lives already in this directory (release {found.release}, "
                    f"{found.endpoint}): give another group, or another directory",
                    param="--group",
                )


def describe(engines: Iterable[HostedEngine], phase: h.HostPhase) -> Mapping[str, object]:
    """Return the answer of the group's routes /ready and /live."""
    return {"status": phase.value, "engines": {one.name: one.alive for one in engines}}
