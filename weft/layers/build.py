"""What every layer is built with: where its weights live and which rank it is part of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from weft.ops import torch_ops
from weft.parallel.comm import Comm


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Dtype, device and group of a model under construction."""

    dtype: torch.dtype
    device: torch.device
    comm: Comm

    @property
    def wide(self) -> torch.dtype:
        """The dtype of what is never rounded to the model's: float64 in a float64 model, else float32."""
        return torch_ops.wide(self.dtype)

    def weight(self, *shape: int, wide: bool = False) -> nn.Parameter:
        """Uninitialized memory for one weight; the loader fills it in place."""
        dtype = self.wide if wide else self.dtype
        return nn.Parameter(torch.empty(shape, dtype=dtype, device=self.device), requires_grad=False)
