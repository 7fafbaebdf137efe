"""Why connections of a zmq socket do not come to be, as its monitor tells. Used from one thread."""

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
NOTHING = "no connection can be made: nothing listens there, or a firewall lies between the hosts"
STRANGER = (
    "what listens there refuses this host: --group-secret differs, or the address is of another program"
)
SILENT = (
    "it accepts connections and says nothing: it starts, it is stopped, or the address is of another program"
)

MOST = 64
"""Addresses that are remembered of connections whose hand-shake is not over."""


class Handshakes:
    """What became of the connections of one socket."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        """Before ``bind`` or ``connect``."""
        self._socket = socket
        events = zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED
        self.monitor = socket.get_monitor_socket(events | zmq.EVENT_DISCONNECTED)
        self.why = NOTHING
        """Of a socket that connects: why it is not connected; "" while it is."""
        self._accepted: list[str] = []
        """Addresses of the connections whose hand-shake is not over, the oldest first."""

    def look(self) -> list[str]:
        """Takes in what has happened. Returns the addresses whose hand-shakes failed. Does not wait."""
        refused = []
        with contextlib.suppress(zmq.Again):
            while True:
                told = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
                event, value = int(told["event"]), int(told["value"])
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
                elif not self.why:  # it was connected
                    self.why = NOTHING
        return refused

    def close(self) -> None:
        """Before the socket is closed."""
        self._socket.disable_monitor()
        self.monitor.close(0)


def _peer(descriptor: int) -> str:
    """Address of the other end of a connection that zmq has; it may have closed it by now."""
    with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(descriptor)) as connection:
        return str(connection.getpeername()[0])
    return "an unknown address"
