"""Where a head listens, before it has imported or loaded anything: so fronts see that its process runs."""

from __future__ import annotations

import zmq

from weft.types import messages as m

SEND_QUEUE = 10_000
"""Messages a front may leave unread before it counts as gone."""


class Listener:
    """A head's socket. Once it is there, zmq's own thread answers pings, whatever the process does."""

    def __init__(self, endpoint: str) -> None:
        """``endpoint``: an ``ipc://`` path in a folder that only this user can enter, or loopback tcp."""
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_FRAME)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        socket.bind(endpoint)
        self.socket = socket

    def close(self) -> None:
        """What was sent is still delivered, if that takes no longer than a second."""
        self.socket.close()
        self._context.term()
