"""The hosts that join the head of a group, as the head sees the hosts: a pure state machine.

    absent ──settings are equal──► present ──silent for AWAY_S──► away
       │                             ▲                              │
       │                             ╰── the same process, or another one
       ╰─────other settings, a number in use, or no such number──► refused

A refused process ends. The number of the process stays free for a process with other settings. A silent
process without a number is forgotten after a while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from weft.common.errors import ConfigError
from weft.config.group_settings import compare

AWAY_S = 3.0
"""Seconds of silence after which a host is away, and another process may take the number of the host."""
FORGET_S = 60.0
"""Seconds of silence after which a process without a number is forgotten."""
REMIND_S = 30.0
"""Seconds between two log lines about absent hosts."""


class HostSeen(NamedTuple):
    """A process that wants to join."""

    number: int
    """Number of the host."""
    mark: str
    """Random text of the process."""
    settings: Mapping[str, str] | None
    """Settings that all hosts must share; None for a text of another version of Weft."""
    age: float
    """Seconds since the last message."""
    leaves: bool = False
    """True if the host waits for the drain of the group, and then ends."""


class Looked(NamedTuple):
    """A look at all processes that want to join, in order of their first message."""

    hosts: Sequence[HostSeen]
    stranger: str = ""
    """Address of the last connection with a wrong secret; "" without one."""


class Answer(NamedTuple):
    """Answer a process: accept the process (``why`` is empty), or refuse the process."""

    number: int
    mark: str
    why: str


class Forget(NamedTuple):
    """Forget a process: another process has taken the number, or the process is refused or dead. A process
    that returns is met again."""

    number: int
    mark: str


class Away(NamedTuple):
    """Log that a host went away."""

    number: int


class Missing(NamedTuple):
    """Log that the head waits for a host."""

    number: int
    why: str


Action: TypeAlias = Answer | Forget | Away | Missing


class GroupHosts:
    """All hosts of a group except the head. Times are seconds of one monotonic clock."""

    def __init__(self, settings: Mapping[str, str], hosts: int, now: float) -> None:
        """``settings``: those of the head. ``hosts``: number of hosts of the group, with the head."""
        self._settings = settings
        self._hosts = range(1, hosts)
        self._present: dict[int, str] = {}
        """Host -> mark of the accepted process, until another process takes the number."""
        self._answered: set[str] = set()
        """Marks of all processes with an answer."""
        self._waiting: dict[str, float] = {}
        """Mark -> time since which a process waits for a number in use."""
        self._away: set[int] = set(self._hosts)
        self._remind = now + REMIND_S
        self.leaving = False
        """True if a present host waits for the drain of the group."""

    @property
    def whole(self) -> bool:
        """True if all hosts are present."""
        return not self._away

    def on(self, event: Looked, now: float) -> list[Action]:
        """Apply ``event``, which happened at ``now``, and return the actions to carry out, in order."""
        actions: list[Action] = []
        for host in event.hosts:
            if host.mark not in self._answered:
                actions += self._meet(host, {one.mark: one.age for one in event.hosts}, now)
        ages = {one.mark: one.age for one in event.hosts}
        for index in self._hosts:
            away = ages.get(self._present.get(index, ""), AWAY_S) >= AWAY_S
            if away and index not in self._away:
                actions.append(Away(index))
            (self._away.add if away else self._away.discard)(index)
        present = set(self._present.values())
        for host in event.hosts:
            if host.age >= FORGET_S and host.mark not in present:
                actions.append(self._forget(host.number, host.mark))
        self.leaving = any(host.leaves and host.mark in present for host in event.hosts)
        if self._away and now >= self._remind:
            self._remind = now + REMIND_S
            wrong = event.stranger
            why = f"a host at {wrong} has a wrong --group-secret" if wrong else "no connection"
            actions += [Missing(index, why) for index in sorted(self._away)]
        return actions

    def _meet(self, host: HostSeen, ages: Mapping[str, float], now: float) -> list[Action]:
        """Return the answer to a process without an answer; [] while the number of the process is in use."""
        if host.age >= AWAY_S / 2:
            return []  # the process may be dead
        if host.number not in self._hosts:
            last = self._hosts[-1]
            return [self._answer(host, f"--host-index {host.number}: the last host of the group is {last}")]
        present = self._present.get(host.number)
        # A silent process may be dead. Only then may another process take the number.
        if present is not None and ages.get(present, AWAY_S) < AWAY_S:
            if now - self._waiting.setdefault(host.mark, now) <= 2 * AWAY_S:
                return []
            why = f"another host has --host-index {host.number}: give each host its own"
            return [self._answer(host, why)]
        if host.settings is None:
            return [self._answer(host, f"host {host.number} runs another version of weft")]
        try:
            compare(self._settings, host.settings, "the head", f"host {host.number}")
        except ConfigError as error:
            return [self._answer(host, error.message)]
        self._present[host.number] = host.mark
        gone = [] if present is None else [self._forget(host.number, present)]
        return [*gone, self._answer(host, "")]

    def _answer(self, host: HostSeen, why: str) -> Answer:
        self._answered.add(host.mark)
        self._waiting.pop(host.mark, None)
        return Answer(host.number, host.mark, why)

    def _forget(self, number: int, mark: str) -> Forget:
        self._answered.discard(mark)
        self._waiting.pop(mark, None)
        return Forget(number, mark)
