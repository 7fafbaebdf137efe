"""How images become patches, as a checkpoint says it: sizes, colours, and the tokens that stand for them.

Torch-free: the front counts tokens with it, media workers resize with it, ranks cut and normalize with it.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec

from weft.common.errors import InvalidRequest

BICUBIC = 3
"""Pillow's number of the filter."""
MOST_ASPECT = 200
"""The longer side of an image is at most so many times the shorter one (kind ``area``)."""


class Fit(NamedTuple):
    """What an image of some size becomes. Sizes are (height, width) in pixels."""

    size: tuple[int, int]
    """To which it is resized."""
    padded: tuple[int, int]
    """To which zeros are added behind its last row and column: whole tokens. ``size`` of kind ``area``."""
    grid: tuple[int, int, int]
    """Frame groups, rows and columns of patches."""
    tokens: int
    """How many stand for it."""


class VideoFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How the frames of a video are fitted, where that differs from images (kind ``area``)."""

    min_pixels: int
    max_pixels: int
    """Bounds of the area of all frames together."""
    fps: float = 2.0
    """Frames a second of a video that does not say it: what the model is used to."""
    frame_tokens: int = 0
    """Tokens that bound the area of each frame; 0: nothing but ``max_pixels`` does."""


class MediaFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How the images of a model are fitted, coloured and counted."""

    kind: Literal["area", "patches"]
    """area      resized so that the area is within bounds and both sides are whole tokens (Qwen)
    patches   made smaller until the patches are within bounds, then padded (MoonViT)"""
    patch: int
    """Pixels of a patch's side."""
    temporal: int
    """Frames of a patch; a single image is repeated. 1 for kind ``patches``."""
    merge: int
    """Patches along a token's side."""
    min_pixels: int = 0
    max_pixels: int = 0
    """Bounds of the area, kind ``area``."""
    max_patches: int = 0
    max_side: int = 0
    """Bounds of the patches of an image and along one side, kind ``patches``."""
    resample: int = BICUBIC
    """Pillow's number of the filter that resizes."""
    rescale: float = 1 / 255
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    """A colour c becomes (c * rescale - mean) / std."""
    placeholder: int
    """The token that stands for (a part of) an image."""
    video: int | None = None
    """Likewise of a video."""
    start: int | None = None
    end: int | None = None
    """What the template writes around an image, where config.json names it."""
    frames: VideoFacts | None = None
    """None where the model takes no videos."""

    @property
    def placeholders(self) -> tuple[int, ...]:
        """The tokens that stand for images, and for frames of videos."""
        return (self.placeholder,) if self.video is None else (self.placeholder, self.video)

    def grid_of(self, height: int, width: int) -> Fit:
        """What an image of ``height`` x ``width`` pixels becomes.

        Raises InvalidRequest for one without pixels, or too long for its width.
        """
        if height < 1 or width < 1:
            raise InvalidRequest(f"an image of {width} x {height} pixels has none")
        size = self._by_area(height, width) if self.kind == "area" else self._by_patches(height, width)
        return self._fit(size)

    def video_grid_of(self, video: VideoFacts, frames: int, height: int, width: int) -> Fit:
        """What each group of ``temporal`` frames becomes, of a video with ``frames`` frames of one size.

        Raises InvalidRequest for frames without pixels, or too long for their width.
        """
        if height < 1 or width < 1:
            raise InvalidRequest(f"a frame of {width} x {height} pixels has none")
        token = self.patch * self.merge
        if min(height, width) < token:
            scale = max(token / height, token / width)
            height, width = int(height * scale), int(width * scale)
        _check_aspect("a frame", height, width)
        most = video.max_pixels
        if video.frame_tokens:
            each = min(video.frame_tokens * token * token, video.max_pixels // frames)
            most = max(each, int(video.min_pixels * 1.05)) * frames
        rounded = round(frames / self.temporal) * self.temporal
        return self._fit(self._within(height, width, (frames, rounded), (video.min_pixels, most)))

    def _fit(self, size: tuple[int, int]) -> Fit:
        token = self.patch * self.merge
        padded = (-(-size[0] // token) * token, -(-size[1] // token) * token)
        rows, columns = padded[0] // self.patch, padded[1] // self.patch
        return Fit(size, padded, (1, rows, columns), rows * columns // self.merge**2)

    def _by_area(self, height: int, width: int) -> tuple[int, int]:
        _check_aspect("an image", height, width)
        return self._within(height, width, (1, 1), (self.min_pixels, self.max_pixels))

    def _within(
        self, height: int, width: int, frames: tuple[int, int], bounds: tuple[int, int]
    ) -> tuple[int, int]:
        """Rounded to whole tokens, and scaled where the area of all ``frames`` (as they are, and in whole
        groups) is outside of ``bounds``."""
        token = self.patch * self.merge
        count, rounded = frames
        least, most = bounds
        # To the nearest, halves to the even one, as Python rounds.
        rows, columns = round(height / token) * token, round(width / token) * token
        if rounded * rows * columns > most:
            shrink = math.sqrt((count * height * width) / most)
            rows = max(token, math.floor(height / shrink / token) * token)
            columns = max(token, math.floor(width / shrink / token) * token)
        elif rounded * rows * columns < least:
            stretch = math.sqrt(least / (count * height * width))
            rows = math.ceil(height * stretch / token) * token
            columns = math.ceil(width * stretch / token) * token
        return rows, columns

    def _by_patches(self, height: int, width: int) -> tuple[int, int]:
        """Never larger than it is."""
        patches = max(1.0, height // self.patch) * max(1.0, width // self.patch)
        most = self.max_side * self.patch
        scale = min(1.0, math.sqrt(self.max_patches / patches), most / height, most / width)
        return min(max(1, int(height * scale)), most), min(max(1, int(width * scale)), most)


def _check_aspect(what: str, height: int, width: int) -> None:
    if max(height, width) > MOST_ASPECT * min(height, width):
        raise InvalidRequest(
            f"{what} of {width} x {height} pixels is too long: the longer side may be at most {MOST_ASPECT} "
            "times the shorter one"
        )
