"""Requests of this process to its own routes: a line of a batch is handled like an HTTP request."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from starlette.types import ASGIApp, Message

from weft.batch.lines import BatchAnswer
from weft.common.errors import WeftError
from weft.common.log import get_logger
from weft.front.http.access import KEY, REQUEST_ID
from weft.front.http.answers import error_response, to_json
from weft.front.requests.batch_generation import SHARE

log = get_logger(__name__)


async def ask(app: ASGIApp, url: str, body: bytes, key: int, share: int) -> BatchAnswer:
    """Return the answer of a route to a POST of JSON.

    ``app``: the routes, without the access checks. ``key``: number of the API key. ``share``: id of the batch
    as a client request. A cancelled call ends the request, as a closed connection does.
    """
    name = "req-" + secrets.token_hex(12)
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "client": None,
        "server": None,
        KEY: key,
        REQUEST_ID: name,
        SHARE: share,
    }
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, pieces, whole = 0, [], False

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Future()  # the connection never closes by itself
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status, whole
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message.get("body", b""))
            whole = not message.get("more_body", False)

    try:
        await app(scope, receive, send)
    except WeftError as error:
        info = error.info()
        return BatchAnswer(info.http_status, name, to_json(error_response(info)))
    except Exception:
        log.exception("a line of a batch failed")
        whole = False
    # A long answer that reached its deadline ends without its last message.
    if not whole:
        failed = WeftError("the server failed to answer this request")
        return BatchAnswer(500, name, to_json(error_response(failed.info())))
    return BatchAnswer(status, name, b"".join(pieces))
