"""The frames chosen from a video file."""

from __future__ import annotations

import msgspec


class VideoClip(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen frames of one video file."""

    key: str
    """Name of the file among the files of the request."""
    numbers: tuple[int, ...]
    """Numbers of the frames in the file, from 0, in ascending order. Numbers may repeat."""
    fps: float
    """Chosen frames per second of the file."""
    times: tuple[float, ...]
    """Seconds of each frame: frame number / frame rate of the file."""
