"""Messages of rooms between heads of different groups: bytes, whose they are, and which process sent them.

Each head listens at an address of its own, another one at every start, and connects to a peer when it has
something to say: a Unix socket where all groups are on one host, otherwise a port, which only who knows the
groups' secret is heard at and can listen at. Messages may be lost: whoever needs an answer says them again.
Every message tells the process that sent it (``weft.engine.peers``), so its end can be seen.
"""

from __future__ import annotations

import contextlib
import ipaddress
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import zmq

from weft.common.log import get_logger
from weft.engine.peers import Process, own_process
from weft.parallel.secret import CurveKeys, admit_ranks
from weft.types.rooms import MAX_MESSAGE, U64, Peer

log = get_logger(__name__)

VERSION = 1
MOST_PATH = 107
"""Bytes of a Unix socket's path."""
QUEUE = 10_000
"""Messages that a peer may leave unread; more are lost."""
UNUSED_S = 300.0
"""Seconds after which a connection that carries nothing is closed; the next message makes another."""
_ENVELOPE = 4096
"""Bytes of an envelope at most, beside its message."""


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What travels on the channel."""

    version: int
    address: str
    incarnation: U64
    process: Process
    asks: bool
    """Whether the sender does not know yet which process it speaks to: that answers, if with nothing else."""
    body: bytes
    """A message (``rooms.encode``), or empty."""

    @property
    def peer(self) -> Peer:
        """Who sent it."""
        return Peer(self.address, self.incarnation)


class Arrived(NamedTuple):
    """``RoomChannel.receive``."""

    peer: Peer
    process: Process
    asks: bool
    body: bytes


class RoomChannel(Protocol):
    """One head's end of the channel for messages of rooms. Used from one thread."""

    address: str
    bad: int
    """Messages that were dropped, as they are none."""

    @property
    def sockets(self) -> Sequence[Any]:
        """To poll while idle."""

    def send(self, peer: Peer, body: bytes, asks: bool) -> None:
        """Queues a message; does not wait. It may be lost."""

    def receive(self) -> Arrived | None:
        """The next one that has come; None when there is none. Does not wait."""

    def drop(self, peer: Peer) -> None:
        """The peer has ended."""

    def tidy(self) -> None:
        """Closes what nobody uses any more."""

    def close(self) -> None:
        """What was sent is still delivered, if that takes no longer than a moment."""


class ZmqRooms:
    """A ``RoomChannel`` over ipc, or with ``keys`` over tcp."""

    def __init__(self, endpoint: str, incarnation: int, keys: CurveKeys | None = None) -> None:
        """``endpoint``: an ``ipc://`` path, free, in a folder that only this user can enter; with ``keys`` a
        ``tcp://`` address of this host.
        """
        self._keys = keys
        self._incarnation = incarnation
        self._process = own_process()
        self._context = zmq.Context()
        self._doorman = None if keys is None else admit_ranks(self._context, keys)
        self._mine = self._context.socket(zmq.ROUTER)
        if keys is not None:
            keys.guard_head(self._mine)
        self._mine.setsockopt(zmq.RCVHWM, QUEUE)
        self._mine.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE + _ENVELOPE)
        self._mine.setsockopt(zmq.LINGER, 0)
        _watch(self._mine)
        try:
            self._mine.bind(endpoint)
        except BaseException:
            self._mine.close()
            self._end()
            raise
        self.address = self._mine.getsockopt_string(zmq.LAST_ENDPOINT)
        self.bad = 0
        self.folder: Path | None = None
        """Of the socket, if it is to go with it."""
        self._others: dict[Peer, Any] = {}
        self._used: dict[Peer, float] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Envelope)

    @property
    def sockets(self) -> Sequence[Any]:
        return (self._mine,)

    def send(self, peer: Peer, body: bytes, asks: bool) -> None:
        if not self._reachable(peer.name):
            return
        socket = self._others.get(peer)
        if socket is None:
            socket = self._connected(peer.name)
            if socket is None:
                return
            self._others[peer] = socket
        self._used[peer] = time.monotonic()
        envelope = Envelope(VERSION, self.address, self._incarnation, self._process, asks, body)
        try:
            socket.send(self._encoder.encode(envelope), zmq.NOBLOCK)
        except zmq.ZMQError:  # it does not read, or is gone: the message is said again
            return

    def _connected(self, address: str) -> Any:
        """A socket; None where the system has no more, or refuses the address."""
        socket = None
        try:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.SNDHWM, QUEUE)
            socket.setsockopt(zmq.RECONNECT_IVL, 20)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            socket.setsockopt(zmq.LINGER, 200)
            _watch(socket)
            if self._keys is not None:
                self._keys.guard_rank(socket)
            socket.connect(address)
        except zmq.ZMQError as error:
            log.warning("no connection to the head of another group can be made: %s", error.strerror)
            if socket is not None:
                socket.close(0)
            return None
        return socket

    def receive(self) -> Arrived | None:
        while int(self._mine.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # cheaper than to fail
            try:
                parts = self._mine.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            envelope = self._parsed(parts)
            if envelope is not None:
                return Arrived(envelope.peer, envelope.process, envelope.asks, envelope.body)
            self.bad += 1
        return None

    def _parsed(self, parts: list[bytes]) -> Envelope | None:
        if len(parts) != 2:
            return None
        try:
            envelope = self._decoder.decode(parts[1])
        except (msgspec.DecodeError, ValueError):
            return None
        return envelope if envelope.version == VERSION else None

    def drop(self, peer: Peer) -> None:
        self._used.pop(peer, None)
        socket = self._others.pop(peer, None)
        if socket is not None:
            socket.close(0)

    def tidy(self) -> None:
        since = time.monotonic() - UNUSED_S
        for peer in [peer for peer, used in self._used.items() if used < since]:
            self.drop(peer)

    def close(self) -> None:
        for socket in (self._mine, *self._others.values()):
            socket.close()
        self._others.clear()
        self._end()
        if self._keys is None:
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self) -> None:
        if self._doorman is not None:
            self._doorman.stop()
        self._context.term()

    def _reachable(self, address: str) -> bool:
        """Whether ``address``, which anybody may have said, can be one of a head that speaks as this one."""
        if self._keys is not None:
            return address.startswith("tcp://") and _is_numeric(address.removeprefix("tcp://"))
        path = address.removeprefix("ipc://")
        return path != address and path.startswith("/") and len(path.encode()) <= MOST_PATH


def _watch(socket: zmq.Socket[bytes]) -> None:
    """A connection that carries nothing any more breaks, and is made anew."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 1000)


def _is_numeric(place: str) -> bool:
    """Whether it is ``HOST:PORT`` without a name, which zmq would look up."""
    host, _, port = place.rpartition(":")
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        return 0 < int(port) < 1 << 16
    return False
