"""Norms by the traits of a model."""

from __future__ import annotations

import torch

from weft.config.spec import ModelSpec
from weft.layers.build import Build, Layer
from weft.layers.dense import RMSNorm
from weft.ops.moe import Contribution, added

Tensor = torch.Tensor


class LayerNorm(Layer):
    """LayerNorm over the last dim, of ``size``, in float32 (float64 in a float64 model). Keeps x's dtype.

    ``wide``: weight and bias are stored in float32 (float64). Source: Ba et al. 2016, arXiv 1607.06450.
    """

    def __init__(self, size: int, eps: float, build: Build, *, bias: bool, wide: bool = False) -> None:
        super().__init__()
        self.weight = build.weight(size, wide=wide)
        self.bias = build.weight(size, wide=wide) if bias else None
        self._eps = eps
        self._op = build.op("layer_norm").run

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self._op(x, self.weight, self.bias, self._eps)
        return result

    def add(self, x: Tensor, delta: Contribution | None) -> tuple[Tensor, Tensor]:
        """Return (x + delta, norm of the sum)."""
        x = added(x, delta)
        return x, self.forward(x)


class WideStreamNorm(RMSNorm):
    """RMS norm of a stream in float32 (float64), for layers of the model's dtype. The weight is wide."""

    def __init__(self, size: int, eps: float, build: Build) -> None:
        super().__init__(size, eps, build, wide=True)
        self._norm = build.op("rms_norm", wide=True).run
        self._dtype = build.dtype

    def add(self, x: Tensor, delta: Contribution | None) -> tuple[Tensor, Tensor]:
        """Return (x + delta, norm of the sum in the model's dtype). x: wide [T, size]."""
        x = added(x, delta)
        normed: Tensor = self._norm(x, self.weight, self._eps)
        return x, normed.to(self._dtype)


def stream_norm(spec: ModelSpec, build: Build) -> RMSNorm | LayerNorm:
    """Return a norm of the stream, [T, hidden], with unset weights."""
    if spec.norms.kind == "layer":
        norms, eps = spec.norms, spec.norm_eps
        return LayerNorm(spec.hidden, eps, build, bias=norms.bias, wide=spec.centred_norms)
    return RMSNorm(spec.hidden, spec.norm_eps, build, wide=spec.centred_norms)
