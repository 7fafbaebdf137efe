"""Further reference ops in torch: LayerNorm, sums of squares, activations without a gate, soft cap.

Elements are computed with exp, because torch computes the last elements of a loop of tanh, sigmoid or erf
with another function: the bits of a row would depend on the rows before. Importing registers the ops.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.ops.registry import Implementation, register
from weft.ops.torch_ops import wide

Tensor = torch.Tensor

_GELU = 2 * (2 / torch.pi) ** 0.5


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return LayerNorm over the last dim, in x's dtype. x [..., n], weight and bias [n].

    Source: Ba et al. 2016, arXiv 1607.06450.
    """
    y = x.to(wide(x.dtype))
    y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.to(y.dtype)
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)


def squares(x: Tensor) -> Tensor:
    """Return the sum of squares of each row of x [T, n], wide [T, 1]."""
    return x.to(wide(x.dtype)).square().sum(1, keepdim=True)


def activation(x: Tensor, name: str) -> Tensor:
    """Return silu, gelu_pytorch_tanh, relu or relu2 of x, rounded once. Raise ValueError for another name."""
    if name in ("relu", "relu2"):
        y = F.relu(x)
        return y if name == "relu" else y.square()
    y = x.to(wide(x.dtype))
    if name == "silu":
        return (y / (1 + (-y).exp())).to(x.dtype)
    if name != "gelu_pytorch_tanh":
        raise ValueError(f"no activation {name!r}")
    # y * (1 + tanh(u)) / 2 equals y * sigmoid(2 u).
    return (y / (1 + (-_GELU * (y + 0.044715 * y * y * y)).exp())).to(x.dtype)


def activation_erf(x: Tensor, name: str) -> Tensor:
    """Return gelu of x, with erf."""
    return F.gelu(x)


def softcap(x: Tensor, cap: float) -> Tensor:
    """Return ``cap * tanh(x / cap)``, rounded once."""
    y = x.to(wide(x.dtype)) * (2 / cap)
    return (cap - 2 * cap / (y.exp() + 1)).to(x.dtype)


for _op in (activation, softcap):
    register(_op.__name__, Implementation(name="torch", run=_op, invariant=True))
register("activation_erf", Implementation(name="torch", run=activation_erf))
# A GPU's order of summation depends on the number of rows.
for _sum in (layer_norm, squares):
    register(_sum.__name__, Implementation(name="torch", run=_sum, invariant=True, devices=("cpu",)))
    register(_sum.__name__, Implementation(name="torch-cuda", run=_sum, devices=("cuda",)))
