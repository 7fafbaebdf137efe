"""Ranks on several hosts: bytes go over TCP to the receiver, which copies the bytes to their places.

Only peers with the secret are accepted: see ``weft.disagg.transport.connection_keys``. The bytes of a write
are read from the sender's caches during the send. At the receiver the bytes pass through a buffer of one
write.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Sequence

import numpy as np
import torch

from weft.common.errors import ConfigError
from weft.config.secret_file import check_secret
from weft.disagg.protocol.pushes import Write
from weft.disagg.transport import wire as f
from weft.disagg.transport.connection_keys import NONCE_BYTES, keys, new_nonce
from weft.disagg.transport.peer_connection import Got, memory_of
from weft.disagg.transport.peer_links import ByteSource, PeerLink
from weft.disagg.transport.sockets import SocketTransport

SILENCE_S = 15
"""Seconds until a connection without acknowledgements from the peer breaks."""


class TcpTransport(SocketTransport):
    """TCP transport. Listens on ``host``, at a port chosen by the system."""

    name = "tcp"

    def __init__(self, host: str, rank: int, incarnation: int, secret: bytes) -> None:
        """Raises ConfigError for a short secret, or for an address without permission to listen."""
        check_secret(secret)
        self._host, self._secret = host, secret
        super().__init__(rank, incarnation)

    def _listen(self) -> tuple[socket.socket, str]:
        """Return a listening socket with a port of the system's choice, and the address "host|port". Raises
        ConfigError."""
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            sock = socket.create_server((self._host, 0), family=family, backlog=128)
        except OSError as error:
            raise ConfigError(f"transfers cannot listen at {self._host} ({error.strerror})") from error
        _configure(sock)
        host, port = sock.getsockname()[:2]
        return sock, f"{host}|{port}"

    def _socket(self, address: str) -> tuple[socket.socket, object]:
        host, port = numeric(address)
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        _configure(sock)
        return sock, (host, port)

    def _hello(self, link: PeerLink, wanted: int) -> None:
        link.nonce = new_nonce()
        link.connection.send(
            f.PeerHello(f.VERSION, self.name, self.incarnation, wanted, self.rank, link.nonce)
        )

    def _met(self, link: PeerLink, hello: f.PeerHello) -> None:
        """Derive the keys of the connection from both nonces. The writer sends the proof; the receiver sends
        its Hello. Raises BadFrame without a nonce."""
        if len(hello.nonce) != NONCE_BYTES:
            raise f.BadFrame("a peer sent a hello without a nonce")
        if link.writer:
            writer, receiver = keys(self._secret, link.nonce, hello.nonce)
            link.connection.out_key, link.connection.in_key = writer, receiver
            link.connection.send(f.KeyProof())
            return
        nonce = new_nonce()
        link.connection.send(
            f.PeerHello(f.VERSION, self.name, self.incarnation, 0, self.rank, nonce)
        )  # without a key: the writer needs the receiver's nonce to make the keys
        writer, receiver = keys(self._secret, hello.nonce, nonce)
        link.connection.in_key, link.connection.out_key = writer, receiver

    def _proven(self, link: PeerLink) -> None:
        if not link.writer:
            link.connection.send(f.KeyProof())
        self._open(link)

    def _payload(self, write: Write) -> list[memoryview]:
        pieces = list[memoryview]()
        for part in write.parts:
            memory = memory_of(self._memory.shown[part.source])
            pieces += [memory[begin : begin + size] for begin, _, size in part.spans.tolist()]
        return pieces

    def _sources(
        self, link: PeerLink, parts: Sequence[tuple[f.SpansFrame, np.ndarray]], got: Got
    ) -> ByteSource:
        """Return the payload as the source of a write, with spans numbered from the start of the payload.
        Raises BadFrame if payload and spans differ in length."""
        lengths = np.concatenate([spans[:, 2] for _, spans in parts]) if parts else np.empty(0, np.int64)
        size = 0 if got.payload is None else got.payload.numel()
        if int(lengths.sum()) != size:
            raise f.BadFrame("the payload of a write differs in length from its spans")
        if got.payload is None:
            return ByteSource((), (), np.empty(0), 0)
        begins, done, moved = np.cumsum(lengths) - lengths, 0, list[tuple[int, np.ndarray]]()
        for part, spans in parts:
            here = spans.copy()
            here[:, 0] = begins[done : done + len(spans)]
            done += len(spans)
            moved.append((part.target, here))
        return ByteSource((got.payload,) * len(parts), tuple(moved), np.empty(0), 0)

    def _payload_of(self, source: ByteSource) -> torch.Tensor | None:
        return source.memory[0] if source.memory else None

    def _held_bytes(self, frame: f.WriteFrame, got: Got) -> int:
        return 1024 + (0 if got.payload is None else got.payload.numel())


def numeric(address: str) -> tuple[str, int]:
    """Return host and port of an address. Raises BadFrame for a host name: a DNS lookup would block all
    transfers of a rank."""
    host, _, port = address.rpartition("|")
    try:
        ipaddress.ip_address(host)
        number = int(port)
    except ValueError:
        number = 0
    if not 0 < number < 1 << 16:
        raise f.BadFrame(f"an endpoint {address[:80]!r} that is not a numeric host and a port")
    return host, number


def _configure(sock: socket.socket) -> None:
    """Set the options of a connection, or of a listener; accepted connections inherit the options.

    Buffer sizes are left to the system: an explicit size disables the system's tuning, and may be smaller.
    """
    tcp = socket.IPPROTO_TCP
    sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
    # A connection forgotten by a router carries nothing, and by default no end notices for 15 minutes.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(tcp, socket.TCP_KEEPIDLE, SILENCE_S // 3)
        sock.setsockopt(tcp, socket.TCP_KEEPINTVL, SILENCE_S // 3)
        sock.setsockopt(tcp, socket.TCP_KEEPCNT, 2)
        sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
