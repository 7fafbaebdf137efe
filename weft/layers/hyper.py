"""Hyper-connections: several residual streams, which a layer reads as one and gives to with learned weights.

    x [T, N, hidden]  --into [T, N]-->  layer's input [T, hidden]
    layer's output    --out [T, N]--->  added to each stream of  mix^T [T, N, N] @ x

The weights follow from the token's streams. Source: Xie et al. 2025, arXiv 2512.24880.
"""

from __future__ import annotations

import torch

from weft.config.spec import HyperSpec
from weft.layers.build import Build, Layer
from weft.layers.linear import Linear
from weft.ops.sparse_ops import stream_weights
from weft.ops.torch_ops import wide

Tensor = torch.Tensor


def _unit(x: Tensor, eps: float) -> Tensor:
    """The streams of x [T, N, hidden] as one vector of root mean square 1: wide [T, N * hidden]."""
    flat = x.flatten(1).to(wide(x.dtype))
    return flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def _weighted(x: Tensor, weights: Tensor) -> Tensor:
    """x [T, N, hidden] summed by weights, wide [T, N]: [T, hidden] in x's dtype."""
    return torch.bmm(weights.unsqueeze(1), x.to(weights.dtype)).squeeze(1).to(x.dtype)


class HyperConnection(Layer):
    """How one layer is connected to the streams. Weights and their computation are wide."""

    def __init__(self, hidden: int, spec: HyperSpec, eps: float, build: Build) -> None:
        super().__init__()
        n = spec.streams
        self.mixer = Linear(n * hidden, (2 + n) * n, build, wide=True)
        self.base = build.weight((2 + n) * n, wide=True)
        self.scale = build.weight(3, wide=True)
        self._spec = spec
        self._eps = eps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [T, N, hidden]; (the layer's input [T, hidden], ``out`` wide [T, N], ``mix`` wide [T, N, N])."""
        mixed = self.mixer(_unit(x, self._eps))
        into, out, mix = stream_weights(
            mixed, self.scale, self.base, self._spec.streams, self._spec.iterations, self._spec.eps
        )
        return _weighted(x, into), out, mix

    @staticmethod
    def add(x: Tensor, made: Tensor, out: Tensor, mix: Tensor) -> Tensor:
        """The streams after the layer made [T, hidden] of its input: [T, N, hidden] in x's dtype."""
        mixed = torch.bmm(mix.transpose(1, 2), x.to(mix.dtype))
        return mixed.addcmul_(out.unsqueeze(2), made.to(mix.dtype).unsqueeze(1)).to(x.dtype)


class HyperHead(Layer):
    """The streams as one, after the last layer."""

    def __init__(self, hidden: int, spec: HyperSpec, eps: float, build: Build) -> None:
        super().__init__()
        self.mixer = Linear(spec.streams * hidden, spec.streams, build, wide=True)
        self.base = build.weight(spec.streams, wide=True)
        self.scale = build.weight(1, wide=True)
        self._spec = spec
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, N, hidden]; returns [T, hidden]."""
        mixed = self.mixer(_unit(x, self._eps))
        return _weighted(x, torch.sigmoid(mixed * self.scale + self.base) + self._spec.eps)
