"""Stops engine processes from a process without links to the engines."""

from __future__ import annotations

from collections.abc import Iterable

import zmq

from weft.control.links.link import Address
from weft.types import messages as m

LINGER_MS = 1000
"""Maximum milliseconds to send the messages. A dead engine process receives nothing."""


def shut_down(addresses: Iterable[Address]) -> None:
    """Send each engine process a shutdown: the engine finishes the step and ends.

    Ended processes are skipped. Return after sending, within ``LINGER_MS`` milliseconds, without waiting for
    the engine processes.
    """
    context = zmq.Context()
    try:
        for address in addresses:
            endpoint = address.endpoint if isinstance(address.endpoint, str) else address.endpoint()
            if endpoint is None or address.process.poll() is not None:
                continue
            socket = context.socket(zmq.DEALER)
            if address.keys is not None:
                address.keys.guard_rank(socket)
            socket.connect(endpoint)
            for message in (m.Hello(versions=(m.OLDEST, m.VERSION), front="supervisor"), m.Shutdown()):
                socket.send(m.encode(message), zmq.NOBLOCK)
    finally:
        context.destroy(LINGER_MS)
