"""What is wrong with an image, apart from where in a request it stands."""

from __future__ import annotations

from weft.common.errors import InvalidRequest

INVALID = "invalid_image"
TOO_LARGE = "image_too_large"
REFUSED = "image_url_refused"
UNREACHABLE = "image_fetch_failed"


class BadMedia(Exception):
    """An image that cannot be used. ``reason`` goes on from "the image ", and says what to change."""

    def __init__(self, reason: str, code: str = INVALID, frame: int = 0) -> None:
        """``frame``: which one it is, of several that are one task of a media worker."""
        super().__init__(reason)
        self.reason = reason
        self.code = code
        self.frame = frame

    def at(self, where: str, param: str | None = None) -> InvalidRequest:
        """As the error of a request; ``where`` names the part, ``param`` the parameter, by default it,
        too.
        """
        return InvalidRequest(f"{where}: the image {self.reason}", param=param or where, code=self.code)
