"""The control channel of a group: frames between its head and its ranks, never on the stream of tensors.

``HeadChannel`` and ``RankChannel`` carry bytes and know nothing of frames. Here they are zmq sockets over ipc
or tcp; ``loopback.py`` has the same within one process, with virtual time and planted faults. An end belongs
to one thread.

A peer is one incarnation of a rank: a rank that was restarted is another peer, so nothing that was meant for,
or comes from, the one before it reaches the wrong one.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import zmq

from weft.common.errors import EngineDead
from weft.parallel.address import listen_at
from weft.parallel.secret import CurveKeys, admit_ranks
from weft.types.frames import MAX_FRAME

QUEUE = 10_000
"""Frames that a rank may leave unread before it counts as gone."""


class PeerGone(EngineDead):
    """A frame could not be sent: the peer is not connected, or does not read."""


class HeadChannel(ABC):
    """The head's end of the control channel."""

    address: str
    """What ranks connect to."""

    @property
    def sockets(self) -> Sequence[Any]:
        """zmq sockets that are readable when frames have come; a loop may poll them with its own."""
        return ()

    @abstractmethod
    def send(self, peer: bytes, data: bytes) -> None:
        """Queues a frame for ``peer``; does not wait. Raises PeerGone."""

    @abstractmethod
    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        """The next frame and who sent it; None when none came within ``timeout`` seconds (0: do not wait)."""

    @abstractmethod
    def close(self) -> None:
        """Ends the channel. What was sent is still delivered, if that takes no longer than a second."""


class NoRanks(HeadChannel):
    """The channel of a head that has no ranks beside it."""

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
    """Name of this connection at the head."""

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Queues a frame for the head; does not wait. Raises PeerGone."""

    @abstractmethod
    def receive(self, timeout: float, wake: Sequence[int] = ()) -> bytes | None:
        """The head's next frame; None when none came within ``timeout`` seconds (0: do not wait), or when one
        of the descriptors ``wake`` can be read from.
        """

    @abstractmethod
    def close(self, deliver: bool = True) -> None:
        """Ends the channel. What was sent is still delivered, if that takes no longer than a second; without
        ``deliver`` it is dropped.
        """


class HeadLink(NamedTuple):
    """A rank's connections to one head, which has welcomed it."""

    channel: RankChannel
    heartbeats: RankChannel | None
    incarnation: str
    """Of that head."""


class ZmqHead(HeadChannel):
    """The head's end as a zmq ROUTER that listens."""

    def __init__(self, endpoint: str, keys: CurveKeys | None = None, patience: float = 0.0) -> None:
        """``endpoint``: ``ipc://path`` in a folder that only this user can enter, or ``tcp://address:port``
        (port ``*`` takes a free one). Beyond loopback ``keys`` must be given: ranks without them are refused.
        ``patience``: seconds to wait for the port of ``--rdzv`` if another process has it; then it raises
        ConfigError.
        """
        self._context = zmq.Context()
        self._doorman = admit_ranks(self._context, keys) if keys is not None else None
        socket = _configured(self._context.socket(zmq.ROUTER))
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A rank that connects again keeps its identity, and this end may not know that the first connection
        # broke: the second one would never be heard. Identities are random: nobody can take one.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if keys is not None:
            keys.guard_head(socket)
        self._socket, self._inbox = socket, _Inbox(socket)
        try:
            if patience:
                listen_at(socket, endpoint, patience)
            else:
                socket.bind(endpoint)
        except BaseException:
            self.close()
            raise
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def sockets(self) -> Sequence[Any]:
        return (self._socket,)

    def send(self, peer: bytes, data: bytes) -> None:
        try:
            self._socket.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise PeerGone(f"a rank is gone or does not read ({error.strerror})") from error

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        parts = self._inbox.take(timeout)
        if parts is None:
            return None
        # Anything but a pair comes from no rank of ours: an empty frame, which the decoder refuses.
        return (parts[0], parts[1]) if len(parts) == 2 else (parts[0], b"")

    def close(self) -> None:
        self._socket.close()
        if self._doorman is not None:
            self._doorman.stop()
        self._context.term()


class ZmqRank(RankChannel):
    """A rank's end as a zmq DEALER. It connects in the background, and anew whenever the connection is
    lost.
    """

    def __init__(self, address: str, rank: int, keys: CurveKeys | None = None) -> None:
        self._context = zmq.Context()
        socket = _configured(self._context.socket(zmq.DEALER))
        self.peer = b"%d." % rank + secrets.token_hex(8).encode()
        socket.setsockopt(zmq.IDENTITY, self.peer)
        if keys is not None:
            keys.guard_rank(socket)
        socket.connect(address)
        self._socket, self._inbox = socket, _Inbox(socket)

    def send(self, data: bytes) -> None:
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise PeerGone(f"the head is gone or does not read ({error.strerror})") from error

    def receive(self, timeout: float, wake: Sequence[int] = ()) -> bytes | None:
        parts = self._inbox.take(timeout, wake)
        if parts is None:
            return None
        return parts[0] if len(parts) == 1 else b""

    def close(self, deliver: bool = True) -> None:
        self._socket.close(None if deliver else 0)
        self._context.term()


def _configured(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    socket.setsockopt(zmq.SNDHWM, QUEUE)
    socket.setsockopt(zmq.RCVHWM, QUEUE)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    return socket


class _Inbox:
    """Receives from a socket. A wait is one call into zmq, which lets other threads run."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._patience = -1

    def take(self, timeout: float, wake: Sequence[int] = ()) -> list[bytes] | None:
        """The next message; None when none came within ``timeout`` seconds, or one of ``wake`` can be read
        from."""
        if wake and timeout > 0:
            polled: list[tuple[Any, int]] = [(one, zmq.POLLIN) for one in (self._socket, *wake)]
            zmq.zmq_poll(polled, max(int(timeout * 1000), 1))
            timeout = 0
        if timeout <= 0 and not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # cheaper than to fail
            return None
        flags = 0 if timeout > 0 else int(zmq.NOBLOCK)
        if timeout > 0 and (patience := max(int(timeout * 1000), 1)) != self._patience:
            self._socket.setsockopt(zmq.RCVTIMEO, patience)
            self._patience = patience
        try:
            return self._socket.recv_multipart(flags)
        except zmq.Again:
            return None
