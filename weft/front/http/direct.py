"""Writes of an open stream to its connection, without the layers of ASGI."""

from __future__ import annotations

import weakref

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

DIRECT = "weft.direct"
"""Key of a ``DirectWriter`` in the scope of a request; absent where the answer goes elsewhere."""


class DirectWriter:
    """Writes chunks as ``RequestResponseCycle.send`` does, in place of the ASGI function ``send``."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        # The scope of the cycle has this object. A strong reference back would leave each request, with its
        # connection, to the garbage collector.
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
