"""Scales: powers of two in one byte, and one scale per block of a matrix."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


class Misfit(ValueError):
    """Error for parts of a weight that do not fit each other. The message gives the reason without the
    weight's name."""


def as_numbers(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``scale`` in ``dtype``, a wide dtype. Bytes (E8M0) are exponents: 2^(byte - 127); 255 is NaN.

    Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.4.
    """
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    if scale.dtype != torch.uint8:
        return scale.to(dtype)
    powers = torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), float("nan")], dtype=torch.float64)
    return powers.to(dtype)[scale.int()]


def multiply_blocks(
    values: Tensor, scale: Tensor, rows: int, columns: int, zeros: Tensor | None = None
) -> Tensor:
    """Multiply each block of ``rows`` x ``columns`` of ``values`` [N, K] by its own scale, in place.

    scale: [ceil(N / rows), ceil(K / columns)] in the dtype of values; the last blocks may be smaller. zeros:
    as ``scale``, subtracted before the product; None for zero points of 0. Returns ``values``.
    """
    n, k = values.shape
    given = [scale] if zeros is None else [zeros, scale]
    grids = [grid.repeat_interleave(rows, dim=0)[:n] if rows > 1 else grid for grid in given]
    whole = k // columns
    if whole:
        inner = values[:, : whole * columns].unflatten(1, (whole, columns))
        _scaled(inner, *(grid[:, :whole, None] for grid in grids))
    if k % columns:
        _scaled(values[:, whole * columns :], *(grid[:, whole:] for grid in grids))
    return values


def _scaled(values: Tensor, *grids: Tensor) -> None:
    """Subtract the zero points, if there are two grids, and multiply by the scales, in place."""
    if len(grids) > 1:
        values.sub_(grids[0])
    values.mul_(grids[-1])


def checked_zeros(zeros: Tensor | None, values: Tensor, scale: Tensor) -> Tensor | None:
    """Return the zero points of 8-bit ``values`` in the shape of ``scale``; None if all are 0.

    Tools write zero points for symmetric formats, too. Raises Misfit for zero points of floats, and for
    another number of zero points than scales.
    """
    if zeros is None or not zeros.float().count_nonzero():
        return None
    if values.dtype != torch.int8:
        raise Misfit(f"zero points of {values.dtype} are not supported")
    if zeros.numel() != scale.numel():
        raise Misfit(f"zero points of {list(zeros.shape)} do not fit scales of {list(scale.shape)}")
    return zeros.reshape(scale.shape)


def block_of(
    shape: tuple[int, ...], scales: tuple[int, ...], said: tuple[int, int] | None
) -> tuple[int, int]:
    """Return (rows, columns) of a block of a matrix of ``shape`` with a grid of ``scales``.

    Tries ``said`` (the configured block), then 128 x 128 (the last blocks may be smaller), then an even
    division. Raises Misfit if no block fits.
    """
    for block in (said, (128, 128)):
        if block and all(-(-n // b) == g for n, b, g in zip(shape, block, scales, strict=True)):
            return block
    if any(g == 0 or n % g for n, g in zip(shape, scales, strict=True)):
        raise Misfit(f"a grid of {list(scales)} scales does not fit a matrix of {list(shape)}")
    return shape[0] // scales[0], shape[1] // scales[1]
