"""Several transports of one rank over the same caches: each peer uses one of them.

    peers of this host    ── shm ──┐
    peers of other hosts  ── tcp ──┼── the caches of the rank; the thread of ``RankTransfer``
                          ── nixl ─┘

The endpoint names all transports, and the sender's engine chooses one for each receiver
(``weft.disagg.protocol.pairing``). Only Weft's own transports can be combined.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from weft.common.errors import ErrorInfo, TransportFailed
from weft.disagg.protocol.arrivals import Copied, Incoming
from weft.disagg.protocol.pushes import Write, Written
from weft.disagg.protocol.spans import SpanPart
from weft.disagg.protocol.transfer_table import FenceBy
from weft.disagg.transport.base import TakePending
from weft.disagg.transport.sockets import SocketTransport
from weft.types.transfer import Endpoint, TransferKey


class TransportSet:
    """``base.Transport`` over several ``SocketTransport`` with registered memory. Owns the transports."""

    fence: FenceBy = "copy"

    def __init__(self, members: Sequence[SocketTransport]) -> None:
        """``members``: at least one, in order of preference, all of the same rank and incarnation."""
        self._members = {member.name: member for member in members}
        self._first = members[0]
        self.name = ",".join(self._members)
        self.write_bytes = min(member.write_bytes for member in members)
        self.window_bytes = min(member.window_bytes for member in members)
        ways = {member.name: member.endpoint.address for member in members}
        self.endpoint = Endpoint.of(ways, self._first.incarnation)
        self._peers: dict[str, SocketTransport] = {}
        self._poller = select.poll()
        # A member drains its own waker in each turn, so a wake between two turns would be lost there.
        self._waker, self._woken = socket.socketpair()
        for sock in (self._waker, self._woken):
            sock.setblocking(False)
        self._poller.register(self._woken, select.POLLIN)
        for member in members:
            # An epoll descriptor is readable while any of its sockets is ready.
            self._poller.register(member.selector, select.POLLIN)

    @property
    def members(self) -> Sequence[SocketTransport]:
        """The transports, in order of preference."""
        return tuple(self._members.values())

    def limits(self, peer: str) -> tuple[int, int]:
        """Return the maximum bytes of one write to ``peer``, and of all writes under way to ``peer``."""
        member = self._peers[peer]
        return min(member.write_bytes, member.window_bytes), member.window_bytes

    def register(self, regions: Sequence[torch.Tensor]) -> None:
        """Unused: the members have their memory already."""
        raise NotImplementedError

    def connect(self, peer: Endpoint, rank: int, deadline: float) -> str:
        """See ``Transport.connect``. Raises TransportFailed for a transport that this rank does not have."""
        member = self._members.get(peer.transport)
        if member is None:
            raise TransportFailed(f"this rank has no transport {peer.transport}")
        name = member.connect(peer, rank, deadline)
        self._peers[name] = member
        return name

    def mark(self) -> Any:
        return self._first.mark()

    def digest(self, key: TransferKey, peer: str, parts: Sequence[SpanPart]) -> np.ndarray:
        return self._peers[peer].digest(key, peer, parts)

    def write(self, write: Write) -> None:
        self._peers[write.peer].write(write)

    def poll(self, seconds: float) -> list[Incoming | Written | Copied]:
        """See ``Transport.poll``. The first turn sends answers; only a turn without events waits."""
        events = self._turn()
        wait = min(seconds, *(member.patience() for member in self.members))
        if events or wait <= 0:
            return events
        # Round up: a wait of less than a millisecond must not become a busy loop.
        self._poller.poll(math.ceil(wait * 1000))
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        return self._turn()

    def take(self, incoming: Incoming) -> ErrorInfo | TakePending | None:
        return self._of(incoming).take(incoming)

    def answer(self, incoming: Incoming, error: ErrorInfo | None) -> None:
        self._of(incoming).answer(incoming, error)

    def cancel(self, key: TransferKey) -> None:
        for member in self.members:
            member.cancel(key)

    def quiet(self, key: TransferKey) -> bool:
        return all(member.quiet(key) for member in self.members)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"!")

    def close(self) -> None:
        """Close every transport, also after an error of another one, which is raised at the end."""
        errors = list[Exception]()
        for member in self.members:
            try:
                member.close()
            except Exception as error:
                errors.append(error)
        for sock in (self._waker, self._woken):
            sock.close()
        if errors:
            raise errors[0]

    def _turn(self) -> list[Incoming | Written | Copied]:
        return [event for member in self.members for event in member.poll(0.0)]

    def _of(self, incoming: Incoming) -> SocketTransport:
        """Return the transport of a received write: the first word of the connection's name."""
        return self._members[incoming.source.partition(" ")[0]]
