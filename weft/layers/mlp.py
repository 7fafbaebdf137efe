"""The dense feed-forward block."""

from __future__ import annotations

import torch
from torch import nn

from weft.layers.build import Build
from weft.layers.linear import Linear, RowLinear
from weft.ops.registry import choose

Tensor = torch.Tensor


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``; returns a partial. Source: Shazeer 2020, arXiv 2002.05202.

    ``gate_up`` holds both input matrices, gate first: [2 * intermediate, hidden].
    """

    def __init__(
        self, hidden: int, intermediate: int, activation: str, build: Build, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, 2 * intermediate, build, bias=bias)
        self.down = RowLinear(intermediate, hidden, build, bias=bias)
        self._activation = activation
        self._gated = choose("gated", build.dtype, build.device)

    def forward(self, x: Tensor) -> Tensor:
        partial: Tensor = self.down(self._gated(self.gate_up(x), self._activation))
        return partial
