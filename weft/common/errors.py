"""The error tree. Every failure that reaches a client or another process is one of these.

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
    """An error as data: what a process tells another, and what the front shows a client."""

    code: str
    message: str
    param: str | None = None
    blame: Blame = "engine"
    retryable: bool = False
    http_status: int = 500


class WeftError(Exception):
    """Base of all errors of the engine.

    ``message`` names what to change and holds no path, address, repr or traceback.
    ``param`` is the request parameter or flag at fault, where there is one.
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
        """This error as data."""
        return ErrorInfo(
            code=self.error_code,
            message=self.message,
            param=self.param,
            blame=self.blame,
            retryable=self.retryable,
            http_status=self.http_status,
        )


class InvalidRequest(WeftError):
    """The request is wrong as it stands; sending it again changes nothing."""

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
    """The caller is known but may not do this."""

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
    """The client took too long to send its request."""

    code = "request_timeout"
    blame = "client"
    http_status = 408


class TooLarge(WeftError):
    """The body is over the size limit."""

    code = "request_too_large"
    blame = "client"
    http_status = 413


class UnsupportedMedia(WeftError):
    """The content type is not one this route takes."""

    code = "unsupported_media_type"
    blame = "client"
    http_status = 415


class Overloaded(WeftError):
    """This server's queue, or a key's limit, is full. Sent with Retry-After."""

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
    """The client went away."""

    code = "cancelled"
    blame = "client"
    http_status = 499


class EngineDead(WeftError):
    """The engine failed and can't answer this request."""

    code, http_status = "engine_dead", 500


class RowError(WeftError):
    """One sequence's computation failed (NaN or infinite logits); the others are untouched."""

    code, http_status = "non_finite_logits", 500


class ImageFailed(WeftError):
    """The vision tower cannot encode one image; others that were encoded with it are untouched."""

    code = "image_failed"
    blame = "client"
    http_status = 400


class Unavailable(WeftError):
    """No healthy head exists, or the server drains. Sent with Retry-After."""

    code = "unavailable"
    blame = "capacity"
    retryable = True
    http_status = 503


class PeerEnded(Unavailable):
    """The process at the other end of a transfer has ended, which is proven."""

    code = "peer_ended"


class EndedElsewhere(WeftError):
    """The sequence has reached its end at the other end of a transfer, so the transfer is not needed: no
    failure for anybody. The front gets that end from the other instance."""

    code = "room_not_needed"
    blame = "client"


class PixelsLost(Unavailable):
    """The memory that has an image is gone, or cannot be opened: the image has to be sent again."""

    code = "pixels_lost"


class NotGreeted(Unavailable):
    """The head does not know this connection: its front has to say hello first. No client reads this."""

    code = "not_greeted"


class RanksLost(Unavailable):
    """Processes of the group were lost while it computed the sequence, which may be why."""

    code = "group_lost"


class DeadlineExceeded(WeftError):
    """The request's deadline passed."""

    code = "deadline_exceeded"
    retryable = True
    http_status = 504


class ConfigError(WeftError):
    """A setting, or a pair of settings, that cannot work. Raised before anything starts; names the flags."""

    code = "config_error"
    blame = "client"
    http_status = 400


def known_error(error: Exception) -> WeftError:
    """Return ``error`` if it is one of these, or an EngineDead that names its type and says what it says."""
    if isinstance(error, WeftError):
        return error
    kind, why = type(error).__name__, str(error)
    return EngineDead(f"{kind}: {why}" if why else f"{kind}, without a reason")


class ReportedError(WeftError):
    """An error that another process reported, with its own code, blame and status."""

    def __init__(self, reported: ErrorInfo) -> None:
        super().__init__(reported.message, param=reported.param, code=reported.code)
        self._reported = reported

    def info(self) -> ErrorInfo:
        return self._reported
