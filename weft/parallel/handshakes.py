"""Why connections of a zmq socket fail, from the events of the socket's monitor. Used from one thread."""

from __future__ import annotations

import contextlib
import os
import socket as sockets
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
NOTHING = "no connection can be made: nothing listens there, or a firewall blocks the connection"
STRANGER = (
    "the other side rejects this host: --group-secret differs, or another program listens at the address"
)
SILENT = (
    "the other side accepts connections but sends nothing: its program is still starting, is stopped, or is "
    "another program"
)

MOST = 64
"""Maximum number of remembered addresses of connections with an unfinished handshake."""


class Handshakes:
    """The outcome of the connections of one socket."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        """Watch ``socket``. Call before ``bind`` or ``connect``."""
        self._socket = socket
        events = zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED
        self.monitor = socket.get_monitor_socket(events | zmq.EVENT_DISCONNECTED)
        self.why = NOTHING
        """For a connecting socket: the reason why there is no connection; "" while connected."""
        self._accepted: list[str] = []
        """Addresses of the connections with an unfinished handshake, the oldest first."""

    def look(self) -> list[str]:
        """Process all events so far and set ``why``.

        Return the addresses with a failed handshake. Does not wait.
        """
        refused = []
        with contextlib.suppress(zmq.Again):
            while True:
                told = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
                event, value = int(told["event"]), int(told["value"])
                # Handshake events carry no usable address: assume the oldest accepted connection.
                if event == zmq.EVENT_ACCEPTED:
                    self._accepted = [*self._accepted[-MOST:], _peer(value)]
                elif event == zmq.EVENT_CONNECTED:
                    self.why = SILENT if self.why != STRANGER else self.why
                elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self.why = ""
                    del self._accepted[:1]
                elif event & _FAILED:
                    self.why = STRANGER
                    refused += self._accepted[:1] or ["an unknown address"]
                    del self._accepted[:1]
                elif not self.why:  # the connection broke
                    self.why = NOTHING
        return refused

    def close(self) -> None:
        """Stop watching. Call before the socket is closed."""
        self._socket.disable_monitor()
        self.monitor.close(0)


def _peer(descriptor: int) -> str:
    """Return the remote address of a connection of zmq, which may have closed the descriptor already."""
    with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(descriptor)) as connection:
        return str(connection.getpeername()[0])
    return "an unknown address"
