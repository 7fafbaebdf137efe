"""The dense feed-forward without a gate."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from weft.layers.build import Build, FeedForward
from weft.layers.dense import Linear, RowLinear
from weft.ops.low_rank import AdapterRows

Tensor = torch.Tensor


def plain_activation(name: str, build: Build) -> Callable[[Tensor], Tensor]:
    """Return the activation ``name`` as one op. Raise ConfigError if no implementation fits."""
    op = build.op("activation_erf" if name == "gelu" else "activation").run
    return functools.partial(op, name=name)


_BETA, _EPS = 0.5, -1e-6
"""Constants of xIELU."""


class PlainMLP(FeedForward):
    """``down(activation(up(x)))``, a partial result. Source: Vaswani et al. 2017, arXiv 1706.03762."""

    adapted = ("up", "down")

    def __init__(
        self, hidden: int, intermediate: int, activation: str, build: Build, *, bias: bool = False
    ) -> None:
        super().__init__()
        inner = build.part(intermediate)
        self.up = Linear(hidden, inner, build, bias=bias)
        self.down = RowLinear(inner, hidden, build, bias=bias)
        self._activation: Callable[[Tensor], Tensor]
        self.alpha_p = self.alpha_n = None
        if activation == "xielu":
            self.alpha_p = build.weight(1, wide=True)
            self.alpha_n = build.weight(1, wide=True)
            self._activation = self._xielu
        else:
            self._activation = plain_activation(activation, build)

    def _xielu(self, x: Tensor) -> Tensor:
        """Return xIELU of x, with two trained numbers. Source: Huang and Schlag 2024, arXiv 2411.13010."""
        assert self.alpha_p is not None
        assert self.alpha_n is not None
        y = x.to(self.alpha_p.dtype)
        right = F.softplus(self.alpha_p) * y.square()
        # exp, because torch computes the last elements of a loop of expm1 with another function.
        left = (y.clamp(max=_EPS).exp() - 1 - y) * (_BETA + F.softplus(self.alpha_n))
        return (torch.where(y > 0, right, left) + _BETA * y).to(x.dtype)

    def forward(self, x: Tensor, ids: Tensor | None = None, adapters: AdapterRows | None = None) -> Tensor:
        """Return the partial result for x [T, hidden]. ``ids`` are not read."""
        partial: Tensor = self.down(self._activation(self.up(x, adapters)), adapters)
        return partial
