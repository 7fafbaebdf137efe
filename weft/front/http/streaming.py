"""Server-sent events, deadlines, and detection of disconnected clients."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.common.errors import Cancelled, DeadlineExceeded
from weft.common.log import get_logger
from weft.control.links.flow import Flow
from weft.front.http.answers import to_json

log = get_logger(__name__)

T = TypeVar("T")


JSON = "application/json"
EVENTS = "text/event-stream"
KEEP_ALIVE = 10.0
"""Seconds without an event until a comment is sent, so that no proxy considers the stream dead."""
COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
PAUSE_AFTER = 0.4
"""Seconds for which a client may block an event before the stream is paused."""


class StreamForm(msgspec.Struct, frozen=True, kw_only=True):
    """Format of an API's streams."""

    named: bool = False
    """True if each event has a line with its name, the event's ``type``."""
    idle: bytes = COMMENT
    """Bytes to send after a long time without events."""
    end: bytes = DONE
    """Bytes to send after the last event, except after a failure."""
    lines: bool = False
    """True for JSON values on lines of their own, in place of server-sent events."""

    @property
    def media_type(self) -> str:
        """Content type of the stream."""
        return "application/x-ndjson" if self.lines else EVENTS

    def event(self, value: Any) -> bytes:
        """Return ``value`` as one server-sent event, or as one line."""
        if self.lines:
            return to_json(value) + b"\n"
        data = b"data: " + to_json(value) + b"\n\n"
        return b"event: " + value.type.encode() + b"\n" + data if self.named else data


HOLE = secrets.token_hex(16)
"""Text of an event that ``TextEvents`` replaces. Random, so that no other field has the text."""


class TextEvents:
    """Makes many events that differ in one text only. All other bytes are encoded once."""

    def __init__(self, event: bytes) -> None:
        """``event``: an event with the text ``HOLE``, once."""
        self._before, self._after = event.split(to_json(HOLE))

    def event(self, text: str) -> bytes:
        """Return the event with ``text`` in place of ``HOLE``."""
        return self._before + to_json(text) + self._after


class FlowPauser(Protocol):
    """The part of the links used by streams."""

    def pause(self, flow: Flow) -> None:
        """Pause: the client does not read, so the flow's sequences should give up their slots."""

    def resume(self, flow: Flow) -> None:
        """Resume: the client reads again."""


class EventStream(Response):
    """Response that streams a generator of complete events, or of pieces of an answer. The generator is
    always closed.

    Sends wait for the client, so a slow client slows only its own generator. During a long wait the flow of
    the events is paused.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        deadline: float,
        held: contextlib.ExitStack,
        flow: Flow,
        link: FlowPauser,
        media_type: str = EVENTS,
    ) -> None:
        """``events``: complete events, or pieces of an answer. ``deadline``: time of the event loop's clock
        at which a client that does not read is given up. ``held``: resources of the request, released after
        the end of the answer. ``flow``: flow of the events, which ``link`` pauses and resumes."""
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self._events = events
        self._deadline = deadline
        self._held = held
        self._flow = flow
        self._link = link
        self._paused = False
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, then close the generator and release the resources, in this order. At the
        deadline the answer is cut off, with a log line and without an exception."""
        with self._held:
            async with contextlib.aclosing(self._events) as events:
                # The generator must be closed before the request's resources are released.
                try:
                    async with asyncio.timeout_at(self._deadline):
                        await self._send(events, send)
                except TimeoutError:
                    log.warning("a client did not read its stream in time: connection closed")

    async def _send(self, events: AsyncGenerator[bytes, None], send: Send) -> None:
        """Send headers and events. A send that blocks for ``PAUSE_AFTER`` seconds pauses the flow until the
        client reads again."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        loop = asyncio.get_running_loop()
        async for data in events:
            # `send` blocks only while the client does not read: then the timer pauses the flow.
            timer = loop.call_later(PAUSE_AFTER, self._pause)
            try:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            finally:
                timer.cancel()
            if self._paused:
                self._paused = False
                self._link.resume(self._flow)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _pause(self) -> None:
        self._paused = True
        self._link.pause(self._flow)


class Silence:
    """Wakes a flow's reader after a long time without a sent event. Context manager with a timer."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._loop = asyncio.get_running_loop()
        self.due = False
        """True if a comment is due; the reader was woken."""

    def __enter__(self) -> Silence:
        self.sent()
        self._timer = self._loop.call_at(self._until, self._look)
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def sent(self) -> None:
        """Restart the silence after a sent event, and clear ``due``."""
        self.due = False
        self._until = self._loop.time() + KEEP_ALIVE

    def _look(self) -> None:
        """Wake the flow's reader and set ``due`` after ``KEEP_ALIVE`` seconds of silence. Restart the
        timer."""
        now = self._loop.time()
        if now >= self._until:  # otherwise an event was sent after the timer was set
            self.due = True
            self._until = now + KEEP_ALIVE
            self._flow.wake()
        self._timer = self._loop.call_at(self._until, self._look)


@contextlib.asynccontextmanager
async def within(deadline: float) -> AsyncIterator[None]:
    """Raise DeadlineExceeded inside the context at ``deadline``, a time of the event loop's clock."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise late() from None


def late() -> DeadlineExceeded:
    """Return the error for a request past its deadline."""
    return DeadlineExceeded("the request took longer than --request-timeout allows")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` and return the result. If the client disconnects first, cancel ``work`` and raise
    Cancelled. The body must have been read. Messages of ``receive`` are used up."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client closed the connection")
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


@contextlib.asynccontextmanager
async def watched(receive: Receive, flow: Flow) -> AsyncIterator[None]:
    """Fail ``flow`` with Cancelled if the client disconnects inside the context; nothing is raised here.
    The body must have been read. Messages of ``receive`` are used up."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        flow.fail(Cancelled("the client closed the connection"))

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
