"""Common layer of every HTTP request: ids, header size, host names, keys and their limits, counting, other
origins, and an answer for every failure.

The layer also maps paths and methods to the routes: ``/health/`` becomes ``/health``, and HEAD becomes GET
without a body.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.common.errors import ErrorInfo, HeaderTooLarge, WeftError
from weft.common.log import get_logger
from weft.front.http.access import PROBES, REQUEST_ID, AccessControl, Hosts, RateLimited
from weft.front.http.answers import error_response, to_json
from weft.front.messages import messages_errors as messages
from weft.front.monitoring.metrics import Metrics

log = get_logger(__name__)

MAX_HEADER_BYTES = 64 << 10
_GOOD_ID = re.compile(rb"[A-Za-z0-9._\-]{1,128}")
ALL_METHODS = "DELETE, GET, HEAD, OPTIONS, POST"
_RETRY_AFTER = {429: 1, 503: 5}
_CLOSE = frozenset({408, 413, 431})
"""Statuses after which the rest of the request is not read."""


MESSAGES_ROUTES = "/v1/messages"
"""Root of the routes with this error shape."""


def has_messages_shape(path: str) -> bool:
    """Return True if errors of ``path`` have the shape of the Messages API."""
    return path == MESSAGES_ROUTES or path.startswith(MESSAGES_ROUTES + "/")


OLLAMA_ROUTES = "/api/"
"""Root of the routes of Ollama's API."""


def error_answer(
    error: ErrorInfo, path: str, allow: str | None = None, retry_after: float | None = None
) -> Response:
    """Return the HTTP answer for a request that failed before the first byte of the answer, in the error
    shape of ``path``. ``allow``: methods of the route. ``retry_after``: seconds, if more precise than the
    default."""
    headers = {} if allow is None else {"allow": allow}
    if error.http_status in _RETRY_AFTER:
        headers["retry-after"] = str(math.ceil(retry_after or _RETRY_AFTER[error.http_status]))
    if error.http_status in _CLOSE:
        headers["connection"] = "close"
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    shown: Any = error_response(error)
    if has_messages_shape(path):
        error = messages.translated(error)
        shown = messages.error_body(error)
    elif path.startswith(OLLAMA_ROUTES):
        shown = {"error": error.message}
    return Response(to_json(shown), error.http_status, headers, "application/json")


def refusal(error: WeftError, path: str) -> Response:
    """Return the HTTP answer for ``error``, raised before the first byte of the answer."""
    wait = error.wait if isinstance(error, RateLimited) else None
    return error_answer(error.info(), path, retry_after=wait)


class AccessGate:
    """Outermost ASGI layer: checks and counts each request, and answers every failure."""

    def __init__(
        self, app: ASGIApp, access: AccessControl, hosts: Hosts, metrics: Metrics, root_path: str = ""
    ) -> None:
        """``root_path``: prefix removed from matching paths; "" for none."""
        self._hosts = hosts
        self._app = app
        self._access = access
        self._metrics = metrics
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, count and answer one request. Every failure before the first byte of the answer becomes an
        error answer; a later failure is logged and raised, so that uvicorn closes the connection. Scopes
        other than HTTP pass unchanged."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        scope = _as_routed(scope, self._root_path)
        # Reversed, so that the first of several equal headers wins.
        headers = dict(reversed(scope["headers"]))
        request_id = request_id_of(headers.get(b"x-request-id"))
        scope[REQUEST_ID] = request_id.decode()
        status, began = 0, time.monotonic()
        more = [(b"x-request-id", request_id), *self._access.origins.headers(headers)]
        if has_messages_shape(scope["path"]):
            more.append((b"request-id", request_id))  # name of the header in clients of the Messages API

        async def answer(message: Message) -> None:
            """Send a message of the answer; record the status and add the common headers."""
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), *more]
            await send(message)

        try:
            _check_size(scope)
            if scope["path"] not in PROBES:
                self._hosts.check(headers.get(b"host"))
            preflight = self._access.origins.preflight(method, headers, ALL_METHODS)
            if preflight is not None:
                await preflight(scope, receive, answer)
                return
            more += self._access.admit(scope, headers)
            await self._app(scope, receive, answer)
        except WeftError as error:
            more += error.headers if isinstance(error, RateLimited) else []
            await refusal(error, scope["path"])(scope, receive, answer)
        except Exception:
            log.exception("a request failed")
            # After the first byte of the answer, only closing the connection can signal the failure.
            if status:
                raise
            failed = ErrorInfo(code="internal_error", message="the server failed to answer this request")
            await error_answer(failed, scope["path"])(scope, receive, answer)
        finally:
            self._count(getattr(scope.get("route"), "path", "other"), method, status, began)
            # Only 500: clients can provoke any number of 503 and 504. All statuses are counted.
            if status == 500:
                log.warning("request %s was answered with 500", request_id.decode())

    def refused(self, status: int) -> None:
        """Count an answer without a request: headers malformed, too long or too slow."""
        self._count("other", "other", status)

    def _count(self, route: str, method: str, status: int, began: float | None = None) -> None:
        """Count an answer, and its time since ``began``. The labels are bounded: existing routes and
        methods, or "other"."""
        if method not in ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS"):
            method = "other"
        self._metrics.http.labels(route, method, str(status)).inc()
        if began is not None:
            self._metrics.http_seconds.labels(route, method).observe(time.monotonic() - began)


def _check_size(scope: Scope) -> None:
    if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
        raise HeaderTooLarge(f"the headers have more than {MAX_HEADER_BYTES} bytes")


def _as_routed(scope: Scope, root_path: str) -> Scope:
    """Return ``scope`` with the route's path and method, so access checks and routes see the same path.

    The server drops the body of an answer to HEAD, by its own scope.
    """
    path = scope["path"]
    if root_path and (path == root_path or path.startswith(root_path + "/")):
        path = path[len(root_path) :] or "/"
    method = scope["method"]
    if len(path) > 1:
        path = path.removesuffix("/")
    return {**scope, "path": path, "method": "GET" if method == "HEAD" else method}


def request_id_of(given: bytes | None) -> bytes:
    """Return the client's id if short and plain, else a new id. The id only names log lines."""
    if given is not None and _GOOD_ID.fullmatch(given):
        return given
    return b"req-" + secrets.token_hex(12).encode()
