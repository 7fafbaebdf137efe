"""Wake-ups between the engines of an expert-parallel group: a sleeping engine learns of work elsewhere.

A wake-up is ``(epoch, wave)``. Wake-ups travel over zmq between processes, or in memory between replicas of
one process. Only the thread that runs steps uses these classes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import zmq

from weft.parallel.secret import CurveKeys, admit_ranks

MOST_WAKEUPS = 1000
"""Maximum number of queued wake-ups for an engine without a reader."""
MOST_BYTES = 1024
"""Maximum bytes of a frame: a wake-up has few; the frames of the CURVE key exchange have hundreds."""


class WakeupChannel(Protocol):
    """Carries wake-ups between replicas. Wake-ups of one sender arrive in order."""

    def reach(self, addresses: Sequence[str]) -> None:
        """Set the addresses of all replicas, in order of replica."""

    def wake(self, epoch: int, wave: int) -> None:
        """Send a wake-up to every other replica. Never waits."""

    def received(self) -> list[tuple[int, int]]:
        """Return the wake-ups received since the last call. Never waits."""

    @property
    def sockets(self) -> Sequence[Any]:
        """zmq sockets that become readable with a wake-up. A loop may poll the sockets beside others."""

    def close(self) -> None: ...


class LocalWakeups:
    """Wake-ups between replicas of one process, in memory."""

    sockets: Sequence[Any] = ()

    def __init__(self, replicas: int) -> None:
        self._boxes: list[deque[tuple[int, int]]] = [deque() for _ in range(replicas)]
        self._mine = 0

    def of(self, replica: int) -> LocalWakeups:
        """Return the end of ``replica``."""
        end = LocalWakeups(0)
        end._boxes = self._boxes
        end._mine = replica
        return end

    def reach(self, addresses: Sequence[str]) -> None: ...

    def wake(self, epoch: int, wave: int) -> None:
        for number, box in enumerate(self._boxes):
            if number != self._mine:
                box.append((epoch, wave))

    def received(self) -> list[tuple[int, int]]:
        """Remove and return all received (epoch, wave). Does not block."""
        box = self._boxes[self._mine]
        received: list[tuple[int, int]] = []
        while box:
            received.append(box.popleft())
        return received

    def close(self) -> None: ...


class WakeupSocket:
    """Wake-ups between processes: each engine listens at an address and connects to all others."""

    def __init__(self, address: str, replica: int, keys: CurveKeys | None = None) -> None:
        """Listen at ``address``. For ``address`` and ``keys`` see ``ZmqEngineChannel``."""
        self._replica = replica
        self._keys = keys
        self._context = zmq.Context()
        self._doorman = admit_ranks(self._context, keys) if keys is not None else None
        self._mine = self._context.socket(zmq.PULL)
        self._mine.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        if keys is not None:
            keys.guard_engine(self._mine)
        self._mine.bind(address)
        self.address = self._mine.getsockopt_string(zmq.LAST_ENDPOINT)
        self._others: dict[str, Any] = {}

    def reach(self, addresses: Sequence[str]) -> None:
        """Connect to the given engines, by replica, and close the connections to all others.

        The own address is skipped.
        """
        wanted = [address for number, address in enumerate(addresses) if number != self._replica]
        for address in [address for address in self._others if address not in wanted]:
            self._others.pop(address).close()
        for address in wanted:
            if address not in self._others:
                self._others[address] = self._connected(address)

    def _connected(self, address: str) -> Any:
        """Return a socket that connects to ``address`` in the background."""
        other = self._context.socket(zmq.PUSH)
        other.setsockopt(zmq.SNDHWM, MOST_WAKEUPS)
        other.setsockopt(zmq.LINGER, 0)
        if self._keys is not None:
            self._keys.guard_rank(other)
        other.connect(address)
        return other

    @property
    def sockets(self) -> Sequence[Any]:
        return (self._mine,)

    def wake(self, epoch: int, wave: int) -> None:
        """Send (epoch, wave) to all connected engines. Does not block; a full queue drops the message."""
        frame = msgspec.msgpack.encode((epoch, wave))
        for other in self._others.values():
            try:
                other.send(frame, zmq.NOBLOCK)
            except zmq.Again:  # a thousand unread wake-ups: the next agreement with the engine will fail
                continue

    def received(self) -> list[tuple[int, int]]:
        """Return all (epoch, wave) received since the last call.

        Invalid messages are dropped. Does not block.
        """
        received = []
        while True:
            try:
                received.append(msgspec.msgpack.decode(self._mine.recv(zmq.NOBLOCK), type=tuple[int, int]))
            except zmq.Again:
                return received
            except msgspec.MsgspecError:
                continue

    def close(self) -> None:
        """Close all sockets and end the context."""
        for socket in (self._mine, *self._others.values()):
            socket.close()
        if self._doorman is not None:
            self._doorman.stop()
        self._context.term()
