"""Server-sent events, and noticing that a client went away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.common.errors import Cancelled
from weft.front.flow import Flow


class EventStream(Response):
    """Streams a generator of complete events. The generator owns its request: it is closed whatever happens.

    Sending waits for the client, so a slow one slows its own generator only.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], deadline: float) -> None:
        """``deadline``: time of the event loop's clock after which a send is given up."""
        self.status_code = 200
        self.background = None
        self._events = events
        self._deadline = deadline
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with asyncio.timeout_at(self._deadline):
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.asynccontextmanager
async def watched(receive: Receive, flow: Flow) -> AsyncIterator[None]:
    """While inside, the client's leaving fails ``flow`` with Cancelled. The body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        flow.fail(Cancelled("the client went away"))

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
