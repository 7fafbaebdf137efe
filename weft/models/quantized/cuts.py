"""What to read of a quantized matrix's parts for a range of its rows or columns.

A part has one entry for each so many rows and columns of the matrix: a byte two columns, a scale 128 x 128 of
them. Where both ends of a range lie between such entries, the parts' entries in between are the range.
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
    """For the range ``span`` of ``dim``: what to read of each role, () for all; the block that holds then.

    shape: of the matrix [N, K]; shapes: of its parts by role; block: of its scales, where the configuration
    says. None where the range cannot be read by itself, or the parts do not fit (which shows when all are).
    """
    if len(shape) != 2 or "blocks" in shapes:
        return None
    across = "qweight" in shapes  # parts have the matrix's columns first
    grid = None if across else _grid(shape, shapes, block)
    found: dict[str, Slices] = {}
    for role, sizes in shapes.items():
        if role == "shape" or _one(sizes):
            place: Slices | None = ()
        elif role == "groups":
            place = () if dim == 0 else (slice(*span),) if across and sizes == (shape[1],) else None
        elif across and dim == 1 and role in ("scales", "qzeros") and not _one(shapes.get("groups", ())):
            place = ()  # by group, in any order
        elif role == "scale" and dim == 1 and sizes == (shape[0], 1) and shapes.get(PLAIN) != shape:
            place = None  # numbers of 4 bits come in groups of some sizes alone
        elif grid is not None and role == "scale":
            place = _along(dim, _entries(span, grid[dim], shape[dim]))
        else:
            place = _even(shape, sizes, dim, span, across)
        if place is None:
            return None
        found[role] = place
    return found, grid or block


def _one(sizes: Shape) -> bool:
    """Whether a part is one number, or nothing."""
    return all(size <= 1 for size in sizes)


def _grid(shape: Shape, shapes: Mapping[str, Shape], block: tuple[int, int] | None) -> tuple[int, int] | None:
    """(rows, columns) of a block of numbers of 8 bits that have a scale each; None for other forms."""
    scale = shapes.get("scale")
    if scale is None or shapes.get(PLAIN) != shape or len(scale) != 2 or scale == (shape[0], 1):
        return None
    try:
        return block_of(shape, scale, block)
    except Misfit:
        return None


def _entries(span: tuple[int, int], each: int, size: int) -> tuple[int, int] | None:
    """The entries, of ``each`` rows, that are the range ``span`` of ``size``; None where it cuts one."""
    begin, end = span
    if begin % each or (end % each and end != size):
        return None
    return begin // each, -(-end // each)


def _even(shape: Shape, sizes: Shape, dim: int, span: tuple[int, int], across: bool) -> Slices | None:
    """Of a part whose entries have equally many rows, and columns, each."""
    if len(sizes) == 1:  # one number a row
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
