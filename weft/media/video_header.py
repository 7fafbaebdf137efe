"""The header of a video file: container, size, number of frames, frame rate.

The containers are an allow-list. The first bytes decide, and a declared type is ignored.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from weft.media.headers import ImageHeader
from weft.media.media_errors import INVALID, REFUSED, TOO_LARGE, UNREACHABLE, BadMedia

INVALID_VIDEO = "invalid_video"
VIDEO_TOO_LARGE = "video_too_large"
_CODES = {
    INVALID: INVALID_VIDEO,
    TOO_LARGE: VIDEO_TOO_LARGE,
    REFUSED: "video_url_refused",
    UNREACHABLE: "video_fetch_failed",
}
LEAST_RATE, MOST_RATE = 1e-3, 1e3
"""Accepted frames per second."""
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot")


class BadVideo(BadMedia):
    """An unusable video file. ``reason`` continues the words "the video "."""

    noun = "video"

    def __init__(self, reason: str, code: str = INVALID_VIDEO) -> None:
        super().__init__(reason, code)


def of_video(error: BadMedia) -> BadVideo:
    """Return the error of a file or URL as the error of a video."""
    return BadVideo(error.reason, _CODES.get(error.code, error.code))


class VideoHeader(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The header of a video file."""

    width: int
    """Stored width in pixels, before ``turn``."""
    height: int
    frames: int
    """Number of frames."""
    rate: float
    """Frames per second, on average."""
    turn: int = 0
    """Counterclockwise rotation from stored to displayed frames in degrees: 0, 90, 180 or 270."""

    @property
    def work(self) -> int:
        """Pixels of one frame, at least 1."""
        return max(self.width * self.height, 1)

    @property
    def shown(self) -> tuple[int, int]:
        """(height, width) of a displayed frame."""
        return (self.width, self.height) if self.turn in (90, 270) else (self.height, self.width)

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.frames / self.rate


Header: TypeAlias = ImageHeader | VideoHeader


def container_of(data: bytes | memoryview) -> str:
    """Return FFmpeg's name of the container of a file: ``mov`` (MP4 too), ``matroska`` (WebM too) or ``gif``.

    Raises BadVideo for any other file, also for playlists, because playlists refer to other files.
    """
    start = bytes(data[:16])
    if start[4:8] in _BOXES:
        return "mov"
    if start.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    if start[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    raise BadVideo("has an unsupported format; send MP4, MOV, WebM, MKV or GIF")
