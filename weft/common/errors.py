"""The error tree. Every failure that is reported to a client or another process belongs to the tree.

    WeftError
    ├── InvalidRequest 400 ── ContextLength 400
    ├── Unauthorized 401 · Forbidden 403 · NotFound 404 · MethodNotAllowed 405 · RequestTimeout 408
    ├── TooLarge 413 · UnsupportedMedia 415 · Overloaded 429 · HeaderTooLarge 431
    ├── Cancelled 499
    ├── EngineDead 500
    ├── Unavailable 503 · DeadlineExceeded 504
    └── ConfigError (start-up only; never sent to a client)

Only ``ErrorInfo`` crosses a process boundary, never an exception object.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

Blame = Literal["client", "capacity", "peer", "engine"]


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An error as data, for other processes and for the client."""

    code: str
    message: str
    param: str | None = None
    blame: Blame = "engine"
    retryable: bool = False
    http_status: int = 500


class WeftError(Exception):
    """Base of all errors of the engine.

    ``message`` names the remedy and contains no path, address, repr or traceback. ``param`` is the
    request parameter or flag at fault, or None.
    """

    code: ClassVar[str] = "internal_error"
    blame: ClassVar[Blame] = "engine"
    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.error_code = code or self.code

    def info(self) -> ErrorInfo:
        """Return the error as data."""
        return ErrorInfo(
            code=self.error_code,
            message=self.message,
            param=self.param,
            blame=self.blame,
            retryable=self.retryable,
            http_status=self.http_status,
        )


class InvalidRequest(WeftError):
    """The request is wrong; a retry gives the same error."""

    code = "invalid_request"
    blame = "client"
    http_status = 400


class ContextLength(InvalidRequest):
    """Prompt plus output do not fit the model's context."""

    code = "context_length_exceeded"


class Unauthorized(WeftError):
    """Missing or wrong API key."""

    code = "invalid_api_key"
    blame = "client"
    http_status = 401


class Forbidden(WeftError):
    """The caller is known, but has no permission for the request."""

    code = "forbidden"
    blame = "client"
    http_status = 403


class NotFound(WeftError):
    """No such route, model or object."""

    code = "not_found"
    blame = "client"
    http_status = 404


class MethodNotAllowed(WeftError):
    """The route exists, the method does not."""

    code = "method_not_allowed"
    blame = "client"
    http_status = 405


class RequestTimeout(WeftError):
    """The client took too long to send the request."""

    code = "request_timeout"
    blame = "client"
    http_status = 408


class TooLarge(WeftError):
    """The body is over the size limit."""

    code = "request_too_large"
    blame = "client"
    http_status = 413


class UnsupportedMedia(WeftError):
    """The route does not accept the content type."""

    code = "unsupported_media_type"
    blame = "client"
    http_status = 415


class Overloaded(WeftError):
    """A queue of the server, or a key's limit, is full. Sent with Retry-After."""

    code = "overloaded"
    blame = "capacity"
    retryable = True
    http_status = 429


class HeaderTooLarge(WeftError):
    """The header block is over the size limit."""

    code = "header_too_large"
    blame = "client"
    http_status = 431


class Cancelled(WeftError):
    """The client has disconnected or cancelled the request."""

    code = "cancelled"
    blame = "client"
    http_status = 499


class EngineDead(WeftError):
    """The engine failed and cannot answer the request."""

    code, http_status = "engine_dead", 500


class RowError(WeftError):
    """The computation of one sequence failed (NaN or infinite logits). Other sequences are not affected."""

    code, http_status = "non_finite_logits", 500


class ImageFailed(WeftError):
    """The vision tower cannot encode one image. Other images of the batch are not affected."""

    code = "image_failed"
    blame = "client"
    http_status = 400


class Unavailable(WeftError):
    """No healthy engine exists, or the server drains. Sent with Retry-After."""

    code = "unavailable"
    blame = "capacity"
    retryable = True
    http_status = 503


class PeerEnded(Unavailable):
    """The process at the other end of a transfer has provably ended."""

    code = "peer_ended"


class TransportFailed(Unavailable):
    """A connection between ranks broke, or a transport could not read memory. Another transport may work."""

    code = "transport_failed"


class NoCommonTransport(WeftError):
    """The two engines of a transfer have no usable transport in common."""

    code, blame = "no_transport", "peer"


class EndedElsewhere(WeftError):
    """The sequence has ended at the other end of a transfer, so the transfer is not needed. Not a failure:
    the API server gets the end from the other instance.
    """

    code = "room_not_needed"
    blame = "client"


class PixelsLost(Unavailable):
    """The memory of an image is gone or cannot be opened. The image must be sent again."""

    code = "pixels_lost"


class NotGreeted(Unavailable):
    """The engine process does not know the connection: the API server must send Hello first. Never sent to a
    client.
    """

    code = "not_greeted"


class RanksLost(Unavailable):
    """Processes of the group were lost while computing the sequence. The sequence may be the cause."""

    code = "group_lost"


class DeadlineExceeded(WeftError):
    """The request's deadline has passed."""

    code = "deadline_exceeded"
    retryable = True
    http_status = 504


class ConfigError(WeftError):
    """A setting, or a pair of settings, is invalid. Raised before anything starts; names the flags."""

    code = "config_error"
    blame = "client"
    http_status = 400


def known_error(error: Exception) -> WeftError:
    """Return ``error`` if already a WeftError, else an EngineDead with the type and text of ``error``."""
    if isinstance(error, WeftError):
        return error
    kind, why = type(error).__name__, str(error)
    return EngineDead(f"{kind}: {why}" if why else f"{kind}, without a reason")


class ReportedError(WeftError):
    """An error reported by another process, with the reported code, blame and status."""

    def __init__(self, reported: ErrorInfo) -> None:
        super().__init__(reported.message, param=reported.param, code=reported.code)
        self._reported = reported

    def info(self) -> ErrorInfo:
        return self._reported
