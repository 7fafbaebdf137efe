"""Linear layers on weights packed for the CPU extension (csrc/gemm.cpp), in bf16, float32 and int8.

Sums are float32, in one order for every number of rows, and rounded once, after scale, bias and activation.
Importing registers the ops; they are chosen where the extension is built and the CPU has AVX2 or AVX-512.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.ops import cpu
from weft.ops.cpu.served import ACTIVATIONS, serve
from weft.ops.torch_ops import to_int8

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """A weight [rows, inputs] in the extension's layout, which is private to csrc/gemm.cpp."""

    data: Tensor
    """bf16, float32, or bytes of int8."""
    rows: int
    inputs: int
    scales: Tensor | None = None
    """float32 [rows] of an int8 matrix."""


def pack(weight: Tensor) -> PackedMatrix:
    """For ``linear`` and ``embedding``. weight: bf16 or float32 [N, K]."""
    return _packed(weight, gated=False)


def pack_gated(weight: Tensor) -> PackedMatrix:
    """For ``gated_linear``. weight: bf16 or float32 [2 n, K], gate rows first."""
    return _packed(weight, gated=True)


def pack_int8(weight: Tensor, largest: Tensor | None = None) -> PackedMatrix:
    """For ``linear_int8``: quantizes weight, bf16 or float32 [N, K], as ``torch_ops.to_int8`` does."""
    return _packed_int8(weight, gated=False, largest=largest)


def pack_gated_int8(weight: Tensor) -> PackedMatrix:
    """For ``gated_linear_int8``: quantizes weight, bf16 or float32 [2 n, K], gate rows first."""
    return _packed_int8(weight, gated=True)


def _packed(weight: Tensor, *, gated: bool) -> PackedMatrix:
    data = torch.ops.weft_cpu.pack.default(weight.detach(), gated)
    return PackedMatrix(data=data, rows=weight.shape[0], inputs=weight.shape[1])


def _packed_int8(weight: Tensor, *, gated: bool, largest: Tensor | None = None) -> PackedMatrix:
    quantized = to_int8(weight.detach(), largest)
    data = torch.ops.weft_cpu.pack_int8.default(quantized.values, gated, weight.dtype == torch.bfloat16)
    scales = quantized.scales.float().flatten().contiguous()
    return PackedMatrix(data=data, rows=weight.shape[0], inputs=weight.shape[1], scales=scales)


def linear(x: Tensor, weight: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: x [T, K], bias [N] in x's dtype; [T, N]. Also for int8 matrices."""
    result: Tensor = torch.ops.weft_cpu.linear.default(x, weight.data, weight.rows, bias, weight.scales, 0)
    return result


def gated_linear(x: Tensor, weight: PackedMatrix, bias: Tensor | None, activation: str) -> Tensor:
    """``activation(gate) * up`` of x [T, K] through both halves: [T, n]. Also for int8 matrices.

    bias: [2 n] in x's dtype. Raises KeyError for an activation that is none of silu, gelu, gelu_pytorch_tanh
    and relu.
    """
    code = ACTIVATIONS[activation]
    result: Tensor = torch.ops.weft_cpu.linear.default(x, weight.data, weight.rows, bias, weight.scales, code)
    return result


def embedding(ids: Tensor, table: PackedMatrix) -> Tensor:
    """Rows of a table packed by ``pack``: ids int64 [T]; [T, K]. Raises IndexError for an id it lacks."""
    result: Tensor = torch.ops.weft_cpu.embedding.default(ids, table.data, table.rows, table.inputs)
    return result


def available() -> bool:
    """Built, and for a CPU with AVX2 (as those with AVX-512 have): without it torch's products are faster."""
    return cpu.load() and "avx2" in cpu.capabilities()


for _op, _run, _pack in (
    ("linear", linear, pack),
    ("gated_linear", gated_linear, pack_gated),
    ("linear_int8", linear, pack_int8),
    ("gated_linear_int8", gated_linear, pack_gated_int8),
    ("embedding", embedding, pack),
):
    serve(_op, _run, _pack, available)
