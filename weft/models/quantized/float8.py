"""FP8: E4M3 or E5M2 values, with one scale per matrix, per row, or per block.

The scale multiplies under both names, ``weight_scale`` and ``weight_scale_inv``. The shape of the scale
selects matrix, row or block, so a checkpoint may mix the three.

Source: Micikevicius et al. 2022, arXiv 2209.05433; blocks of 128 x 128: DeepSeek-V3, arXiv 2412.19437.
"""

from __future__ import annotations

import torch

from weft.models.quantized.scales import Misfit, as_numbers, block_of, checked_zeros, multiply_blocks

Tensor = torch.Tensor

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def kind(values: Tensor, scale: Tensor, block: tuple[int, int] | None = None) -> str:
    """Return the unit of ``scale`` in words: ``per tensor``, ``per channel``, ``blocks of 128 x 128``. May
    raise Misfit."""
    if scale.numel() == 1:
        return "per tensor"
    if _per_row(values, scale):
        return "per channel"
    if values.dim() != 2 or scale.dim() != 2:
        raise Misfit(f"scales of {list(scale.shape)} do not fit a weight of {list(values.shape)}")
    rows, columns = block_of(values.shape, scale.shape, block)
    return f"blocks of {rows} x {columns}"


def dequantize(
    values: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    block: tuple[int, int] | None = None,
    zeros: Tensor | None = None,
) -> Tensor:
    """Return the matrix [N, K] in ``dtype`` (wide): ``(value - zero) * scale``.

    values: [N, K], FP8 or int8. scale: one element, [N], [N, 1], or a grid of blocks; any float type or E8M0.
    block: the configured block of the grid, if any. zeros: zero points of int8, one per scale, or None.
    Raises Misfit.
    """
    what = kind(values, scale, block)
    made = values.to(dtype)
    numbers = as_numbers(scale, dtype)
    known = checked_zeros(zeros, values, scale)
    known = None if known is None else known.to(dtype)
    if what not in ("per tensor", "per channel"):
        return multiply_blocks(made, numbers, *block_of(made.shape, scale.shape, block), known)
    # One number, or one number per row.
    shape = () if what == "per tensor" else (-1, *[1] * (made.dim() - 1))
    if known is not None:
        made.sub_(known.reshape(shape))
    return made.mul_(numbers.reshape(shape))


def _per_row(values: Tensor, scale: Tensor) -> bool:
    return scale.shape in ((values.shape[0],), (values.shape[0], 1))
