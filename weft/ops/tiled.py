"""Torch forms of the ops in which rows do not depend on each other, for every dtype on the CPU.

Used with ``--deterministic`` where the C++ operations are not built or do not support the dtype (float64,
float16). Products come from ``fixed_shapes``. Activations use only functions that torch computes alike for
every element. Torch's own silu and gelu use another exponential for the last elements of a loop, and of each
thread's share. Importing registers the ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from weft.ops import fixed_shapes, torch_ops
from weft.ops.coded import (
    GROUPED,
    INT8_DIVIDED,
    ROW_GROUPS,
    Codes,
    MixedCodes,
    to_exact_int4,
    to_fp8,
    to_int4,
    to_w4a8,
)
from weft.ops.fixed_shapes import aligned, row_tiles
from weft.ops.registry import Implementation, register
from weft.ops.torch_ops import Int8Weight, to_int8, to_w8a8, wide

Tensor = torch.Tensor


# --- activations ---


def _silu(x: Tensor) -> Tensor:
    return x / x.neg().exp_().add_(1)


def _gelu(x: Tensor) -> Tensor:
    return x * (x * math.sqrt(0.5)).erf_().add_(1).mul_(0.5)


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = (x * x * x).mul_(0.044715).add_(x).mul_(math.sqrt(2 / math.pi))
    return x * inner.tanh_().add_(1).mul_(0.5)


# exp, erf, tanh and + - * / compute every element alike (tests/e1/test_elementwise.py).
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": torch.relu,
}


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Return ``activation(gate) * up`` for the halves of gate_up [..., 2 n]: [..., n] in the same dtype.

    The activation is computed in float32 (float64 for float64) and rounded before the product.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    made = _ACTIVATIONS[activation](gate.to(wide(gate.dtype)))
    return made.to(gate.dtype) * up


# --- matrices ---


def pack(weight: Tensor) -> Tensor:
    """Return weight [N, K] with aligned rows, without a copy if possible, after the trial of its shape."""
    packed = aligned(weight.detach())
    row_tiles(packed)
    return packed


def linear(x: Tensor, weight: Tensor | Codes | MixedCodes, bias: Tensor | None = None) -> Tensor:
    """Compute ``fixed_shapes.linear``. Codes are dequantized on each call."""
    return torch_ops.linear(x, weight, bias, fixed_shapes.linear)


def gated_linear(
    x: Tensor, weight: Tensor | Codes | MixedCodes, bias: Tensor | None, activation: str
) -> Tensor:
    """Return ``gated(x @ weight.T + bias)``: x [T, K], weight [2 n, K], gate rows first; [T, n]."""
    return gated(linear(x, weight, bias), activation)


def linear_int8(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """Compute ``torch_ops.linear_int8`` with products of this module."""
    return torch_ops.linear_int8(x, weight, bias, product=linear)


def gated_linear_int8(x: Tensor, weight: Int8Weight, bias: Tensor | None, activation: str) -> Tensor:
    """Return ``gated(linear_int8(x, weight, bias))``."""
    return gated(linear_int8(x, weight, bias), activation)


_table: list[tuple[str, Callable[..., Any], Callable[..., Any] | None]] = [
    ("linear", linear, pack),
    ("gated_linear", gated_linear, pack),
    ("linear_int8", linear_int8, to_int8),
    ("gated_linear_int8", gated_linear_int8, to_int8),
    ("linear_w8a8", linear_int8, to_w8a8),
    ("gated_linear_w8a8", gated_linear_int8, to_w8a8),
    ("linear_int4", linear, to_int4),
    ("gated_linear_int4", gated_linear, to_int4),
    ("linear_w4a8", linear, to_w4a8),
    ("gated_linear_w4a8", gated_linear, to_w4a8),
    ("linear_fp8", linear, to_fp8),
    ("gated_linear_fp8", gated_linear, to_fp8),
    ("gated", gated, None),
    *((f"linear_w8a8-{group}", linear_int8, partial(to_w8a8, group=group)) for group in ROW_GROUPS),
    *((f"linear_{kind}", linear_int8, to_int8) for kind in INT8_DIVIDED),
    ("linear_int4-exact", linear, to_exact_int4),
]
for _name, _op, _pack in _table:
    register(
        _name,
        Implementation(
            name="torch_tiled",
            run=_op,
            pack=_pack,
            devices=("cpu",),
            invariant=True,
            priority=-1,
            pack_codes=torch_ops.as_they_are if _pack in (pack, *GROUPED.values()) else None,
            mixes=_pack is pack,
        ),
    )
