"""Errors of an image. The place in the request is added later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from weft.common.errors import InvalidRequest

INVALID = "invalid_image"
TOO_LARGE = "image_too_large"
REFUSED = "image_url_refused"
UNREACHABLE = "image_fetch_failed"


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Prefix each InvalidRequest of the block with ``where``, and set ``where`` as the parameter."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error.message}", param=where) from None


class BadMedia(Exception):
    """An unusable image. ``reason`` continues the words "the image " and includes a remedy."""

    noun = "image"

    def __init__(self, reason: str, code: str = INVALID, frame: int = 0) -> None:
        """``reason``: see the class. ``code``: error code for the client. ``frame``: number of the frame
        among several frames in one task of a media worker."""
        super().__init__(reason)
        self.reason = reason
        self.code = code
        self.frame = frame

    def at(self, where: str, param: str | None = None) -> InvalidRequest:
        """Return the error of a request. ``where`` names the part; ``param`` names the parameter (default:
        ``where``).
        """
        return InvalidRequest(f"{where}: the {self.noun} {self.reason}", param=param or where, code=self.code)
