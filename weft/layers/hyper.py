"""Hyper-connections: several residual streams with learned weights for reading and writing.

    x [T, N, hidden]  --into [T, N]-->  layer's input [T, hidden]
    layer's output    --out [T, N]--->  added to each stream of  mix^T [T, N, N] @ x

The weights are a function of the token's streams. Source: Xie et al. 2025, arXiv 2512.24880.
"""

from __future__ import annotations

import torch

from weft.config.spec import HyperSpec
from weft.layers.build import Build, Layer
from weft.layers.dense import Linear
from weft.ops.sparse_ops import logistic, sum_streams

Tensor = torch.Tensor


class _Mixer(Layer):
    """Stream weights of a token: a linear function of all streams, normalized to a root mean square of 1."""

    def __init__(self, hidden: int, spec: HyperSpec, outputs: int, eps: float, build: Build) -> None:
        super().__init__()
        inputs = spec.streams * hidden
        self.mixer = Linear(inputs, outputs, build, wide=True)
        self.base = build.weight(outputs, wide=True)
        self._norm = build.op("rms_norm", wide=True).run
        self._ones = torch.ones(inputs, dtype=build.wide, device=build.device)
        self._spec = spec
        self._eps = eps

    def mixed(self, x: Tensor) -> Tensor:
        """Return the linear function of the streams x [T, N, hidden]: wide [T, outputs]."""
        made: Tensor = self.mixer(self._norm(x.flatten(1).to(self._ones.dtype), self._ones, self._eps))
        return made


class HyperConnection(_Mixer):
    """Connection of one layer to the streams. Weights and their computation are wide."""

    def __init__(self, hidden: int, spec: HyperSpec, eps: float, build: Build) -> None:
        super().__init__(hidden, spec, (2 + spec.streams) * spec.streams, eps, build)
        self.scale = build.weight(3, wide=True)
        self._mix = build.op("mix_streams").run
        self._add = build.op("add_streams").run

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (input [T, hidden], ``out`` wide [T, N], ``mix`` wide [T, N, N]) for x [T, N, ..]."""
        spec = self._spec
        result: tuple[Tensor, Tensor, Tensor] = self._mix(
            self.mixed(x), self.scale, self.base, x, spec.iterations, spec.eps
        )
        return result

    def add(self, x: Tensor, made: Tensor, out: Tensor, mix: Tensor) -> Tensor:
        """Return the streams after a layer with output ``made`` [T, hidden]: [T, N, hidden] in x's dtype."""
        result: Tensor = self._add(x, made, out, mix)
        return result


class HyperHead(_Mixer):
    """Combination of all streams into one, after the last layer."""

    def __init__(self, hidden: int, spec: HyperSpec, eps: float, build: Build) -> None:
        super().__init__(hidden, spec, spec.streams, eps, build)
        self.scale = build.weight(1, wide=True)

    def forward(self, x: Tensor) -> Tensor:
        """Combine x [T, N, hidden] into [T, hidden]."""
        weights = logistic(self.mixed(x) * self.scale + self.base) + self._spec.eps
        return sum_streams(x, weights).to(x.dtype)
