"""Errors in the shape that clients of the Messages API read."""

from __future__ import annotations

import msgspec

from weft.common.errors import ErrorInfo, Overloaded
from weft.front.messages.events import MessagesError, MessagesErrorDetail

ROUTES = "/v1/messages"
"""The route whose errors have this shape, and those below it."""
OVERLOADED = 529
"""The status that says: the server, not the caller, has too much to do."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def applies(path: str) -> bool:
    """Whether errors of this path have this shape."""
    return path == ROUTES or path.startswith(ROUTES + "/")


def translated(error: ErrorInfo) -> ErrorInfo:
    """``error`` with the status that these clients know: a queue that is full, and a server without an
    engine, are 529, where 429 is for the caller's own limit.
    """
    full = error.http_status == Overloaded.http_status and error.code == Overloaded.code
    if full or error.http_status == 503:
        return msgspec.structs.replace(error, http_status=OVERLOADED)
    return error


def error_body(error: ErrorInfo) -> MessagesError:
    """``error``, which was translated, as a client sees it."""
    kind = _TYPES.get(error.http_status)
    if kind is None:
        kind = "invalid_request_error" if error.http_status < 500 else "api_error"
    detail = MessagesErrorDetail(type=kind, message=error.message)
    if error.param is not None:
        detail.param = error.param
    return MessagesError(error=detail)
