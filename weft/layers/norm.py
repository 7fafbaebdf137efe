"""Root-mean-square layer normalization. Source: Zhang and Sennrich 2019, arXiv 1910.07467."""

from __future__ import annotations

import torch

from weft.layers.build import Build, Layer

Tensor = torch.Tensor


class RMSNorm(Layer):
    """RMS norm over the last dim, of ``size``, in float32 (float64 in a float64 model). Keeps x's dtype.

    ``wide``: the weight is stored in float32 (float64).
    """

    def __init__(self, size: int, eps: float, build: Build, *, wide: bool = False) -> None:
        super().__init__()
        self.weight = build.weight(size, wide=wide)
        self._eps = eps
        self._norm = build.op("rms_norm").run
        self._add_norm = build.op("add_rms_norm").run

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self._norm(x, self.weight, self._eps)
        return result

    def add(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (x + delta, norm of the sum). The sum is the new residual stream and may overwrite x."""
        result: tuple[Tensor, Tensor] = self._add_norm(x, delta, self.weight, self._eps)
        return result
