"""The channel for transfer messages between engine processes of different groups: bytes with the sender and
the sender's process.

Each engine process listens at a separate address, new at every start, and connects to a peer for the first
message. The address is a Unix socket where all groups are on one host. Otherwise the address is a TCP port,
protected by the secret of the groups. Messages may be lost: a sender in need of an answer repeats the
message. Every message names the sending process (``weft.engine.disagg.peers``), so the end of the process can
be observed.
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
from weft.engine.disagg.peers import PeerProcess, own_process
from weft.parallel.secret import CurveKeys, admit_ranks
from weft.types.transfer import MAX_MESSAGE, U64, Peer

log = get_logger(__name__)

VERSION = 1
MOST_PATH = 107
"""Maximum bytes of a Unix socket path."""
QUEUE = 10_000
"""Maximum unread messages of a peer; further messages are lost."""
UNUSED_S = 300.0
"""Seconds after which an unused connection is closed. The next message opens a new connection."""
_ENVELOPE = 4096
"""Maximum bytes of an envelope without the message."""


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One message of the channel."""

    version: int
    address: str
    incarnation: U64
    process: PeerProcess
    asks: bool
    """True if the sender does not know the receiver's process yet. The receiver must answer, if only with an
    empty message.
    """
    body: bytes
    """A message (``transfers.encode``), or empty."""

    @property
    def peer(self) -> Peer:
        """Sender of the message."""
        return Peer(self.address, self.incarnation)


class Arrived(NamedTuple):
    """The result of ``TransferChannel.receive``."""

    peer: Peer
    process: PeerProcess
    asks: bool
    body: bytes


class TransferChannel(Protocol):
    """The end of one engine process on the channel for transfer messages. Used from one thread."""

    address: str
    bad: int
    """Number of messages dropped because of their form."""

    @property
    def sockets(self) -> Sequence[Any]:
        """Sockets to poll while idle."""

    def send(self, peer: Peer, body: bytes, asks: bool) -> None:
        """Queue a message. Does not block. The message may be lost."""

    def receive(self) -> Arrived | None:
        """Return the next message, or None when there is none. Does not block."""

    def drop(self, peer: Peer) -> None:
        """Close the connection to an ended peer."""

    def tidy(self) -> None:
        """Close connections unused for ``UNUSED_S`` seconds."""

    def close(self) -> None:
        """Close the channel. Sent messages are still delivered, within a fraction of a second."""


class ZmqTransferChannel:
    """A ``TransferChannel`` over ipc, or over tcp with ``keys``."""

    def __init__(self, endpoint: str, incarnation: int, keys: CurveKeys | None = None) -> None:
        """Bind a socket to ``endpoint``. ``address`` is the bound address.

        ``endpoint``: a free ``ipc://`` path in a folder private to this user; with ``keys`` a ``tcp://``
        address of the local host. ``incarnation``: of this engine process, sent with every message. Raises
        zmq.ZMQError if the endpoint cannot be bound.
        """
        self._keys = keys
        self._incarnation = incarnation
        self._process = own_process()
        self._context = zmq.Context()
        self._doorman = None if keys is None else admit_ranks(self._context, keys)
        self._mine = self._context.socket(zmq.ROUTER)
        if keys is not None:
            keys.guard_engine(self._mine)
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
        """Private folder of the socket, removed with the channel; None if the folder belongs to somebody
        else.
        """
        self._others: dict[Peer, Any] = {}
        self._used: dict[Peer, float] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Envelope)

    @property
    def sockets(self) -> Sequence[Any]:
        return (self._mine,)

    def send(self, peer: Peer, body: bytes, asks: bool) -> None:
        """Connect to ``peer`` if needed and queue the message. Does not block.

        Dropped without an error if the address has another form, the system refuses a socket, or the queue is
        full.
        """
        # A peer chooses the address, so connect only to addresses of the expected form.
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
        except zmq.ZMQError:  # the queue is full or the peer is gone: the sender repeats the message
            return

    def _connected(self, address: str) -> Any:
        """Return a socket that connects to ``address``.

        If the system refuses a socket or the address, log a warning and return None.
        """
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
            log.warning("cannot connect to the engine of another group: %s", error.strerror)
            if socket is not None:
                socket.close(0)
            return None
        return socket

    def receive(self) -> Arrived | None:
        """Return the next valid message, or None when there is none.

        Invalid messages count in ``bad``. Does not block.
        """
        while int(self._mine.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # cheaper than an exception
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
        """Return the envelope, or None for a message of another form or version."""
        # A ROUTER socket puts the identity of the sender in front.
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
        """Close all sockets and end the context.

        Remove the socket file and ``folder``. Blocks up to the linger time.
        """
        for socket in (self._mine, *self._others.values()):
            socket.close()
        self._others.clear()
        # `term` in `_end` blocks for the linger time of the sockets above.
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
        """Return True if ``address``, an unverified claim of a peer, has the form of a peer of the same
        channel.
        """
        if self._keys is not None:
            return address.startswith("tcp://") and _is_numeric(address.removeprefix("tcp://"))
        path = address.removeprefix("ipc://")
        return path != address and path.startswith("/") and len(path.encode()) <= MOST_PATH


def _watch(socket: zmq.Socket[bytes]) -> None:
    """Let zmq detect a dead connection and connect again."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 1000)


def _is_numeric(place: str) -> bool:
    """Return True for ``HOST:PORT`` with a numeric host. zmq would resolve a host name, which blocks."""
    host, _, port = place.rpartition(":")
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        return 0 < int(port) < 1 << 16
    return False
