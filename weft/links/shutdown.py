"""Tells heads to stop, from a process that has no links to them."""

from __future__ import annotations

from collections.abc import Iterable

import zmq

from weft.links.link import Address
from weft.types import messages as m

LINGER_MS = 1000
"""In which what is sent must leave. A head that is gone hears nothing."""


def shut_down(addresses: Iterable[Address]) -> None:
    """Has each head finish its step and end. Returns when that was said, or cannot be."""
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
