"""What a supervisor and a front that it runs tell each other, over a socket pair that the front inherits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from weft.cluster.supervisor import Order
from weft.common.errors import ErrorInfo, WeftError

ALIVE_S = 1.0
"""Seconds between two ``FrontAlive`` of a front without other messages."""
MOST_BYTES = 64 << 10


class FrontReady(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Front to supervisor, once: it answers requests."""


class FrontAlive(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Front to supervisor, every ``ALIVE_S`` seconds: its event loop runs."""


class DrainAsked(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Front to supervisor: an operator asks by HTTP that the server drains, as a SIGTERM does."""


class GroupRevived(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Front to supervisor: an operator asks by HTTP for the retired heads of a group, or for one head."""

    name: str


class HeadLost(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Front to supervisor: it has lost that process of a head."""

    name: str
    incarnation: int
    error: ErrorInfo


class Stop(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Supervisor to front: finish the requests and end, or end now."""

    order: Order


FromFront: TypeAlias = FrontReady | FrontAlive | DrainAsked | GroupRevived | HeadLost
_from_front = msgspec.msgpack.Decoder(FromFront)
_to_front = msgspec.msgpack.Decoder(Stop)


def channel() -> tuple[socket.socket, socket.socket]:
    """The supervisor's end and the front's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def tell(link: socket.socket, order: Order) -> None:
    """From the supervisor. A front that is gone hears nothing, and one that does not read will be killed."""
    with contextlib.suppress(OSError):
        link.send(msgspec.msgpack.encode(Stop(order)))


def hear(link: socket.socket) -> list[FromFront] | None:
    """What a front has said since the last call; None when it is gone."""
    heard: list[FromFront] = []
    while True:
        try:
            frame = link.recv(MOST_BYTES)
        except BlockingIOError:
            return heard
        except OSError:
            return None
        if not frame:
            return heard or None
        heard.append(_from_front.decode(frame))


class SupervisorLink:
    """The front's end of the socket pair. See ``weft.front.server.Supervisor``. Used from one event loop."""

    def __init__(self, link: socket.socket, serving: bool) -> None:
        """``serving``: see ``weft.front.server.Supervisor``."""
        self.serving = serving
        link.setblocking(False)
        self._link = link
        self._unsent: deque[bytes] = deque()

    def attach(self, drain: Callable[[], None], stop: Callable[[], None]) -> None:
        """Has the one called when this front is told to drain, and the other when it is told to stop now."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                frame = self._link.recv(MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:
                frame = b""
            if not frame:  # the supervisor is gone
                loop.remove_reader(self._link)
                stop()
            elif _to_front.decode(frame).order == "drain":
                drain()
            else:
                stop()

        def live() -> None:
            self._say(FrontAlive())
            loop.call_later(ALIVE_S, live)

        loop.add_reader(self._link, read)
        live()

    def ready(self) -> None:
        """This front answers requests."""
        self._say(FrontReady())

    def drain(self) -> None:
        """The whole server is to drain and end."""
        self._say(DrainAsked())

    def revive(self, name: str) -> None:
        """Retired heads of the group, or the head, of that name are to be started again."""
        self._say(GroupRevived(name))

    def report(self, name: str, incarnation: int, error: WeftError) -> None:
        """Reports that this process of a head is lost."""
        self._say(HeadLost(name, incarnation, error.info()))

    def _say(self, message: FromFront) -> None:
        """In order; what can't be sent now is sent with what follows."""
        if not self._unsent or not isinstance(message, FrontAlive):
            self._unsent.append(msgspec.msgpack.encode(message))
        while self._unsent:
            try:
                self._link.send(self._unsent[0])
            except OSError:  # full: the supervisor stands still; or it is gone, and this front will be
                return
            self._unsent.popleft()
