"""The dense feed-forward without a gate."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from weft.layers.build import Build, FeedForward
from weft.layers.dense import Linear, RowLinear
from weft.ops.torch_ops import ACTIVATIONS

Tensor = torch.Tensor

PLAIN_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS,
    "relu2": lambda x: F.relu(x).square(),
}


class PlainMLP(FeedForward):
    """``down(activation(up(x)))``, a partial result. Source: Vaswani et al. 2017, arXiv 1706.03762."""

    def __init__(
        self, hidden: int, intermediate: int, activation: str, build: Build, *, bias: bool = False
    ) -> None:
        super().__init__()
        inner = build.part(intermediate)
        self.up = Linear(hidden, inner, build, bias=bias)
        self.down = RowLinear(inner, hidden, build, bias=bias)
        self._activation = PLAIN_ACTIVATIONS[activation]

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the partial result for x [T, hidden]. ``ids`` are not read."""
        partial: Tensor = self.down(self._activation(self.up(x)))
        return partial
