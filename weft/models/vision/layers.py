"""Layers of vision towers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from weft.layers.build import Build, Layer
from weft.layers.dense import Linear
from weft.ops import torch_ops

Tensor = torch.Tensor


class LayerNorm(Layer):
    """Layer norm: mean 0 and deviation 1 over the last dim, then weight and bias. Source: arXiv
    1607.06450."""

    def __init__(self, size: int, eps: float, build: Build) -> None:
        super().__init__()
        self.weight = build.weight(size)
        self.bias = build.weight(size)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)


class MLP(Layer):
    """Two matrices with biases and an activation in between."""

    def __init__(self, inputs: int, inner: int, outputs: int, activation: str, build: Build) -> None:
        super().__init__()
        self.up = Linear(inputs, inner, build, bias=True)
        self.down = Linear(inner, outputs, build, bias=True)
        self._activation = torch_ops.ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self._activation(self.up(x)))
        return result


class PatchAttention(Layer):
    """Attention within groups of patches, without a mask."""

    def __init__(self, hidden: int, heads: int, build: Build) -> None:
        super().__init__()
        self.qkv = Linear(hidden, 3 * hidden, build, bias=True)
        self.out = Linear(hidden, hidden, build, bias=True)
        self._heads = heads

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], groups: Sequence[tuple[int, int]]) -> Tensor:
        """Attend each patch to all patches of its group. Return [N, hidden].

        x: [N, hidden]; angles: cos and sin, [N, dim / 2]; groups: (count, patches per group), in order.
        """
        tokens, hidden = x.shape
        qkv = self.qkv(x).view(tokens, 3 * self._heads, -1)
        turned, v = qkv.split((2 * self._heads, self._heads), dim=1)
        q, k = torch_ops.rotate(turned, *angles).split(self._heads, dim=1)  # one call: fewer operators
        made = []
        begin = 0
        for count, length in groups:
            end = begin + count * length
            # [groups, heads, patches, dim]
            shape = (count, length, self._heads, -1)
            inside = (part[begin:end].reshape(shape).transpose(1, 2) for part in (q, k, v))
            attended = F.scaled_dot_product_attention(*inside)
            made.append(attended.transpose(1, 2).reshape(end - begin, hidden))
            begin = end
        result: Tensor = self.out(made[0] if len(made) == 1 else torch.cat(made))
        return result


class PatchBlock(Layer):
    """Attention and MLP, each on a normalized copy of the stream."""

    def __init__(
        self, hidden: int, heads: int, intermediate: int, activation: str, eps: float, build: Build
    ) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(hidden, eps, build)
        self.attention = PatchAttention(hidden, heads, build)
        self.mlp_norm = LayerNorm(hidden, eps, build)
        self.mlp = MLP(hidden, intermediate, hidden, activation, build)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], groups: Sequence[tuple[int, int]]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles, groups)
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result
