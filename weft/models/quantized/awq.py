"""AWQ in the "gemm" layout: 4 bits, eight outputs per word in a special order, groups along the inputs.

Source: Lin et al. 2023, arXiv 2306.00978; the layout comes from AutoAWQ.
"""

from __future__ import annotations

import torch

from weft.models.quantized.packed_words import even_groups, scale_groups, unpack
from weft.models.quantized.scales import Misfit

Tensor = torch.Tensor

#: Entry i is the output, of the eight in a word, that the i-th four bits belong to.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def dequantize(qweight: Tensor, qzeros: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix [N, K] in ``dtype`` (wide; a view): ``(value - zero) * scale``.

    qweight: int32 [K, N / 8]; qzeros: int32 [K / group, N / 8]; scales: [K / group, N]. Raises Misfit.
    """
    if qweight.dim() != 2 or 8 * qweight.shape[1] != scales.shape[-1]:
        raise Misfit(f"qweight of {list(qweight.shape)} does not fit scales of {list(scales.shape)}")
    values = unpack(qweight, 4, 1, ORDER).to(dtype)  # [K, N]
    zeros = unpack(qzeros, 4, 1, ORDER).to(dtype)
    return scale_groups(values, scales.to(dtype), zeros, even_groups(len(values), len(scales))).T
