"""Tiles of an image: squares of the resized image, each of which a model reads as an image of its own.

    ratio    as many tiles as come nearest to the shape of the image, which is stretched (InternVL)
    canvas   the tiles that need least scaling without distortion; the rest of their area is black (Llama 4)

A small version of the whole image, one more tile, follows unless one tile shows the whole image.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec


class TileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Rule for the tiles of an image, and the text between tiles. Side and colours are in ``MediaFacts``."""

    rule: Literal["ratio", "canvas"]
    least: int = 1
    most: int
    """Bounds of the number of tiles, without the small version of the whole image."""
    grow: bool = False
    """True to enlarge images to the largest canvas (rule ``canvas``)."""
    beside: int | None = None
    """Token of text between two tiles of a row."""
    below: int | None = None
    """Token of text behind each row of tiles."""
    whole: int | None = None
    """Token of text in front of the small version, or of the only tile."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of text between tiles."""
        return tuple(token for token in (self.beside, self.below, self.whole) if token is not None)

    @property
    def most_views(self) -> int:
        """Maximum number of tiles, with the small version of the whole image."""
        return self.most + (self.most > 1)


class Tiling(NamedTuple):
    """Division of an image."""

    rows: int
    columns: int
    size: tuple[int, int]
    """(height, width) of the resized image, within ``rows`` x ``columns`` tiles."""


def tiling(tiles: TileFacts, side: int, height: int, width: int) -> Tiling:
    """Return the division of an image of ``height`` x ``width`` pixels into tiles of ``side`` pixels.

    The cost is bounded by ``tiles.most``, whatever the size of the image.
    """
    return (
        _by_ratio(tiles, side, height, width)
        if tiles.rule == "ratio"
        else _canvas(tiles, side, height, width)
    )


def _by_ratio(tiles: TileFacts, side: int, height: int, width: int) -> Tiling:
    """Return the division with the nearest ratio of the sides; see ``tiling``."""
    ratio = width / height
    rows, columns, least = 1, 1, float("inf")
    for one_rows, one_columns in _shapes(tiles.least, tiles.most):
        apart = abs(ratio - one_columns / one_rows)
        # Of equal ratios the one with more tiles is better, while the image has half of their pixels.
        large = height * width > 0.5 * side * side * one_rows * one_columns
        if apart < least or (apart == least and large):
            rows, columns, least = one_rows, one_columns, apart
    return Tiling(rows, columns, (rows * side, columns * side))


@lru_cache(maxsize=8)
def _shapes(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """Return (rows, columns) of ``least`` to ``most`` tiles: fewest tiles first, then narrowest first."""
    shapes = [
        (rows, count // rows)
        for count in range(least, most + 1)
        for rows in range(count, 0, -1)
        if not count % rows
    ]
    return tuple(shapes)


def _canvas(tiles: TileFacts, side: int, height: int, width: int) -> Tiling:
    """Return the division that needs the least scaling; see ``tiling``.

    The reference computes scales in float32. So this function rounds in the same places.
    """
    scales = {
        shape: min(_single(shape[0] * side / height), _single(shape[1] * side / width))
        for shape in _shapes(1, tiles.most)
    }
    larger = [scale for scale in scales.values() if scale >= 1]
    # The smallest enlargement (or the largest, to fill the canvas), else the largest reduction.
    best = (max if tiles.grow else min)(larger) if larger else max(scales.values())
    rows, columns = min((s for s, scale in scales.items() if scale == best), key=lambda s: s[0] * s[1])
    canvas = rows * side, columns * side
    # An image smaller than a tile may grow to the side of a tile, and a larger image does not grow.
    room = canvas if tiles.grow else (min(max(height, side), canvas[0]), min(max(width, side), canvas[1]))
    # The reference has tensors of float32 where the canvas is the bound, and Python's numbers elsewhere.
    narrow = tiles.grow or max(height, side) > canvas[0], tiles.grow or max(width, side) > canvas[1]
    down, across = (
        _single(most / given) if is_narrow else most / given
        for most, given, is_narrow in zip(room, (height, width), narrow, strict=True)
    )
    narrower = _single(across) < _single(down) if any(narrow) else across < down
    if narrower:
        size = min(_scaled(height, across, narrow[1]), room[0]), room[1]
    else:
        size = room[0], min(_scaled(width, down, narrow[0]), room[1])
    return Tiling(rows, columns, (max(size[0], 1), max(size[1], 1)))


def _scaled(length: int, scale: float, narrow: bool) -> int:
    """Return ``length`` times ``scale``, rounded down; the product is rounded to float32 if ``narrow``."""
    return int(_single(length * scale) if narrow else length * scale)


def _single(value: float) -> float:
    """Return ``value`` rounded to float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
