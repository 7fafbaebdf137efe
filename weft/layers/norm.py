"""Root-mean-square layer normalization. Source: Zhang and Sennrich 2019, arXiv 1910.07467."""

from __future__ import annotations

import torch
from torch import nn

from weft.layers.build import Build
from weft.ops.registry import choose

Tensor = torch.Tensor


class RMSNorm(nn.Module):
    """Normalizes the last dim, of ``size``, in float32 (float64 in a float64 model); x's dtype in and out."""

    def __init__(self, size: int, eps: float, build: Build) -> None:
        super().__init__()
        self.weight = build.weight(size)
        self._eps = eps
        self._run = choose("rms_norm", build.dtype, build.device)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self._run(x, self.weight, self._eps)
        return made
