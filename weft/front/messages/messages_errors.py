"""Errors in the shape of the Messages API."""

from __future__ import annotations

import msgspec

from weft.common.errors import ErrorInfo, Overloaded
from weft.front.messages.messages_events import MessagesError, MessagesErrorDetail

OVERLOADED = 529
"""Status for an overloaded server, as opposed to a caller above its own limit."""

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


def translated(error: ErrorInfo) -> ErrorInfo:
    """Return ``error`` with a status known to clients of this API. A full queue, and a server without an
    engine, become 529; 429 stays for the caller's own limit."""
    full = error.http_status == Overloaded.http_status and error.code == Overloaded.code
    if full or error.http_status == 503:
        return msgspec.structs.replace(error, http_status=OVERLOADED)
    return error


def error_body(error: ErrorInfo) -> MessagesError:
    """Return the body for ``error``, which must be translated already. ``type`` follows from the HTTP
    status."""
    error_type = _TYPES.get(error.http_status)
    if error_type is None:
        error_type = "invalid_request_error" if error.http_status < 500 else "api_error"
    detail = MessagesErrorDetail(type=error_type, message=error.message)
    if error.param is not None:
        detail.param = error.param
    return MessagesError(error=detail)
