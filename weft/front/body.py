"""Reading a request's body: within a size, fast enough, and only what claims to be plain JSON.

A body has a minute, and longer the more of it came: many clients at once, or a slow line, make large bodies
slow, and what tells these from clients that keep a connection for nothing is how much comes.

All bodies together, those that are being read and those that wait to be parsed, have a bounded memory. A body
counts as small until it is larger than ``SMALL``, and small ones have a share of their own, so that uploads
cannot lock them out. Where a share is full, the upload ends that has made no progress for the longest time.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.requests import ClientDisconnect, Request

from weft.common.errors import Cancelled, Overloaded, RequestTimeout, TooLarge, UnsupportedMedia

BODY_TIMEOUT = 60.0
"""Seconds a client may take to send a whole body, beside those that ``LEAST_RATE`` gives it."""
LEAST_RATE = 16 << 10
"""Bytes a second that a body may take longer for: 128 kbit/s."""
STALL_TIMEOUT = 10.0
"""Seconds in which a byte of it must come."""
MEMORY = 256 << 20
"""Bytes of all bodies, or four times the largest one where that is more."""
SMALL = 256 << 10
PIECE = 32 << 10
"""Bytes of a body's pieces at least, but for the last."""
PROGRESS = 16 << 10
"""Bytes that must come for a body to count as not stalled."""


class _Share:
    """A part of the memory, and the bodies that are being read into it: longest without progress first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self.reading: dict[Upload, None] = {}


class Bodies:
    """The bodies of all requests of one server. Used from its event loop."""

    def __init__(self, limit: int, memory: int | None = None) -> None:
        """``limit``: bytes of the largest body. ``memory``: of all of them."""
        self.limit = limit
        memory = memory or max(MEMORY, 4 * limit)
        self.small, self.large = _Share(memory // 4), _Share(memory - memory // 4)

    def upload(self) -> Upload:
        """A body that is about to be read, of which nothing came so far."""
        return Upload(self)


class Upload:
    """The memory of one body, until it is closed."""

    def __init__(self, bodies: Bodies) -> None:
        self.limit = bodies.limit
        self._bodies = bodies
        self._share = bodies.small
        self._size = self._progress = 0
        self._timeout: asyncio.Timeout | None = None
        self.ended = False
        """Whether it was ended to make room."""

    def __enter__(self) -> Upload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The body is no longer there. Idempotent."""
        self.complete()
        self._share.used -= self._size
        self._size = 0

    def begin(self, timeout: asyncio.Timeout) -> None:
        """Marks the body as being read, within ``timeout``, until it is complete."""
        self._timeout = timeout
        self._share.reading[self] = None

    def complete(self) -> None:
        """All of it came, or no more will. It can't be ended any more."""
        self._timeout = None
        self._share.reading.pop(self, None)

    def grow(self, count: int) -> None:
        """``count`` bytes came. Raises Overloaded when there is no room, and no other upload can make it."""
        self._progress += count
        if self._progress >= PROGRESS or self._size == 0:
            self._progress = 0
            self._share.reading.pop(self, None)
            self._share.reading[self] = None  # behind all others: it has made progress
        self._take(count)

    def hold(self, count: int) -> None:
        """``count`` bytes of this server's own belong to the whole body now. Raises Overloaded."""
        assert self._timeout is None, "a body that is being read refers to nothing yet"
        self._take(count)

    def _take(self, count: int) -> None:
        self._share.used += count
        self._size += count
        if self._size > SMALL and self._share is self._bodies.small:
            self._move(self._bodies.large)
        while self._share.used > self._share.most:
            stalled = next(iter(self._share.reading), self)
            if stalled is self:
                raise Overloaded("the server has no memory left for this request's body; try again later")
            stalled._end()

    def _move(self, share: _Share) -> None:
        """Into another share; behind all others there, if it is being read."""
        if self in self._share.reading:
            del self._share.reading[self]
            share.reading[self] = None
        self._share.used -= self._size
        self._share = share
        share.used += self._size

    def _end(self) -> None:
        timeout = self._timeout
        self.ended = True
        self.close()
        if timeout is not None and not timeout.expired():
            timeout.reschedule(asyncio.get_running_loop().time())


async def read_json(request: Request, upload: Upload) -> list[bytes]:
    """The body in pieces, which count as ``upload`` until that is closed.

    A large body is never copied into one here: that would take milliseconds of the event loop's time.

    Raises UnsupportedMedia, TooLarge, RequestTimeout, Overloaded or Cancelled.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMedia("the content type must be application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("the body must not be compressed")
    limit = upload.limit
    too_large = TooLarge(f"the body must have at most {limit} bytes")
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdecimal() and int(length[:20]) > limit:
        raise too_large
    body: list[bytes] = []
    size = 0
    now = asyncio.get_running_loop().time
    begun = now()
    try:
        async with asyncio.timeout(min(BODY_TIMEOUT, STALL_TIMEOUT)) as timeout:
            upload.begin(timeout)
            async for chunk in request.stream():
                if chunk and not upload.ended:  # it ends with the next turn of the event loop
                    if body and len(body[-1]) + len(chunk) < PIECE:
                        body[-1] += chunk
                    else:
                        body.append(chunk)
                    size += len(chunk)
                    if size > limit:
                        raise too_large
                    upload.grow(len(chunk))
                    timeout.reschedule(min(_due(begun, size), now() + STALL_TIMEOUT))
            upload.complete()
    except TimeoutError:
        if not upload.ended:
            raise RequestTimeout("the body did not arrive in time") from None
    except ClientDisconnect:
        raise Cancelled("the client went away") from None
    if upload.ended:  # perhaps in the moment in which the rest came
        raise RequestTimeout("the body came so slowly that others needed its memory")
    return body


def _due(begun: float, size: int) -> float:
    """When a body is late of which ``size`` bytes came, and that was begun at ``begun``."""
    return begun + BODY_TIMEOUT + size / LEAST_RATE
