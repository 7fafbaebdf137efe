"""Reading a request's body: bounded in size and time, and only declared plain JSON.

A client has one minute for a body, plus time in proportion to the received bytes. Many clients at once, or
a slow line, make large bodies slow. The amount of received data separates such clients from clients that
hold a connection idle.

All bodies together, whether being read or waiting for the parser, have bounded memory. A body counts as
small up to ``SMALL`` bytes. Small bodies have a reserved share, so that large uploads cannot lock small
bodies out. In a full share, the upload with the longest time without progress is ended.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.requests import ClientDisconnect, Request

from weft.common.errors import Cancelled, Overloaded, RequestTimeout, TooLarge, UnsupportedMedia

BODY_TIMEOUT = 60.0
"""Seconds for a whole body, without the extra time by ``LEAST_RATE``."""
LEAST_RATE = 16 << 10
"""Bytes per second by which a body extends its own deadline: 128 kbit/s."""
STALL_TIMEOUT = 10.0
"""Maximum seconds without a byte of the body."""
MEMORY = 256 << 20
"""Memory for all bodies, in bytes; or four times the size limit of one body, if larger."""
SMALL = 256 << 10
PIECE = 32 << 10
"""Minimum bytes of a body's pieces, except the last."""
PROGRESS = 16 << 10
"""Bytes that count as progress."""


class _Share:
    """Part of the memory, with the bodies being read into it: longest time without progress first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self.reading: dict[Upload, None] = {}


class Bodies:
    """Bodies of all requests of one server. Used from the server's event loop."""

    def __init__(self, limit: int, memory: int | None = None) -> None:
        """``limit``: maximum bytes of one body. ``memory``: maximum bytes of all bodies."""
        self.limit = limit
        memory = memory or max(MEMORY, 4 * limit)
        self.small, self.large = _Share(memory // 4), _Share(memory - memory // 4)

    def upload(self) -> Upload:
        """Return the upload of a body before its first byte."""
        return Upload(self)


class Upload:
    """Memory of one body, until ``close``."""

    def __init__(self, bodies: Bodies) -> None:
        self.limit = bodies.limit
        self._bodies = bodies
        self._share = bodies.small
        self._size = self._progress = 0
        self._timeout: asyncio.Timeout | None = None
        self.ended = False
        """True if the upload was ended to make room for others."""

    def __enter__(self) -> Upload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory of the body, and mark the body as complete. Idempotent."""
        self.complete()
        self._share.used -= self._size
        self._size = 0

    def begin(self, timeout: asyncio.Timeout) -> None:
        """Mark the body as being read, until ``complete``. ``timeout`` ends the read early to make room."""
        self._timeout = timeout
        self._share.reading[self] = None

    def complete(self) -> None:
        """Mark the body as fully received, or given up. The upload can no longer be ended by others."""
        self._timeout = None
        self._share.reading.pop(self, None)

    def grow(self, count: int) -> None:
        """Count ``count`` received bytes. Other uploads without progress may be ended to make room. Raises
        Overloaded if there is no room, and no other upload can make room."""
        self._progress += count
        if self._progress >= PROGRESS or self._size == 0:
            self._progress = 0
            self._share.reading.pop(self, None)
            self._share.reading[self] = None  # after all others: the upload has made progress
        self._take(count)

    def hold(self, count: int) -> None:
        """Count ``count`` bytes added by the server to a complete body. Other uploads without progress may
        be ended to make room. Raises Overloaded without room."""
        assert self._timeout is None, "hold() is for complete bodies only"
        self._take(count)

    def _take(self, count: int) -> None:
        """Count ``count`` bytes; a body over ``SMALL`` bytes moves to the large share. Ends other uploads
        of the share, longest time without progress first, until the share fits. Raises Overloaded if only
        this upload is left."""
        self._share.used += count
        self._size += count
        if self._size > SMALL and self._share is self._bodies.small:
            self._move(self._bodies.large)
        # End the uploads with the longest time without progress until the share fits.
        while self._share.used > self._share.most:
            stalled = next(iter(self._share.reading), self)
            if stalled is self:
                raise Overloaded("the server has no free memory for this request's body; try again later")
            stalled._end()

    def _move(self, share: _Share) -> None:
        """Move to another share. A body being read goes behind all others there."""
        if self in self._share.reading:
            del self._share.reading[self]
            share.reading[self] = None
        self._share.used -= self._size
        self._share = share
        share.used += self._size

    def _end(self) -> None:
        """End the upload to make room for others: free the memory and make the reader time out now."""
        timeout = self._timeout
        self.ended = True
        self.close()
        if timeout is not None and not timeout.expired():
            timeout.reschedule(asyncio.get_running_loop().time())


def _may_be_json(request: Request) -> bool:
    """Return True if the content type is JSON, or has no meaning.

    Ollama's server reads any content type, and some of Ollama's clients send none or, as curl does, another.
    The check is for browsers: a stranger's page may send other types than JSON without asking the server
    before. A browser adds the headers ``_OF_PAGES`` to such a request.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return True
    return request.scope["path"].startswith("/api/") and not any(
        name in request.headers for name in _OF_PAGES
    )


_OF_PAGES = ("origin", "sec-fetch-site")
"""Headers of requests that a web page makes."""


async def read_json(request: Request, upload: Upload) -> list[bytes]:
    """Return the body in pieces. The pieces count as ``upload`` until ``upload.close``.

    A large body is never joined here: a copy would take milliseconds of the event loop's time. The content
    type must be JSON (see ``_may_be_json``); the JSON itself is not parsed. Raises UnsupportedMedia,
    TooLarge, RequestTimeout for a body that is too slow or was ended for others, Overloaded without memory,
    or Cancelled if the client disconnects.
    """
    if not _may_be_json(request):
        raise UnsupportedMedia("the content type must be application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("the body must not be compressed; leave out the header content-encoding")
    limit = upload.limit
    too_large = f"the body must have at most {limit} bytes"
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdecimal() and int(length[:20]) > limit:
        raise TooLarge(too_large)
    body: list[bytes] = []
    size = 0
    now = asyncio.get_running_loop().time
    begun = now()
    try:
        async with asyncio.timeout(min(BODY_TIMEOUT, STALL_TIMEOUT)) as timeout:
            upload.begin(timeout)
            async for chunk in request.stream():
                if chunk and not upload.ended:  # an ended upload times out in the next turn of the event loop
                    if body and len(body[-1]) + len(chunk) < PIECE:
                        body[-1] += chunk
                    else:
                        body.append(chunk)
                    size += len(chunk)
                    if size > limit:
                        raise TooLarge(too_large)
                    upload.grow(len(chunk))
                    timeout.reschedule(min(_due(begun, size), now() + STALL_TIMEOUT))
            upload.complete()
    except TimeoutError:
        if not upload.ended:
            raise RequestTimeout("the body did not arrive in time") from None
    except ClientDisconnect:
        raise Cancelled("the client closed the connection") from None
    if upload.ended:  # possibly ended just as the last bytes arrived
        raise RequestTimeout(
            "the body arrived too slowly, and other requests needed the memory; try again later"
        )
    return body


def _due(begun: float, size: int) -> float:
    """Return the deadline of a body begun at ``begun``, with ``size`` bytes received."""
    return begun + BODY_TIMEOUT + size / LEAST_RATE
