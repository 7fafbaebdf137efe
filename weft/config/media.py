"""Conversion of images to patches, as configured by the checkpoint: sizes, colours and placeholder tokens.

Torch-free. API servers count tokens, media workers resize, and ranks cut and normalize with these rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from weft.common.errors import InvalidRequest
from weft.config.parts.tiles import TileFacts, tiling
from weft.config.parts.video_frames import VideoFacts

BICUBIC = 3
"""Pillow's number of the filter."""
MOST_ASPECT = 200
"""Maximum ratio of the longer to the shorter side of an image (kind ``area``)."""


class Fit(NamedTuple):
    """Result of fitting an image. Sizes are (height, width) in pixels."""

    size: tuple[int, int]
    """Size after resizing."""
    padded: tuple[int, int]
    """Size after zero padding at the bottom and right to whole tokens. Equals ``size`` for kind ``area``."""
    grid: tuple[int, int, int]
    """Frame groups, rows and columns of patches."""
    tokens: int
    """Number of placeholder tokens."""


class View(NamedTuple):
    """A part of an image that the model reads as an image of its own: a tile, or the whole image."""

    fit: Fit
    """Sizes of the whole image; grid and number of tokens of the view."""
    part: tuple[int, int, int, int] | None = None
    """(top, left, height, width) of the view in pixels of the padded image; None: the view is the image."""
    front: tuple[int, ...] = ()
    """Tokens of text in front of the view, behind the view before."""


class MediaFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Fitting, colours and token count of a model's images."""

    kind: Literal["area", "patches", "longest", "fixed", "budget", "tiles"]
    """Rule for the size of an image:

        area      resize to whole tokens on both sides, with the area within bounds (Qwen)
        patches   shrink until the patches are within bounds, then pad (MoonViT)
        longest   shrink to the longest side, then resize up to whole tokens (Pixtral)
        fixed     resize to one square (Gemma 3)
        budget    resize to the largest area of whole tokens within a number of tokens (Gemma 4)
        tiles     resize and cut into squares (``tiles``); each square is an item (InternVL, Llama 4)
    """
    patch: int
    """Side of a patch in pixels."""
    temporal: int
    """Frames per patch; a single image is repeated. 1 for kind ``patches``."""
    merge: int
    """Side of a token in patches."""
    min_pixels: int = 0
    max_pixels: int = 0
    """Bounds of the area, kind ``area``."""
    max_patches: int = 0
    max_side: int = 0
    """Bounds of the number of patches per image and per side, kind ``patches``."""
    longest: int = 0
    """Bound of a side in pixels, kind ``longest``; the side in pixels, kinds ``fixed`` and ``tiles``."""
    budget: int = 0
    """Bound of the number of tokens, kind ``budget``."""
    tiles: TileFacts | None = None
    """Rule for the number of tiles, kind ``tiles``."""
    resample: int = BICUBIC
    """Pillow's number of the resize filter."""
    rescale: float = 1 / 255
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    """A colour c becomes (c * rescale - mean) / std."""
    bfloat16: bool = False
    """True if the reference computes colours in bfloat16."""
    placeholder: int
    """Token that stands for a part of an image."""
    video: int | None = None
    """Token that stands for a part of a video frame; None if the model takes no videos."""
    shown_video: int | None = None
    """Token that the template writes for a video; None: ``video``."""
    no_videos: str = ""
    """Reason why a model whose reference takes videos takes none here, for errors."""
    start: int | None = None
    end: int | None = None
    """Tokens that the template writes around an image, if named in config.json."""
    shown: int | None = None
    """Token that the template writes for an image; None: ``placeholder``."""
    around: Literal["", "tokens", "lines"] = ""
    """Text that replaces the template's token of an image. "": nothing. tokens: the placeholder between
    ``start`` and ``end``. lines: the same between empty lines.
    """
    row_end: int | None = None
    """Token of text behind each row of an image except the last row, which ``end`` follows. The embedding has
    unused rows for these tokens. None: the tokens of an image have no gaps.
    """
    frames: VideoFacts | None = None
    """Fitting of video frames; None if the model takes no videos."""

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Tokens that stand for images and video frames."""
        both = (self.placeholder,) if self.video is None else (self.placeholder, self.video)
        return tuple(dict.fromkeys(both))

    @property
    def texts(self) -> tuple[int, ...]:
        """Tokens that only images write: placeholders, and the tokens around, in and between images."""
        between = () if self.tiles is None else self.tiles.tokens
        one_by_one = (self.start, self.end, self.row_end, self.shown_video)
        return (*self.placeholders, *(token for token in one_by_one if token is not None), *between)

    @property
    def most_views(self) -> int:
        """Maximum number of items of one image."""
        return 1 if self.tiles is None else self.tiles.most_views

    @property
    def group(self) -> int:
        """Frames of a group of a video."""
        return (self.frames.averaged if self.frames is not None else 0) or self.temporal

    @property
    def most_patches(self) -> int:
        """Number of patches of the largest item, approximately for kind ``longest``."""
        if self.kind == "area":
            return self.most_area // self.patch**2
        if self.kind == "patches":
            frames = self.frames
            return max(self.max_patches, 0 if frames is None else frames.averaged * frames.max_patches)
        return self.most_budget * self.merge**2 or (self.longest // self.patch) ** 2

    @property
    def most_area(self) -> int:
        """Maximum pixels of an image, or of a frame, kind ``area``."""
        video = self.frames
        if video is None:
            return self.max_pixels
        # Where the bound is that of a whole video: a video of one frame group.
        return max(self.max_pixels, video.max_pixels // (1 if video.joined else self.temporal))

    @property
    def most_budget(self) -> int:
        """Bound of the number of tokens of an image or a frame, kind ``budget``."""
        return max(self.budget, 0 if self.frames is None else self.frames.budget)

    def grid_of(self, height: int, width: int) -> Fit:
        """Return the fit of an image of ``height`` x ``width`` pixels.

        Raise InvalidRequest for an image without pixels, or with an extreme aspect ratio.
        """
        if height < 1 or width < 1:
            raise InvalidRequest(f"an image of {width} x {height} pixels is empty")
        return self._fit(_SIZES[self.kind](self, height, width))

    def views_of(self, height: int, width: int) -> list[View]:
        """Return the items of an image of ``height`` x ``width`` pixels, in order: tiles and the whole image,
        or the image alone. Raise InvalidRequest; see ``grid_of``.
        """
        whole = self.grid_of(height, width)
        tiles, side = self.tiles, self.longest
        if tiles is None:
            return [View(whole)]
        cut = tiling(tiles, side, height, width)
        fit = whole._replace(size=cut.size, padded=(cut.rows * side, cut.columns * side))
        front = () if tiles.whole is None else (tiles.whole,)
        if cut.rows * cut.columns == 1:
            return [View(fit, front=front)]
        beside = () if tiles.beside is None else (tiles.beside,)
        below = () if tiles.below is None else (tiles.below,)
        made = [
            View(fit, (row * side, column * side, side, side), beside if column else below if row else ())
            for row in range(cut.rows)
            for column in range(cut.columns)
        ]
        return [*made, View(whole, front=below + front)]

    def tokens_of(self, placeholder: int, count: int, grid: tuple[int, int, int]) -> list[int]:
        """Return the ``count`` tokens of an image or frame group of ``grid`` patches."""
        if self.row_end is None:
            return [placeholder] * count
        columns = grid[2] // self.merge
        row = [*[placeholder] * columns, self.row_end]
        made = row * (grid[1] // self.merge)
        assert self.end is not None
        made[-1] = self.end
        return made

    def video_grid_of(self, video: VideoFacts, frames: int, height: int, width: int) -> Fit:
        """Return the fit of each group in a video of ``frames`` equal frames. ``Fit.grid`` is that of one
        frame group, or of one frame if the tower averages frames.

        Raise InvalidRequest for frames without pixels, or with an extreme aspect ratio.
        """
        if height < 1 or width < 1:
            raise InvalidRequest(f"a frame of {width} x {height} pixels is empty")
        if self.kind != "area":
            bounds = msgspec.structs.replace(self, budget=video.budget, max_patches=video.max_patches)
            return bounds.grid_of(height, width)
        token = self.patch * self.merge
        if video.joined:
            _check_aspect("a frame", height, width)
            most = video.max_pixels
            if video.total_pixels:
                each = video.total_pixels * self.temporal // frames
                most = max(min(most, each), int(video.min_pixels * 1.05))
            return self._fit(self._within(height, width, (1, 1), (video.min_pixels, most)))
        # Frames smaller than one token are enlarged.
        if min(height, width) < token:
            scale = max(token / height, token / width)
            height, width = int(height * scale), int(width * scale)
        _check_aspect("a frame", height, width)
        # A bound per frame, if set, times the number of frames. Each frame gets at least the minimum area.
        most = video.max_pixels
        if video.frame_tokens:
            each = min(video.frame_tokens * token * token, video.max_pixels // frames)
            most = max(each, int(video.min_pixels * 1.05)) * frames
        # The area bounds count whole frame groups.
        rounded = round(frames / self.temporal) * self.temporal
        return self._fit(self._within(height, width, (frames, rounded), (video.min_pixels, most)))

    def _fit(self, size: tuple[int, int]) -> Fit:
        """Return the fit of an image of ``size`` after resizing."""
        token = self.patch * self.merge
        padded = (-(-size[0] // token) * token, -(-size[1] // token) * token)
        rows, columns = padded[0] // self.patch, padded[1] // self.patch
        # merge x merge patches become one token.
        lines = rows // self.merge if self.row_end is not None else 0
        return Fit(size, padded, (1, rows, columns), rows * columns // self.merge**2 + lines)

    def _by_area(self, height: int, width: int) -> tuple[int, int]:
        """Return the size for kind ``area``. Raise InvalidRequest for an extreme aspect ratio."""
        _check_aspect("an image", height, width)
        return self._within(height, width, (1, 1), (self.min_pixels, self.max_pixels))

    def _within(
        self, height: int, width: int, frames: tuple[int, int], bounds: tuple[int, int]
    ) -> tuple[int, int]:
        """Return (height, width) rounded to whole tokens, and scaled if the total area is outside of
        ``bounds`` (minimum, maximum).

        ``frames``: number of frames, as given and rounded to whole groups.
        """
        token = self.patch * self.merge
        count, rounded = frames
        least, most = bounds
        # Round to the nearest, halves to even, as in Python.
        rows, columns = round(height / token) * token, round(width / token) * token
        # Round down when shrinking and up when stretching, so that the area stays within the bounds.
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
        """Return the size for kind ``patches``. Never enlarge an image."""
        patches = max(1.0, height // self.patch) * max(1.0, width // self.patch)
        most = self.max_side * self.patch
        scale = min(1.0, math.sqrt(self.max_patches / patches), most / height, most / width)
        return min(max(1, int(height * scale)), most), min(max(1, int(width * scale)), most)

    def _by_longest(self, height: int, width: int) -> tuple[int, int]:
        """Return the size for kind ``longest``. Raise InvalidRequest for an extreme aspect ratio."""
        _check_aspect("an image", height, width)
        token = self.patch * self.merge
        ratio = max(height, width) / self.longest
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        # Up to whole tokens; a side of no pixels becomes one token.
        return max(1, -(-height // token)) * token, max(1, -(-width // token)) * token

    def _by_budget(self, height: int, width: int) -> tuple[int, int]:
        """Return the size for kind ``budget``. Raise InvalidRequest for an extreme aspect ratio."""
        _check_aspect("an image", height, width)
        token = self.patch * self.merge
        factor = math.sqrt(self.budget * token**2 / (height * width))
        rows, columns = math.floor(factor * height / token), math.floor(factor * width / token)
        if not rows:
            return token, min(width // height, self.budget) * token
        if not columns:
            return min(height // width, self.budget) * token, token
        return rows * token, columns * token


def _check_aspect(what: str, height: int, width: int) -> None:
    """Raise InvalidRequest for an extreme aspect ratio. ``what`` names the image in the message."""
    if max(height, width) > MOST_ASPECT * min(height, width):
        raise InvalidRequest(
            f"{what} of {width} x {height} pixels is too long: the longer side may be at most {MOST_ASPECT} "
            "times the shorter one"
        )


_SIZES: dict[str, Callable[[MediaFacts, int, int], tuple[int, int]]] = {
    "area": MediaFacts._by_area,
    "patches": MediaFacts._by_patches,
    "longest": MediaFacts._by_longest,
    "fixed": lambda facts, height, width: (facts.longest, facts.longest),
    "tiles": lambda facts, height, width: (facts.longest, facts.longest),
    "budget": MediaFacts._by_budget,
}
"""Kind -> (height, width) after resizing."""
