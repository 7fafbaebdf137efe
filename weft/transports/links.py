"""Connections between ranks as a transport keeps them, and what came over them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from weft.common.errors import ErrorInfo, Unavailable, WeftError
from weft.transfer.pushes import Write
from weft.transports import wire as f
from weft.transports.connection import Connection
from weft.types.rooms import Endpoint, RoomKey


class Source(NamedTuple):
    """What a write's bytes are read from: ``content`` of an ``Incoming``."""

    memory: tuple[torch.Tensor, ...]
    """For each part."""
    parts: tuple[tuple[int, np.ndarray], ...]
    """(region here, int64 [n, 3])."""
    digests: np.ndarray
    rank: int
    """Of the writer."""
    peer: str = ""
    """The writer, for logs."""


class PeerRank(NamedTuple):
    """A receiver's rank that was named to this one."""

    endpoint: Endpoint
    rank: int
    deadline: float


class Link:
    """One connection, of which this rank is the writer (it connected) or the receiver (it accepted)."""

    def __init__(self, name: str, connection: Connection, writer: bool, until: float, host: str = "") -> None:
        self.name, self.connection, self.writer = name, connection, writer
        self.host = host
        """Address of the one that connected; "" where all are of this host."""
        self.until: float | None = until
        """By when the hand-shake must be over; None when it is."""
        self.address: object = None
        """Of a writer that the other end's queue had no room for: to be connected again."""
        self.said_hello = False
        self.nonce = b""
        self.peer = name
        """The other end, for logs."""
        self.rank = 0
        """Of the other end, as its Hello says."""
        self.regions: tuple[torch.Tensor, ...] = ()
        """Of a receiver: the writer's memory, where it shows it."""
        self.waiting: list[Write] = []
        """For the end of the hand-shake."""
        self.unanswered: dict[tuple[RoomKey, int], None] = {}


def check_hello(hello: f.Hello, transport: str, incarnation: int, meant: PeerRank | None) -> None:
    """Raises BadFrame for a Hello of another version, or of or for another start of a rank.

    ``incarnation``: of this rank. ``meant``: the receiver that a writer connected to; None at a receiver.
    """
    if hello.version != f.VERSION or hello.transport != transport:
        theirs = f"version {hello.version} of {hello.transport}"
        raise f.BadFrame(f"a peer speaks {theirs}, this rank version {f.VERSION} of {transport}")
    if meant is None:
        if hello.wanted != incarnation:
            raise f.BadFrame("a peer means another start of this rank")
        return
    if hello.incarnation != meant.endpoint.incarnation:
        raise f.BadFrame("another start of a rank answers")
    if hello.rank != meant.rank:
        raise f.BadFrame(f"rank {hello.rank} answers where rank {meant.rank} is meant to be")


def check_inside(offsets: np.ndarray, lengths: np.ndarray, size: int) -> None:
    """Raises BadFrame unless all spans lie in ``size`` bytes."""
    if len(offsets) and (
        lengths.min() < 1 or lengths.max() > size or offsets.min() < 0 or (offsets > size - lengths).any()
    ):
        raise f.BadFrame("a write names bytes outside a registered region")


def info_of(error: Exception) -> ErrorInfo:
    """What a room is told of ``error``: a WeftError's own words, of any other that its connection broke."""
    if isinstance(error, WeftError):
        return error.info()
    return Unavailable("the connection to a rank of the other group broke").info()
