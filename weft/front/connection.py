"""One HTTP connection: uvicorn's, with bounds on the time and size of a request's head.

uvicorn's httptools protocol collects headers for as long as they come. Here a head that is too long or too
slow is answered, in the error shape of all others, and the connection closed.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from weft.common.errors import HeaderTooLarge, InvalidRequest, RequestTimeout, WeftError
from weft.front.responses import error_response, to_json

MAX_HEAD_BYTES = 64 << 10
HEAD_SECONDS = 20.0
"""From a connection's first byte, or its opening, to the end of a request's headers."""


class Connection(HttpToolsProtocol):
    """Counts what comes before the end of each head."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._in_head = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)  # reset below when the head ends in this piece
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HeaderTooLarge(f"the headers have more than {MAX_HEAD_BYTES} bytes"))

    def on_message_begin(self) -> None:
        if not self._in_head:
            self._begin_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest("this is not an HTTP request"))

    def _begin_head(self) -> None:
        self._in_head = True
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def _end_head(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        if self._head_bytes:
            self._refuse(RequestTimeout("the request's headers did not arrive in time"))
        else:
            self.transport.close()  # opened and never used

    def _refuse(self, error: WeftError) -> None:
        """Answers unless an answer to an earlier request is under way, and closes."""
        self._end_head()
        if self.cycle is None or self.cycle.response_complete:
            body = to_json(error_response(error.info()))
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
                body
            )
            self.transport.write(STATUS_LINE[error.http_status] + head + body)
        self.transport.close()
