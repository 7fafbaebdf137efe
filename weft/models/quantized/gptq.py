"""GPTQ: 2, 4 or 8 bits, several inputs per word, groups along the inputs in any order.

Source: Frantar et al. 2022, arXiv 2210.17323; the layout comes from AutoGPTQ. ``offset`` is added to stored
zero points. The first version of the format has offset 1, with wrap-around (a zero point of 0 is stored as
the largest value); "gptq_v2" has offset 0.
"""

from __future__ import annotations

import torch

from weft.models.quantized.packed_words import bits_of, even_groups, scale_groups, unpack
from weft.models.quantized.scales import Misfit

Tensor = torch.Tensor


def dequantize(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    *,
    groups: Tensor | None = None,
    offset: int = 1,
) -> Tensor:
    """Return the matrix [N, K] in ``dtype`` (wide; a view): ``(value - zero) * scale``.

    qweight: int32 [K * bits / 32, N]; qzeros: int32 [G, N * bits / 32]; scales: [G, N]; groups: group of each
    input, integers [K] (``g_idx``; unordered after "desc_act"), or None for even groups. Raises Misfit.
    """
    if scales.dim() != 2 or qzeros.dim() != 2 or qzeros.shape[0] != scales.shape[0]:
        raise Misfit(f"qzeros of {list(qzeros.shape)} do not fit scales of {list(scales.shape)}")
    bits = bits_of(scales.shape[1], qzeros.shape[1])
    values = unpack(qweight, bits, 0).to(dtype)  # [K, N]
    zeros = (unpack(qzeros, bits, 1) + offset) & ((1 << bits) - 1)
    if groups is None or not groups.numel():
        groups = even_groups(len(values), len(scales))
    return scale_groups(values, scales.to(dtype), zeros.to(dtype), groups).T
