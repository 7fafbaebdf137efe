"""Writes of answers to their connections: without the layers of ASGI, and without chunks for HTTP/1.0."""

from __future__ import annotations

import weakref
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

DIRECT = "weft.direct"
"""Key of a ``DirectWriter`` in the scope of a request; absent where the answer goes elsewhere."""


class DirectWriter:
    """Writes chunks as ``RequestResponseCycle.send`` does, in place of the ASGI function ``send``."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        # The scope of ``cycle`` refers to this object. With a strong reference back, only the garbage
        # collector would free the request and the connection.
        self._cycle = weakref.proxy(cycle)

    @property
    def ready(self) -> bool:
        """True if ``send`` would write a part of the body now, without a wait: the headers, which set
        ``chunked_encoding``, are sent, and the connection takes bytes."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (cycle.flow.write_paused or cycle.disconnected)

    def write(self, data: bytes) -> None:
        """Write a part of the body. Call only while ``ready`` is True and no ``send`` waits."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class UntilClose(RequestResponseCycle):
    """Answer to a client of HTTP/1.0, which knows no chunks: an answer without a length ends with the
    connection."""

    _length_unknown = False

    async def send(self, message: Any) -> None:
        """Send a message of the answer."""
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            self._length_unknown = b"content-length" not in names
            if self._length_unknown:
                self.chunked_encoding = False  # uvicorn then adds no header
        elif self._length_unknown:
            self.expected_content_length = len(message.get("body", b""))  # uvicorn compares both
        await super().send(message)
