"""The control channel of a group: frames between an engine process and its ranks, apart from all tensors.

``EngineChannel`` and ``RankChannel`` carry bytes and know nothing of frames. Here both are zmq sockets over
ipc or tcp. ``loopback.py`` implements both within one process, with virtual time and planted faults. An end
belongs to one thread.

A peer is one incarnation of a rank. A restarted rank is another peer, so no frame to or from the former
incarnation can reach the wrong process.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import zmq

from weft.common.errors import EngineDead
from weft.parallel.secret import CurveKeys, admit_ranks
from weft.types.frames import MAX_FRAME
from weft.types.weights import WeightsUpdate

QUEUE = 10_000
"""Unread frames at which a rank counts as gone."""


class PeerGone(EngineDead):
    """A frame could not be sent: the peer is not connected, or does not read."""


class EngineChannel(ABC):
    """The engine's end of the control channel."""

    address: str
    """The address for connections of ranks."""

    @property
    def sockets(self) -> Sequence[Any]:
        """zmq sockets that become readable when frames arrive. A loop may poll the sockets beside others."""
        return ()

    @abstractmethod
    def send(self, peer: bytes, data: bytes) -> None:
        """Queue a frame for ``peer`` without waiting. Raise PeerGone."""

    @abstractmethod
    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        """Return (sender, next frame); None if no frame came within ``timeout`` seconds (0: do not wait)."""

    @abstractmethod
    def close(self) -> None:
        """End the channel. Queued frames are still delivered, for up to one second."""


class NoRanks(EngineChannel):
    """The channel of an engine without other ranks."""

    address = ""

    def send(self, peer: bytes, data: bytes) -> None:
        raise PeerGone("there are no ranks")

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        time.sleep(timeout)
        return None

    def close(self) -> None:
        pass


class RankChannel(ABC):
    """A rank's end of the control channel."""

    peer: bytes = b""
    """Name of this connection at the engine."""

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Queue a frame for the engine without waiting. Raise PeerGone."""

    @abstractmethod
    def receive(self, timeout: float, wake: Sequence[int] = ()) -> bytes | None:
        """Return the engine's next frame; None if no frame came within ``timeout`` seconds (0: do not wait).

        Also return None early when one of the file descriptors ``wake`` becomes readable.
        """

    @abstractmethod
    def close(self, deliver: bool = True) -> None:
        """End the channel. Queued frames are still delivered, for up to one second.

        Without ``deliver``, queued frames are dropped.
        """


class EngineLink(NamedTuple):
    """A rank's connections to an engine after the welcome."""

    channel: RankChannel
    heartbeats: RankChannel | None
    incarnation: str
    """Incarnation of the engine process."""
    updates: tuple[WeightsUpdate, ...] = ()
    """New weights since the start (``RankWelcome.updates``)."""


class ZmqEngineChannel(EngineChannel):
    """The engine's end: a listening zmq ROUTER."""

    def __init__(self, endpoint: str, keys: CurveKeys | None = None) -> None:
        """Listen at ``endpoint``.

        ``endpoint`` is ``ipc://path`` in a private folder of this user, or ``tcp://address:port`` (port ``*``
        takes a free port). Beyond loopback ``keys`` must be given: ranks without the keys are refused.
        """
        self._context = zmq.Context()
        self._doorman = admit_ranks(self._context, keys) if keys is not None else None
        socket = _configured(self._context.socket(zmq.ROUTER))
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A rank that reconnects keeps its identity, and this end may not have noticed the end of the first
        # connection. Without handover, zmq would ignore the second connection. Identities are random, so no
        # peer can take over another's.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if keys is not None:
            keys.guard_engine(socket)
        self._socket, self._inbox = socket, _Inbox(socket)
        try:
            socket.bind(endpoint)
        except BaseException:
            self.close()
            raise
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def sockets(self) -> Sequence[Any]:
        return (self._socket,)

    def send(self, peer: bytes, data: bytes) -> None:
        """Queue a frame without blocking.

        Raise PeerGone if the rank is not connected or its queue is full.
        """
        try:
            self._socket.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise PeerGone(f"a rank is gone or does not read ({error.strerror})") from error

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        """Return (peer, frame), or None after ``timeout`` seconds.

        A message of another form gives an empty frame.
        """
        parts = self._inbox.take(timeout)
        if parts is None:
            return None
        # Other part counts come from a foreign program: return an empty frame, which the decoder refuses.
        return (parts[0], parts[1]) if len(parts) == 2 else (parts[0], b"")

    def close(self) -> None:
        self._socket.close()
        if self._doorman is not None:
            self._doorman.stop()
        self._context.term()


class ZmqRank(RankChannel):
    """A rank's end: a zmq DEALER that connects in the background, and reconnects after a loss."""

    def __init__(self, address: str, rank: int, keys: CurveKeys | None = None) -> None:
        """Connect to the engine at ``address`` in the background.

        ``keys``: as for ``ZmqEngineChannel``. ``peer`` is a new random name that starts with ``rank``.
        """
        self._context = zmq.Context()
        socket = _configured(self._context.socket(zmq.DEALER))
        self.peer = b"%d." % rank + secrets.token_hex(8).encode()
        socket.setsockopt(zmq.IDENTITY, self.peer)
        if keys is not None:
            keys.guard_rank(socket)
        socket.connect(address)
        self._socket, self._inbox = socket, _Inbox(socket)

    def send(self, data: bytes) -> None:
        """Queue a frame without blocking. Raise PeerGone if the queue is full."""
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise PeerGone(f"the engine is gone or does not read ({error.strerror})") from error

    def receive(self, timeout: float, wake: Sequence[int] = ()) -> bytes | None:
        parts = self._inbox.take(timeout, wake)
        if parts is None:
            return None
        return parts[0] if len(parts) == 1 else b""

    def close(self, deliver: bool = True) -> None:
        self._socket.close(None if deliver else 0)
        self._context.term()


def _configured(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Return ``socket`` with limits of queues and messages, and pings that detect a dead connection."""
    socket.setsockopt(zmq.SNDHWM, QUEUE)
    socket.setsockopt(zmq.RCVHWM, QUEUE)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    return socket


class _Inbox:
    """Receives from a socket. A wait is one call into zmq, which releases the GIL."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._patience = -1

    def take(self, timeout: float, wake: Sequence[int] = ()) -> list[bytes] | None:
        """Return the parts of the next message; None after ``timeout`` seconds, or early when one of the
        descriptors ``wake`` is readable.
        """
        # RCVTIMEO cannot watch other descriptors, so poll all and then read without waiting.
        if wake and timeout > 0:
            polled: list[tuple[Any, int]] = [(one, zmq.POLLIN) for one in (self._socket, *wake)]
            zmq.zmq_poll(polled, max(int(timeout * 1000), 1))
            timeout = 0
        # cheaper than a failing read
        if timeout <= 0 and not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return None
        flags = 0 if timeout > 0 else int(zmq.NOBLOCK)
        if timeout > 0 and (patience := max(int(timeout * 1000), 1)) != self._patience:
            self._socket.setsockopt(zmq.RCVTIMEO, patience)
            self._patience = patience
        try:
            return self._socket.recv_multipart(flags)
        except zmq.Again:
            return None
