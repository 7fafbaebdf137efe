"""Reading a request's body: within a size, within a time, and only what claims to be plain JSON."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from weft.common.errors import Cancelled, RequestTimeout, TooLarge, UnsupportedMedia

BODY_TIMEOUT = 60.0
"""Seconds a client may take to send a whole body."""


async def read_json(request: Request, limit: int) -> bytes:
    """The body, at most ``limit`` bytes. Raises UnsupportedMedia, TooLarge, RequestTimeout or Cancelled."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMedia("the content type must be application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("the body must not be compressed")
    too_large = TooLarge(f"the body must have at most {limit} bytes")
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdecimal() and int(length[:20]) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise RequestTimeout("the body did not arrive in time") from None
    except ClientDisconnect:
        raise Cancelled("the client went away") from None
    return bytes(body)
