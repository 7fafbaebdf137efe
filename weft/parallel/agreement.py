"""The agreement of a domain's heads: one small collective a step, on a process group of their own.

Votes go through gloo; a bell wakes heads that sleep. Both are used from the thread that steps, and no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch
import zmq

from weft.parallel.group import GroupComm, Launcher
from weft.parallel.secret import Keys, admit_ranks
from weft.scheduler.agreement import Decision, Vote, Waves, decide, to_row

MOST_RINGS = 1000
"""Rings that may wait for a head that does not listen."""
MOST_BYTES = 1024
"""Of a frame: a ring has few, the frames in which CURVE's keys are exchanged have hundreds."""


class Bell(Protocol):
    """Carries calls between replicas: (epoch, wave). Those of one sender arrive in order."""

    def reach(self, addresses: Sequence[str]) -> None:
        """Where the replicas listen now, in order."""

    def ring(self, epoch: int, wave: int) -> None:
        """To every other replica. Never waits."""

    def rings(self) -> list[tuple[int, int]]:
        """What came since the last call. Never waits."""

    @property
    def sockets(self) -> Sequence[Any]:
        """zmq sockets that become readable when something comes; a loop may poll them with its own."""

    def close(self) -> None: ...


class AgreementGroup:
    """The seat of one replica. Every replica calls ``agree`` for every step while it is ``awake``."""

    def __init__(self, replica: int, replicas: int, bell: Bell, host: str | None = None) -> None:
        """``host``: see ``GroupComm``."""
        self._replica = replica
        self._comm = GroupComm("heads", range(replicas), replica, Launcher(), host)
        self._bell = bell
        self._waves = Waves()
        self._epoch = -1
        self._launched = 0
        self._early: list[tuple[int, int]] = []
        """Calls of an epoch that has not begun here."""
        self.votes = 0
        """How often was agreed."""

    def connect(self, store: Any, epoch: int, timeout: float, bells: Sequence[str] = ()) -> None:
        """Forms the group of heads anew for ``epoch``, all asleep. All heads call it. Raises CommLost.

        ``timeout``: seconds for this, and that one head may wait for another in each agreement. ``bells``:
        see ``Bell.reach``.
        """
        self._comm.abort()
        self._bell.reach(bells)
        self._comm.connect(store, epoch, timeout)
        self._waves, self._epoch, self._launched = Waves(), epoch, 0

    def abort(self) -> None:
        """Ends the group: whoever agrees gets CommLost. From any thread."""
        self._comm.abort()

    @property
    def awake(self) -> bool:
        """Whether ``agree`` must be called, since other replicas do. Takes in calls; never waits."""
        self._listen()
        return self._waves.awake

    @property
    def sockets(self) -> Sequence[Any]:
        """To poll while asleep."""
        return self._bell.sockets

    def agree(self, vote: Vote) -> Decision:
        """Wakes the domain if it sleeps, and waits for every replica's vote.

        Epoch, step and wave are filled in here. Raises CommLost when a replica is gone or late, and
        EngineDead when replicas are not at the same step.
        """
        called = self._waves.ring()
        if called is not None:
            self._bell.ring(self._epoch, called)
        vote = msgspec.structs.replace(vote, epoch=self._epoch, step=self._launched, wave=self._waves.wave)
        table = self._comm.all_gather(torch.from_numpy(to_row(vote))).result()
        decision = decide(table.numpy())
        self.votes += 1
        self._launched += decision.launch
        if decision.sleep:
            self._listen()
            self._waves.sleep()
        return decision

    def close(self) -> None:
        """Ends group and bell."""
        self._comm.abort()
        self._bell.close()

    def _listen(self) -> None:
        early, self._early = self._early, []
        for epoch, wave in [*early, *self._bell.rings()]:
            if epoch == self._epoch:
                self._waves.heard(wave)
            elif epoch > self._epoch:
                self._early.append((epoch, wave))


class LocalBell:
    """Bells of replicas in one process, in memory."""

    sockets: Sequence[Any] = ()

    def __init__(self, replicas: int) -> None:
        self._boxes: list[deque[tuple[int, int]]] = [deque() for _ in range(replicas)]
        self._mine = 0

    def of(self, replica: int) -> LocalBell:
        """The same bells, as ``replica`` has them."""
        made = LocalBell(0)
        made._boxes, made._mine = self._boxes, replica
        return made

    def reach(self, addresses: Sequence[str]) -> None: ...

    def ring(self, epoch: int, wave: int) -> None:
        for number, box in enumerate(self._boxes):
            if number != self._mine:
                box.append((epoch, wave))

    def rings(self) -> list[tuple[int, int]]:
        box, found = self._boxes[self._mine], []
        while box:
            found.append(box.popleft())
        return found

    def close(self) -> None: ...


class ZmqBell:
    """Bells of replicas in processes: each listens at its own address and connects to the others'."""

    def __init__(self, address: str, replica: int, keys: Keys | None = None) -> None:
        """``address``: see ``ZmqHead``, as are ``keys``."""
        self._replica, self._keys = replica, keys
        self._context = zmq.Context()
        self._doorman = admit_ranks(self._context, keys) if keys is not None else None
        self._mine = self._context.socket(zmq.PULL)
        self._mine.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        if keys is not None:
            keys.guard_head(self._mine)
        self._mine.bind(address)
        self.address = self._mine.getsockopt_string(zmq.LAST_ENDPOINT)
        self._others: dict[str, Any] = {}

    def reach(self, addresses: Sequence[str]) -> None:
        wanted = [address for number, address in enumerate(addresses) if number != self._replica]
        for address in [address for address in self._others if address not in wanted]:
            self._others.pop(address).close()
        for address in wanted:
            if address not in self._others:
                self._others[address] = self._connected(address)

    def _connected(self, address: str) -> Any:
        other = self._context.socket(zmq.PUSH)
        other.setsockopt(zmq.SNDHWM, MOST_RINGS)
        other.setsockopt(zmq.LINGER, 0)
        if self._keys is not None:
            self._keys.guard_rank(other)
        other.connect(address)
        return other

    @property
    def sockets(self) -> Sequence[Any]:
        return (self._mine,)

    def ring(self, epoch: int, wave: int) -> None:
        frame = msgspec.msgpack.encode((epoch, wave))
        for other in self._others.values():
            try:
                other.send(frame, zmq.NOBLOCK)
            except zmq.Again:  # it has not listened for a thousand waves: agreeing with it will fail
                continue

    def rings(self) -> list[tuple[int, int]]:
        found = []
        while True:
            try:
                found.append(msgspec.msgpack.decode(self._mine.recv(zmq.NOBLOCK), type=tuple[int, int]))
            except zmq.Again:
                return found
            except msgspec.MsgspecError:
                continue

    def close(self) -> None:
        for socket in (self._mine, *self._others.values()):
            socket.close()
        if self._doorman is not None:
            self._doorman.stop()
        self._context.term()
