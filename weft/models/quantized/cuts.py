"""Slices of a quantized matrix's parts for a range of rows or columns.

One entry of a part covers several rows and columns of the matrix: a byte covers two columns, a scale may
cover 128 x 128. If both ends of a range lie between entries, the slice of entries describes the range.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from weft.models.quantized.scales import Misfit, block_of
from weft.models.quantized.sources import PLAIN

Shape: TypeAlias = tuple[int, ...]
Slices: TypeAlias = tuple[slice, ...]


def cut(
    shape: Shape,
    shapes: Mapping[str, Shape],
    dim: int,
    span: tuple[int, int],
    block: tuple[int, int] | None,
) -> tuple[dict[str, Slices], tuple[int, int] | None] | None:
    """Return the slices to read for the range ``span`` of ``dim``, by role (() for all), and the block of the
    cut.

    shape: shape [N, K] of the matrix; shapes: shapes of its parts by role; block: block of its scales, if
    configured. None if the range cannot be read alone, or if parts do not fit (reading all parts reports the
    error).
    """
    if len(shape) != 2 or "blocks" in shapes:
        return None
    across = "qweight" in shapes  # parts have the columns of the matrix first
    grid = None if across else _grid(shape, shapes, block)
    found: dict[str, Slices] = {}
    for role, sizes in shapes.items():
        # Every branch finds the slice of one role; None in any role means that the range cannot be cut.
        if role == "shape" or _one(sizes):
            place: Slices | None = ()
        elif role == "groups":
            place = () if dim == 0 else (slice(*span),) if across and sizes == (shape[1],) else None
        elif across and dim == 1 and role in ("scales", "qzeros") and not _one(shapes.get("groups", ())):
            place = ()  # groups may be in any order, so keep all
        elif role == "scale" and dim == 1 and sizes == (shape[0], 1) and shapes.get(PLAIN) != shape:
            place = None  # 4-bit numbers: only some group sizes are allowed
        elif grid is not None and role == "scale":
            place = _along(dim, _entries(span, grid[dim], shape[dim]))
        else:
            place = _even(shape, sizes, dim, span, across)
        if place is None:
            return None
        found[role] = place
    return found, grid or block


def _one(sizes: Shape) -> bool:
    """Return True for a part of one element or none."""
    return all(size <= 1 for size in sizes)


def _grid(shape: Shape, shapes: Mapping[str, Shape], block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return (rows, columns) of a block of 8-bit numbers with a common scale; None for other forms."""
    scale = shapes.get("scale")
    if scale is None or shapes.get(PLAIN) != shape or len(scale) != 2 or scale == (shape[0], 1):
        return None
    try:
        return block_of(shape, scale, block)
    except Misfit:
        return None


def _entries(span: tuple[int, int], each: int, size: int) -> tuple[int, int] | None:
    """Return the range of entries for the rows ``span``, ``each`` rows per entry; None if ``span`` cuts an
    entry."""
    begin, end = span
    if begin % each or (end % each and end != size):
        return None
    return begin // each, -(-end // each)


def _even(shape: Shape, sizes: Shape, dim: int, span: tuple[int, int], across: bool) -> Slices | None:
    """Return the slices of a part with equally many rows, and columns, per entry; () for the whole part.

    Return None if the range cannot be cut.
    """
    if len(sizes) == 1:  # one number per row
        if sizes[0] != shape[0]:
            return None
        return (slice(*span),) if dim == 0 else ()
    own = 1 - dim if across else dim
    count = sizes[own]
    if len(sizes) != 2 or not count or shape[dim] % count:
        return None
    if count == 1:
        return ()
    return _along(own, _entries(span, shape[dim] // count, shape[dim]))


def _along(dim: int, entries: tuple[int, int] | None) -> Slices | None:
    return None if entries is None else (*(slice(None),) * dim, slice(*entries))
