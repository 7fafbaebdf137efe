"""Where a head listens, before it has imported or loaded anything: so fronts see that its process runs."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from weft.config.resolved import EngineConfig
from weft.parallel.board import BoardClient, board_place
from weft.parallel.secret import CurveKeys, admit_ranks
from weft.types import messages as m
from weft.types.board import Listening, head_key

SEND_QUEUE = 10_000
"""Messages a front may leave unread before it counts as gone."""
TELL_S = 120.0
"""Seconds in which a front on another host can be told where this head is."""


class Listener:
    """A head's socket. Once it is there, zmq's own thread answers pings, whatever the process does."""

    def __init__(self, endpoint: str, keys: CurveKeys | None = None) -> None:
        """``endpoint``: an ``ipc://`` path in a folder that only this user can enter, or loopback tcp; with
        ``keys``, without which fronts are refused, also this host's address.
        """
        self._context = zmq.Context()
        self._doorman = admit_ranks(self._context, keys) if keys is not None else None
        socket = self._context.socket(zmq.ROUTER)
        if keys is not None:
            keys.guard_head(socket)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_FRAME)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        socket.bind(endpoint)
        self.socket = socket
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self) -> list[Any]:
        """The next message's frames, the sender's first: bytes, and views of those behind the second one,
        which may be large. Raises zmq.Again when there is none.
        """
        frames: list[Any] = [self.socket.recv(zmq.NOBLOCK)]
        while self.socket.getsockopt(zmq.RCVMORE):
            frames.append(self.socket.recv() if len(frames) < 2 else self.socket.recv(copy=False).buffer)
        return frames

    def close(self) -> None:
        """What was sent is still delivered, if that takes no longer than a second."""
        self.socket.close()
        if self._doorman is not None:
            self._doorman.stop()
        self._context.term()


def listen(config: EngineConfig, endpoint: str) -> Listener:
    """At ``endpoint``; a front on another host is told where by the board.

    Raises ConfigError, and EngineDead when there is no board where there should be one.
    """
    if not config.incarnation:
        return Listener(endpoint)
    place, keys = board_place(config.parallel)
    listener = Listener(endpoint, keys)
    listening = Listening(incarnation=config.incarnation, address=listener.address)
    board = BoardClient(place, keys)
    try:
        board.tell(head_key(config.replica), msgspec.msgpack.encode(listening), TELL_S)
    except BaseException:
        listener.close()
        raise
    finally:
        board.close()
    return listener
