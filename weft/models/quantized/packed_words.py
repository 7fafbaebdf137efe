"""Small integers packed in 32-bit words, and scaling of such integers by groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.models.quantized.scales import Misfit

Tensor = torch.Tensor

BITS = (2, 4, 8)


def bits_of(values: int, words: int) -> int:
    """Return the bits per value if ``words`` words hold ``values`` values. Raises Misfit."""
    for bits in BITS:
        if words * 32 == values * bits:
            return bits
    raise Misfit(f"{words} words do not hold {values} values of {', '.join(map(str, BITS))} bits")


def unpack(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Return the uint8 values of int32 ``words`` [A, B], 32 / bits times as many along ``dim``.

    Value i of word w, counted from the lowest bits, becomes number ``w * (32 / bits) + order[i]``; default
    order: 0, 1, 2, .. Raises Misfit for words of another type or shape.
    """
    if words.dtype != torch.int32 or words.dim() != 2:
        raise Misfit(f"packed values must be a matrix of int32, not {words.dtype} {list(words.shape)}")
    count = 32 // bits
    shape = list(words.shape)
    shape.insert(dim + 1, count)
    made = torch.empty(shape, dtype=torch.uint8)
    for i, place in enumerate(order or range(count)):
        # The shift is arithmetic; the mask removes the copies of the sign.
        made.select(dim + 1, place).copy_((words >> (i * bits)) & ((1 << bits) - 1))
    return made.flatten(dim, dim + 1)


def scale_groups(values: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor) -> Tensor:
    """Compute ``(values - zeros) * scales`` for the group of each row, in place.

    Return ``values``. values: [K, N] in a wide dtype; scales: [G, N] and zeros: [G, N] or None, in the same
    dtype; groups: group of each row, integers [K]. Raises Misfit, before any change.
    """
    if scales.dim() != 2 or scales.shape[1] != values.shape[1] or groups.shape != values.shape[:1]:
        raise Misfit(f"scales of {list(scales.shape)} do not fit {list(values.shape)} values")
    if zeros is not None and zeros.shape != scales.shape:
        raise Misfit(f"zero points of {list(zeros.shape)} do not fit scales of {list(scales.shape)}")
    if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < len(scales):
        raise Misfit(f"there are {len(scales)} groups, but a row refers to another group")
    # One group at a time: temporary memory stays small for any order of rows.
    for group in range(len(scales)):
        rows = (groups == group).nonzero().squeeze(1)
        part = values[rows]
        if zeros is not None:
            part -= zeros[group]
        values[rows] = part.mul_(scales[group])
    return values


def even_groups(rows: int, count: int) -> Tensor:
    """Return the group of each of ``rows`` rows in ``count`` even groups. Raises Misfit."""
    if count < 1 or rows % count:
        raise Misfit(f"{rows} inputs cannot be divided into {count} equal groups")
    return torch.arange(rows) // (rows // count)
