"""Make small video files with PyAV."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

av = pytest.importorskip("av", reason="video files need PyAV (weft[video])")

CODECS = {
    "h264": ("libx264", "mp4", "yuv420p"),
    "hevc": ("libx265", "mp4", "yuv420p"),
    "mpeg4": ("mpeg4", "mov", "yuv420p"),
    "vp8": ("libvpx", "webm", "yuv420p"),
    "vp9": ("libvpx-vp9", "webm", "yuv420p"),
    "mkv": ("libx264", "matroska", "yuv420p"),
    "gif": ("gif", "gif", "rgb8"),
}
"""Name -> (encoder, container, pixel format)."""


def pictures(count: int, size: tuple[int, int] = (64, 48), seed: int = 1) -> list[np.ndarray]:
    """Return ``count`` smooth pictures of ``size`` (width, height), each uint8 [height, width, 3]."""
    rows, columns = np.mgrid[: size[1], : size[0]]
    made = []
    for number in range(count):
        waves = [np.sin(rows / 7 + columns / 9 + seed + number / 3 + band) for band in range(3)]
        made.append((128 + 100 * np.stack(waves, axis=-1)).astype(np.uint8))
    return made


def film(
    frames: int | Sequence[np.ndarray] = 12,
    codec: str = "h264",
    *,
    size: tuple[int, int] = (64, 48),
    rate: int | Fraction = 6,
    times: Sequence[int] | None = None,
    turn: int = 0,
    audio: bool = False,
    **options: str,
) -> bytes:
    """Return a video file. ``times``: number of the tick of each frame, for a variable rate. ``turn``: turn
    of the display matrix in degrees. ``audio``: with a silent track."""
    encoder, container, form = CODECS[codec]
    given = pictures(frames, size) if isinstance(frames, int) else frames
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(encoder, rate=rate, options=options)
        stream.height, stream.width = given[0].shape[:2]
        stream.pix_fmt = form
        if turn:
            stream.set_display_rotation(turn)
        sound = output.add_stream("aac" if container == "mp4" else "libopus", rate=48000) if audio else None
        for number, picture in enumerate(given):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[number], 1 / Fraction(rate)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
        if sound is not None:
            add_sound(output, sound)
    return file.getvalue()


def sound_file() -> bytes:
    """Return an MP4 file with audio alone."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        add_sound(output, output.add_stream("aac", rate=48000))
    return file.getvalue()


def add_sound(output: Any, stream: Any) -> None:
    """Write 20 ms of silence."""
    samples = av.AudioFrame.from_ndarray(np.zeros((2, 960), np.float32), format="fltp", layout="stereo")
    samples.sample_rate = 48000
    output.mux(stream.encode(samples))
    output.mux(stream.encode())
