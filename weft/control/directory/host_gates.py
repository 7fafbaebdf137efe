"""How the hosts of one group meet in the rendezvous store: the head's side, and the side of another host.

head: HeadGate over RendezvousStore ◄──────── another host: JoinGate over RendezvousClient
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping

import msgspec

from weft.common.log import get_logger
from weft.control.directory import engine_host as h
from weft.control.directory import group_hosts as g
from weft.control.directory import joined_host as j
from weft.parallel.rendezvous import RENEW_S, RendezvousClient, RendezvousStore
from weft.types.rendezvous import (
    BUSY,
    DRAIN,
    DRAINS,
    HOSTS,
    LEAVES,
    answer_key,
    control_key,
    drain_key,
    host_key,
    leave_key,
)

log = get_logger(__name__)

TRUST_S = 10.0
"""Maximum silence of the head in seconds, for which the last report about busy hosts counts."""
REMIND_S = 30.0
"""Seconds between two log lines about a head that does not answer."""


class HeadGate:
    """The head's view of the other hosts. Carries out the decisions of ``GroupHosts``."""

    def __init__(self, store: RendezvousStore, settings: Mapping[str, str], hosts: int) -> None:
        """``settings``: those that all hosts must share. ``hosts``: number of hosts with the head."""
        self._store = store
        self._machine = g.GroupHosts(settings, hosts, time.monotonic())

    def look(self) -> h.Admitted | h.Leaving | None:
        """Meet new processes. Return Leaving if a host leaves, and Admitted if all hosts are present."""
        leaving = {key.removeprefix(LEAVES) for key in self._store.look(LEAVES)}
        seen = [_seen(key, *found, leaving) for key, found in self._store.look(HOSTS).items()]
        for action in self._machine.on(g.Looked(seen, self._store.refused), time.monotonic()):
            match action:
                case g.Answer(index, mark, why):
                    if why:
                        log.error("host %d is rejected: %s", index, why)
                    else:
                        log.info("host %d has joined", index)
                    self._store.post(answer_key(mark), why.encode())
                case g.Forget(index, mark):
                    self._store.drop(host_key(index, mark))
                    self._store.drop(answer_key(mark))
                    self._store.drop(leave_key(mark))
                case g.Away(index):
                    log.warning("host %d is away", index)
                case g.Missing(index, why):
                    log.info("waiting for host %d: %s", index, why)
        self._store.post(BUSY, " ".join(self._busy_hosts()).encode())
        if self._machine.leaving:
            self._store.post(DRAIN, b"")
            return h.Leaving()
        self._store.drop(DRAIN)
        return h.Admitted() if self._machine.whole else None

    def drain(self, idle: bool) -> bool:
        """See ``HostGate``."""
        self._store.post(drain_key(0), b"idle" if idle else b"busy")
        return any(index != "0" for index in self._busy_hosts())

    def _busy_hosts(self) -> list[str]:
        """Return the numbers of the hosts that drain and have requests. A silent host counts as dead."""
        reports = self._store.look(DRAINS).items()
        return [
            key.removeprefix(DRAINS) for key, (state, age) in reports if state == b"busy" and age < g.AWAY_S
        ]

    def close(self) -> None:
        """Close the store. Other hosts wait for the next head."""
        self._store.close()


def _seen(key: str, data: bytes, age: float, leaving: Collection[str]) -> g.HostSeen:
    """Return the process of an entry of the store. ``leaving``: marks of the processes that leave."""
    index, _, mark = key.removeprefix(HOSTS).partition("/")
    try:
        settings = msgspec.msgpack.decode(data, type=dict[str, str])
    except msgspec.MsgspecError:
        settings = None
    # Python refuses numbers with thousands of digits.
    number = int(index) if index.isdecimal() and len(index) < 5 else -1
    return g.HostSeen(number, mark, settings, age, mark in leaving)


class JoinGate:
    """Another host's view of the head."""

    def __init__(self, client: RendezvousClient, settings: Mapping[str, str], index: int) -> None:
        """``settings``: those that all hosts must share. ``index``: number of this host."""
        self._client = client
        self._mark, self._index = secrets.token_hex(8), index
        self._remind = time.monotonic() + RENEW_S
        client.post(host_key(index, self._mark), msgspec.msgpack.encode(dict(settings)))

    def answer(self, replica: int = 0) -> j.Answered | j.Silent:
        """Return the last answer of the head, with the engine of ``replica``. Log a silent head from time to
        time."""
        now = time.monotonic()
        if self._client.silent > RENEW_S:
            if now >= self._remind:
                self._remind = now + REMIND_S
                log.warning("the head does not answer: %s", self._client.why)
            return j.Silent()
        self._remind = now
        entries, head = self._client.entries, self._client.head
        text = entries.get(answer_key(self._mark))
        why = None if text is None else text.decode()
        return j.Answered(head, why, entries.get(control_key(replica), b"").decode())

    def look(self) -> h.Admitted | h.Refused | h.Leaving | None:
        """Return Refused if the head refuses this host. If the head accepts this host, return Admitted, or
        Leaving while all hosts must drain."""
        match self.answer():
            case j.Answered(why=""):
                return h.Leaving() if DRAIN in self._client.entries else h.Admitted()
            case j.Answered(why=str(why)):
                return h.Refused(why)
        return None

    def leave(self) -> None:
        """Ask the head to drain the group, because this host will end."""
        self._client.post(leave_key(self._mark), b"")

    def drain(self, idle: bool) -> bool:
        """See ``HostGate``."""
        self._client.post(drain_key(self._index), b"idle" if idle else b"busy")
        busy = self._client.entries.get(BUSY, b"").decode().split()
        return self._client.silent < TRUST_S and any(index != str(self._index) for index in busy)

    def close(self) -> None:
        """Leave the head."""
        self._client.close()
