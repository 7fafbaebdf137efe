"""FP4: two E2M1 values per byte, the first in the low bits, with a scale per 16 or 32 inputs.

NVFP4   E4M3 scales per 16 inputs, and one float32 for the matrix: ``weight_scale_2`` multiplies (ModelOpt),
        ``weight_global_scale`` divides (compressed-tensors)
MXFP4   E8M0 scales per 32 inputs. GPT-OSS publishes experts as blocks of 16 bytes, see ``from_blocks``.

Source: OCP Microscaling Formats (MX) Specification 1.0; NVFP4: NVIDIA, arXiv 2509.25149.
"""

from __future__ import annotations

import torch

from weft.models.quantized.scales import Misfit, as_numbers, multiply_blocks
from weft.ops.coded import E2M1

Tensor = torch.Tensor

_GROUPS = (16, 32)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return E2M1 values in ``dtype``: bytes [..., n] (uint8 or int8) to [..., 2 n]."""
    table = torch.tensor(E2M1, dtype=dtype)
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], dim=1)  # [256, 2]: low, high
    codes = packed.contiguous().view(torch.uint8)
    return pairs.index_select(0, codes.flatten().int()).view(*packed.shape[:-1], 2 * packed.shape[-1])


def dequantize(
    packed: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    factor: Tensor | None = None,
    divisor: Tensor | None = None,
) -> Tensor:
    """Return the matrix [N, K] in ``dtype`` (wide).

    packed: bytes [N, K / 2]; scale: [N, K / 16] or [N, K / 32], E4M3, E8M0 (also as uint8) or a float type;
    factor, divisor: one element for the whole matrix, or None. Raises Misfit.
    """
    values = unpack(packed, dtype)
    group = values.shape[1] // scale.shape[-1] if scale.dim() == 2 and scale.shape[1] else 0
    if group not in _GROUPS or scale.shape != (values.shape[0], values.shape[1] // group):
        raise Misfit(
            f"scales of {list(scale.shape)} do not fit {list(values.shape)} values of 4 bits in groups of "
            f"{' or '.join(map(str, _GROUPS))}"
        )
    numbers = as_numbers(scale, dtype)
    if factor is not None:
        numbers = numbers * _one(factor, dtype)
    if divisor is not None:
        numbers = numbers / _one(divisor, dtype)
    return multiply_blocks(values, numbers, 1, group)


def from_blocks(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix of one GPT-OSS expert, [inputs, outputs] in ``dtype`` (wide; a view).

    blocks: uint8 [outputs, inputs / 32, 16]; scales: uint8 [outputs, inputs / 32]. Raises Misfit.
    """
    if blocks.dim() != 3 or blocks.shape[2] != 16 or blocks.shape[:2] != scales.shape:
        raise Misfit(f"blocks of {list(blocks.shape)} do not fit scales of {list(scales.shape)}")
    return dequantize(blocks.flatten(1), scales, dtype).T


def _one(scale: Tensor, dtype: torch.dtype) -> Tensor:
    if scale.numel() != 1:
        raise Misfit(f"the scale of the whole matrix has shape {list(scale.shape)}")
    return scale.to(dtype).reshape(())
