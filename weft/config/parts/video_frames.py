"""Choice, groups and text of the frames of a model's videos. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from weft.common.errors import InvalidRequest


class VideoFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Choice and fitting of video frames, and the text of each frame group."""

    min_pixels: int = 0
    max_pixels: int = 0
    """Bounds of the total area of all frames, kind ``area``; of each frame if groups are ``joined``."""
    total_pixels: int = 0
    """Further bound of the total area, for ``joined`` groups: a share for each frame group; 0: none."""
    fps: float = 2.0
    """Assumed frames per second of a video without a stated rate."""
    frame_tokens: int = 0
    """Tokens that bound the area of each frame, kind ``area``; 0: only ``max_pixels`` bounds the area."""
    budget: int = 0
    """Bound of the number of tokens of a frame, kind ``budget``."""
    max_patches: int = 0
    """Bound of the number of patches of a frame, kind ``patches``."""
    averaged: int = 0
    """Maximum frames of a group whose frames the tower averages: the group has the tokens of one frame, and
    its grid counts frames. 0: a group has the frames of one patch.
    """
    min_frames: int = 4
    max_frames: int = 768
    """Bounds of the number of frames that are chosen from a file by rate."""
    multiple: int = 1
    """The number of frames that are chosen from a file is a multiple."""
    rule: Literal["ends", "rounded", "starts", "middles"] = "ends"
    """Frames chosen from a file, at equal distances:

        ends      from the first to the last frame (Qwen3-VL)
        rounded   as ``ends``, with the number of frames rounded to the nearest, not down (Kimi K2.5)
        starts    the first frame of each of equal parts (Gemma 4, Qwen2-VL)
        middles   the middle frame of each of equal parts (InternVL)
    """
    count: int = 0
    """Number of frames that are chosen from a file without a wanted number or rate; 0: chosen by ``fps``."""
    text: Literal["", "seconds", "clock", "numbers", "milliseconds"] = "seconds"
    """Text in front of each frame group: <1.5 seconds> (Qwen3-VL), 00:01 (Gemma 4), Frame1: (InternVL), or
    00:00:01.500 (Kimi K2.5). "": no text between groups; see ``joined``.
    """
    shown: str = ""
    """Text that the template writes for a video, if the text may be no token; "": see ``shown_video``."""
    pace: int = 0
    """Rope positions per second, for ``joined`` groups; 0: each group takes one position."""

    @property
    def joined(self) -> bool:
        """True if the groups of a video follow each other without text, and share rope positions of rows and
        columns (Qwen2-VL)."""
        return not self.text

    def lags(
        self, groups: int, size: int, fps: float | None = None, times: Sequence[float] | None = None
    ) -> list[int | None]:
        """Return ``MediaItem.lag`` of each of ``groups`` groups of ``size`` frames.

        ``fps``: frames per second; None: the rate of ``times`` (seconds of each frame), or the default.
        """
        if not self.joined:
            return [None] * groups
        if not self.pace:
            return [None, *range(1, groups)]
        if fps is None and times is not None:
            # float32, because a difference of decimal seconds may lie just below a whole position.
            return [None, *(int(np.float32(self.pace * (time - times[0]))) for time in times[size::size])]
        # The reference multiplies in float32, and rounds down at the end.
        step = np.float32(self.pace) * np.float32(size / (fps or self.fps))
        return [None, *(int(np.float32(one) * step) for one in range(1, groups))]

    def chosen(
        self, total: int, rate: float, most: int, *, fps: float | None = None, count: int | None = None
    ) -> list[int]:
        """Return the numbers of the frames to show, in ascending order, at equal distances.

        ``total``, ``rate``: number of frames and frames per second of the file. ``most``: maximum frames
        chosen without ``count``. ``fps``: frames per second to choose; None for the processor's. ``count``:
        frames to choose, instead of a rate. A file with fewer frames shows some twice with the rule ``ends``;
        with the other rules the references refuse this, and InvalidRequest is raised.
        """
        named = count
        if count is not None:
            count = round(count / self.multiple) * self.multiple
        elif fps is None and self.count:
            count = min(self.count, total, most)
        elif self.rule == "rounded":
            nearest = round(total * min(fps or self.fps, rate) / rate)
            count = min(max(nearest, self.min_frames), self.max_frames, total, most)
        else:
            wanted = max(total / rate * (fps or self.fps), self.min_frames)
            count = int(min(wanted, self.max_frames, total, most))
            count -= count % self.multiple
        # Halves round to even, as in the reference.
        if self.rule in ("ends", "rounded"):
            step = (total - 1) / max(count - 1, 1)
            return [min(round(number * step), total - 1) for number in range(count)]
        if count > total:
            rounded = "" if count == named else f", rounded to {count}"
            raise InvalidRequest(f"num_frames is {named}{rounded}, and the video has only {total} frames")
        half = self.rule == "middles"
        return [(2 * number + half) * total // (2 * count) for number in range(count)]
