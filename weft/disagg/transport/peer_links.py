"""Connections between ranks, as kept by a socket transport, and the sources of received writes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from weft.common.errors import ErrorInfo, TransportFailed, WeftError
from weft.disagg.protocol.pushes import Write
from weft.disagg.transport import wire as f
from weft.disagg.transport.peer_connection import PeerConnection
from weft.types.transfer import Endpoint, TransferKey


class ByteSource(NamedTuple):
    """Source memory of a received write: ``content`` of an ``Incoming``."""

    memory: tuple[torch.Tensor, ...]
    """Source memory of each part."""
    parts: tuple[tuple[int, np.ndarray], ...]
    """(region of the receiving rank, int64 [n, 3])."""
    digests: np.ndarray
    rank: int
    """Rank of the writer."""
    peer: str = ""
    """Name of the writer, for logs."""


class PeerRank(NamedTuple):
    """Rank of a receiver, as given to ``connect``."""

    endpoint: Endpoint
    rank: int
    deadline: float


class PeerLink:
    """One connection. This rank is the writer (the connecting end) or the receiver (the accepting end)."""

    def __init__(
        self, name: str, connection: PeerConnection, writer: bool, until: float, host: str = ""
    ) -> None:
        """``name``: key of the link in its transport. ``writer``: True at the connecting end. ``until``:
        deadline of the handshake (monotonic seconds)."""
        self.name, self.connection, self.writer = name, connection, writer
        self.host = host
        """Address of the connecting end; "" if all peers are on this host."""
        self.until: float | None = until
        """Deadline of the handshake; None after the handshake."""
        self.address: object = None
        """Address for the next attempt to connect; None unless the receiver's accept queue was full."""
        self.said_hello = False
        self.nonce = b""
        self.peer = name
        """Name of the peer, for logs."""
        self.rank = 0
        """Rank of the peer, from the peer's Hello."""
        self.regions: tuple[torch.Tensor, ...] = ()
        """Receiver only: memory of the writer, if shared."""
        self.waiting: list[Write] = []
        """Writes to send after the handshake."""
        self.unanswered: dict[tuple[TransferKey, int], None] = {}


def check_hello(hello: f.PeerHello, transport: str, incarnation: int, meant: PeerRank | None) -> None:
    """Raise BadFrame for a Hello of another version, incarnation or rank.

    ``incarnation``: of this rank. ``meant``: the receiver that a writer connected to; None at a receiver.
    """
    if hello.version != f.VERSION or hello.transport != transport:
        theirs = f"version {hello.version} of {hello.transport}"
        raise f.BadFrame(f"a peer speaks {theirs}, this rank version {f.VERSION} of {transport}")
    if meant is None:
        if hello.wanted != incarnation:
            raise f.BadFrame("a peer addresses another process of this rank")
        return
    if hello.incarnation != meant.endpoint.incarnation:
        raise f.BadFrame("another process of a rank answers")
    if hello.rank != meant.rank:
        raise f.BadFrame(f"rank {hello.rank} answers instead of rank {meant.rank}")


def check_inside(offsets: np.ndarray, lengths: np.ndarray, size: int) -> None:
    """Raise BadFrame unless all spans lie within ``size`` bytes."""
    if len(offsets) and (
        lengths.min() < 1 or lengths.max() > size or offsets.min() < 0 or (offsets > size - lengths).any()
    ):
        raise f.BadFrame("a write names bytes outside a registered region")


def info_of(error: Exception) -> ErrorInfo:
    """Return the error for a transfer. A WeftError stays as is; any other exception becomes a broken
    connection."""
    if isinstance(error, WeftError):
        return error.info()
    return connection_broke()


def connection_broke() -> ErrorInfo:
    return TransportFailed("the connection to a rank of the other group broke").info()
