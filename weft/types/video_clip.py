"""The frames chosen from a video file, as data."""

from __future__ import annotations

import msgspec


class VideoClip(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen frames of one video file."""

    key: str
    """Name of the file among the files of the request."""
    numbers: tuple[int, ...]
    """Numbers of the frames in the file, from 0, in ascending order. A number may stand twice."""
    fps: float
    """Chosen frames per second of the file."""
    times: tuple[float, ...]
    """Seconds of each frame: its number divided by the frame rate of the file."""
