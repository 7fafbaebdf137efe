"""compressed-tensors' "pack-quantized": signed integers plus half their range, several inputs per word."""

from __future__ import annotations

import torch

from weft.models.quantized.packed_words import even_groups, scale_groups, unpack
from weft.models.quantized.scales import Misfit

Tensor = torch.Tensor


def zero_points(zeros: Tensor, rows: int, bits: int) -> Tensor:
    """Return zero points plus half their range, uint8 [rows, G].

    zeros: int32 [ceil(rows / values per word), G], or one int8 for the whole matrix, which is not packed.
    Raises Misfit.
    """
    if zeros.dtype == torch.int8 and zeros.numel() == 1:
        return (zeros.int() + (1 << (bits - 1))).to(torch.uint8).reshape(1, 1).expand(rows, 1)
    return unpack(zeros, bits, 0)[:rows]


def dequantize(
    packed: Tensor,
    scale: Tensor,
    shape: Tensor,
    dtype: torch.dtype,
    *,
    zeros: Tensor | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    """Return the matrix [N, K] in ``dtype`` (wide; a view): ``(value - zero) * scale``.

    packed: int32 [N, ceil(K / values per word)]; scale: [N, G] (G = 1: one scale per row), or one element;
    shape: the integers N, K; zeros: see ``zero_points``, or None for half the range; groups: group of each
    input, integers [K], or None for even groups. Raises Misfit.
    """
    if shape.numel() != 2 or packed.dim() != 2 or packed.shape[0] != int(shape[0]):
        raise Misfit(f"packed values of {list(packed.shape)} do not fit the shape {shape.tolist()}")
    n = int(shape[0])
    k = int(shape[1])
    bits = next((b for b in (4, 8) if -(-k // (32 // b)) == packed.shape[1]), 0)
    if not bits:
        raise Misfit(f"{packed.shape[1]} words do not hold {k} values of 4 or 8 bits")
    values = unpack(packed, bits, 1)[:, :k].T.to(dtype)  # [K, N]
    scales = scale.to(dtype).reshape(1, 1).expand(n, 1) if scale.numel() == 1 else scale.to(dtype)
    if zeros is not None:
        known = zero_points(zeros, n, bits).to(dtype).T  # [G, N]
    else:
        known = values.new_full((scales.shape[-1], n), float(1 << (bits - 1)))
    if groups is None or not groups.numel() or int(groups.min()) < 0:
        groups = even_groups(k, scales.shape[-1])
    return scale_groups(values, scales.T, known, groups).T
