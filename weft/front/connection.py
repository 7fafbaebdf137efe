"""One HTTP connection: uvicorn's, with bounds on the work that a client can cause before its answer.

uvicorn's httptools protocol collects headers without a limit, and parses all received bytes at once. In
this class, headers that are too long or too slow, or a body of mostly framing, get an error answer in the
usual shape, and the connection is closed. The parser gets received bytes in small pieces. Each connection
has a limited number of pieces per turn, and no piece while a request waits behind another request.

``Connections`` limits the number of open connections. A connection waits for its client until a whole
request has arrived. Above the limit, the connection with the longest wait is closed for a new connection.
So a client that opens connections and sends nothing, or little, only loses its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from weft.common import log as weft_log
from weft.common.errors import HeaderTooLarge, InvalidRequest, RequestTimeout, Unavailable, WeftError
from weft.front.http.answers import error_response, to_json
from weft.front.http.direct import DIRECT, DirectWriter, UntilClose
from weft.front.middleware import request_id_of

log = weft_log.get_logger(__name__)


MOST_CONNECTIONS = 8192
"""Minimum limit of connections, if enough files may be open. Bounds memory: a connection in the middle of
an upload takes about 30 KiB."""
MOST_AHEAD = 64 << 20
"""Maximum bytes received behind unanswered requests, over all connections."""


class Connections:
    """Open connections of one server. Used from the server's event loop."""

    def __init__(self, most: Callable[[], int] = lambda: MOST_CONNECTIONS) -> None:
        self._most = most  # returns the present limit, which changes with the number of engines
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        """Connections waiting for their client, longest wait first."""
        self._ahead: dict[Connection, int] = {}
        self._all_ahead = 0

    def opened(self, connection: Connection) -> bool:
        """Register a new connection as waiting for its client. Above the limit, close the connection with
        the longest wait. Return False, without registration, if no other connection can be closed: then the
        caller must close the new connection."""
        while len(self._open) >= self._most():
            if not self._waiting:
                return False
            longest = next(iter(self._waiting))
            # Remove the connection first: `give_way` may call `closed` again.
            self.closed(longest)
            longest.give_way()
        self._open.add(connection)
        self._waiting[connection] = None
        return True

    def waits(self, connection: Connection) -> None:
        """Mark ``connection`` as waiting for its client, with the shortest wait. No effect for a closed
        connection."""
        self.works(connection)
        if connection in self._open:
            self._waiting[connection] = None

    def works(self, connection: Connection) -> None:
        """Mark ``connection`` as working: a whole request has arrived."""
        self._waiting.pop(connection, None)

    def holds(self, connection: Connection, ahead: int) -> bool:
        """Record ``ahead`` bytes behind the connection's request, in place of the last number. Return False
        if such bytes of all connections exceed the limit; the caller then closes the connection."""
        self._all_ahead += ahead - self._ahead.pop(connection, 0)
        if ahead:
            self._ahead[connection] = ahead
        return self._all_ahead <= MOST_AHEAD or not ahead

    def closed(self, connection: Connection) -> None:
        """Remove a closed connection. Idempotent."""
        self._open.discard(connection)
        self.holds(connection, 0)
        self._waiting.pop(connection, None)


MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 256
HEAD_SECONDS = 20.0
"""Maximum seconds from the opening, or from the first byte of a request, to the end of its headers."""
MAX_FRAMING_BYTES = 64 << 10
"""Maximum bytes on the wire outside the body (sizes and extensions of chunks), beyond a quarter of the
body."""

PIECE = 512
"""Bytes per parser call where headers may begin. Bounds the number of requests that begin in one call."""
TURN = 64 << 10
"""Maximum bytes parsed before other connections have a turn."""

WRITE_BUFFER = 16 << 10
"""Maximum bytes of an answer buffered for the kernel before the sender must wait."""
UNREAD_SECONDS = 60.0
"""Seconds without any progress until a connection with unread answers is closed."""


class _Reading(FlowControl):
    """Pauses the transport at uvicorn's request, and while received bytes are not parsed yet."""

    def __init__(self, transport: asyncio.Transport, resumed: Callable[[], None]) -> None:
        super().__init__(transport)
        self._resumed = resumed
        self._behind = False

    def pause_reading(self) -> None:
        self._set(True, self._behind)

    def resume_reading(self) -> None:
        if self.read_paused:
            self._set(False, self._behind)
            self._resumed()

    def set_behind(self, behind: bool) -> None:
        """Set the presence of unparsed bytes, and pause or resume the transport."""
        self._set(self.read_paused, behind)

    def _set(self, wanted: bool, behind: bool) -> None:
        """Set both reasons for a pause: ``wanted`` by uvicorn, ``behind`` for unparsed bytes. Pause the
        transport with the first reason, resume without any. A closing transport stays as is."""
        before = self.read_paused or self._behind
        after = wanted or behind
        self.read_paused = wanted
        self._behind = behind
        if self._transport.is_closing():
            return
        if after and not before:
            self._transport.pause_reading()
        elif before and not after:
            self._transport.resume_reading()


class Connection(HttpToolsProtocol):
    """HTTP connection with counts of header bytes and framing bytes."""

    flow: _Reading

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        """``connections``: all connections of the server; the other arguments are uvicorn's."""
        super().__init__(*args, **kwargs)
        self._all = connections
        self._served: RequestResponseCycle | None = None
        """Last request with a started handler. ``cycle`` is the last parsed request."""
        self._unparsed = bytearray()
        self._next_turn: asyncio.Handle | None = None
        self._fault: WeftError | None = None
        """Error of a parser callback; the parser stops with its own error."""
        self._in_head = False
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._in_body = False
        self._length = 0
        """Length of the body by its header; 0 if unknown."""
        self._body_bytes = 0
        self._wire_bytes = 0
        """Bytes of all pieces that ended within the body."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection, and start the timer of the headers. Without room, the connection gets a
        503 and is closed."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER)
        self.flow = _Reading(transport, self._schedule)
        if self._all.opened(self):
            self._begin_head()
        else:
            self._refuse(Unavailable("the server has too many connections; try again later"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers, remove the connection, and notify the running handler that the client is gone."""
        self._all.closed(self)
        self._end_head()
        self._stop_watching()
        if self._next_turn is not None:
            self._next_turn.cancel()
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True  # uvicorn notifies only the last parsed request
            self._served.message_event.set()
        super().connection_lost(exc)

    # -- what was read, in pieces -------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Store received bytes, and parse now unless a turn is scheduled."""
        if not self.transport.is_closing():
            self._unparsed += data
            if self._next_turn is None:
                self._take_turn()

    def _take_turn(self) -> None:
        """Parse received bytes, up to the limit of one turn; schedule another turn for the rest. Reading
        pauses while bytes are left. Too many bytes behind unanswered requests close the connection."""
        self._next_turn = None
        parsed = 0
        while self._unparsed and self._may_parse():
            if parsed >= TURN:
                self._schedule()
                break
            # A large body may be parsed in large pieces: no header can begin within the body.
            size = max(PIECE, min(self._length - self._body_bytes, TURN))
            piece = bytes(self._unparsed[:size])
            del self._unparsed[:size]
            parsed += len(piece)
            self._parse(piece)
        self.flow.set_behind(bool(self._unparsed))
        if not self._all.holds(self, len(self._unparsed) if self.pipeline else 0):
            self.transport.close()

    def _may_parse(self) -> bool:
        # A request behind another request stays in bytes: parsed, the request takes a hundred times the
        # memory.
        return not (self.flow.read_paused or self.pipeline or self.transport.is_closing())

    def _schedule(self) -> None:
        if self._unparsed and self._next_turn is None:
            self._next_turn = self.loop.call_soon(self._take_turn)

    def _parse(self, piece: bytes) -> None:
        """Feed ``piece`` to the parser. Refuse the request for invalid HTTP, too long headers, or a body of
        mostly framing."""
        if self._in_head:
            self._head_bytes += len(piece)  # reset below if the headers end in this piece
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserError:
            self._refuse(self._fault or InvalidRequest("this is not an HTTP request"))
            return
        except httptools.HttpParserUpgrade:
            self._unsupported_upgrade_warning()
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HeaderTooLarge(f"the headers have more than {MAX_HEAD_BYTES} bytes"))
        if self._in_body:
            self._wire_bytes += len(piece)
            if self._wire_bytes - self._body_bytes > MAX_FRAMING_BYTES + self._body_bytes // 4:
                self._refuse(InvalidRequest("the body's chunks are too small; send larger ones"))

    # -- callbacks of the parser --------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Start the timer and the counts of a new request."""
        self._unset_keepalive_if_required()
        if not self._in_head:
            self._begin_head()
        self._length = self._body_bytes = self._wire_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Record a header; a trailer is ignored. Raises HeaderTooLarge for too many headers, which stops
        the parser."""
        if not self._in_head:
            return  # a trailer, which is ignored
        if len(self.headers) >= MAX_HEADERS:
            self._fault = HeaderTooLarge(f"the request has more than {MAX_HEADERS} headers")
            raise self._fault
        if name.lower() == b"content-length":
            self._length = int(value[:20])  # the parser accepts only digits
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the timer of the headers. Unless an earlier request is unanswered, the connection now waits
        for its client to send the body."""
        self._end_head()
        self._in_body = True
        if self.cycle is None or self.cycle.response_complete:
            self._all.waits(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        if not self.cycle.response_complete:
            self._all.works(self)
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start the handler of ``cycle``, and watch the unsent bytes for the new answer."""
        self._served = cycle
        if cycle.scope["http_version"] == "1.0":
            cycle.__class__ = UntilClose
            cycle.waiting_for_100_continue = False  # HTTP/1.0 does not know this answer, either
        cast(dict[str, Any], cycle.scope)[DIRECT] = DirectWriter(cycle)
        self._stop_watching()  # later unsent bytes belong to another answer
        if self.flow.write_paused:
            self._watch_reading()
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Mark the connection as waiting unless a further complete request was received. Parse bytes that
        waited, and watch the unsent bytes."""
        # No further complete request was received, so the connection waits for its client.
        if not self.pipeline or self.pipeline[-1][0].more_body:
            self._all.waits(self)
        super().on_response_complete()
        self._schedule()
        self._stop_watching()
        self._watch_reading()

    # -- clients that do not read -------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def _watch_reading(self) -> None:
        """Start a timer that checks progress of the unsent bytes."""
        waits = self.transport.get_write_buffer_size()
        if waits and self._unread_timer is None:
            self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self._check_reading, waits)

    def _stop_watching(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _check_reading(self, before: int) -> None:
        """Close the connection if none of the ``before`` unsent bytes has left since the last check; else
        check again."""
        self._unread_timer = None
        if self.transport.get_write_buffer_size() < before:
            self._watch_reading()
        else:
            log.warning("a client did not read its answer for %g seconds: connection closed", UNREAD_SECONDS)
            self.transport.abort()

    # -- refusals -----------------------------------------------------------------------------------

    def _begin_head(self) -> None:
        self._in_head = True
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def _end_head(self) -> None:
        """Stop the timer and the count of the headers. Idempotent."""
        self._in_head = False
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        """Close the connection after the time for headers; a client that sent a part of a request gets a
        408. The timer starts again while received bytes wait for the parser."""
        if self.pipeline or self._unparsed:  # the rest of the headers may be received, but unparsed
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)
        elif self._head_bytes:
            self._refuse(RequestTimeout("the request's headers did not arrive in time"))
        else:
            self.transport.close()  # opened and never used

    def give_way(self) -> None:
        """Close the connection to make room for others. The client has sent no complete request."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # a graceful close would wait until the client reads everything
        elif self._in_body or self._head_bytes:
            self._refuse(
                RequestTimeout("the request arrived too slowly, and another client needed the connection")
            )
        else:
            self.transport.close()

    def _refuse(self, error: WeftError) -> None:
        """Answer the request being read with ``error`` and close the connection. No answer if an earlier
        request has no answer yet."""
        cycle = self.cycle
        reads = self._in_body
        self._end_head()
        free = cycle is None or cycle.response_complete
        if free or (reads and not cycle.response_started and not self.pipeline):
            body = to_json(error_response(error.info()))
            head = (
                b"content-type: application/json\r\ncontent-length: %d\r\nx-request-id: %s\r\n"
                b"connection: close\r\n\r\n" % (len(body), request_id_of(None))
            )
            self.transport.write(STATUS_LINE[error.http_status] + head + body)
            if not free:  # the handler must not answer too
                cycle.disconnected = True
                cycle.message_event.set()
        self.transport.close()
        self._watch_reading()
