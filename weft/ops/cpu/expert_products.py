"""Products with one matrix of a packed routed block, for rows with LoRA adapters (csrc/gemm.cpp).

A packed matrix of gate and up has 16 gate columns and 16 up columns in each block. Here all columns are
computed as if they were plain, and then put back into the order of the published rows: gate first. So the
product of an adapter can be added before the activation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from weft.ops.cpu.fused import gated
from weft.ops.moe import Gate, activate

Tensor = torch.Tensor

_HALF = 16
"""Gate columns of a packed block; the up columns follow (csrc/gemm_block.h)."""


class Matrices(NamedTuple):
    """The matrices of a packed block. A matrix has ``packed``, ``scales`` and ``coding`` (``cpu.moe``)."""

    gate: Gate
    hidden: int
    rows: int
    """Rows of the gate and up matrix of an expert."""
    shared_rows: int
    up: Any
    down: Any
    shared_up: Any
    shared_down: Any
    up_bias: Tensor | None
    """[local experts, rows]."""
    down_bias: Tensor | None
    """[local experts, hidden]."""


class PackedProducts:
    """``weft.moe.products.Products`` of a block in the extension's layout."""

    def __init__(self, matrices: Matrices) -> None:
        self._of = matrices

    def up(self, expert: int, x: Tensor, biased: bool = True) -> Tensor:
        return _halves(x, self._of.up, expert, self._of.rows, self._of.up_bias if biased else None)

    def down(self, expert: int, inner: Tensor, biased: bool = True) -> Tensor:
        own = self.biases(expert)[1] if biased else None
        return _product(inner, self._of.down, expert, self._of.hidden, own, None)

    def biases(self, expert: int) -> tuple[Tensor | None, Tensor | None]:
        up, down = self._of.up_bias, self._of.down_bias
        return None if up is None else up[expert], None if down is None else down[expert]

    def shared_up(self, x: Tensor) -> Tensor:
        return _halves(x, self._of.shared_up, 0, self._of.shared_rows, None)

    def shared_down(self, inner: Tensor) -> Tensor:
        return _product(inner, self._of.shared_down, 0, self._of.hidden, None, None)

    def activate(self, inner: Tensor) -> Tensor:
        return activate(inner.contiguous(), self._of.gate, gated)

    def with_shared(self, shared: Any, rows: Tensor, made: Tensor, share: Tensor | None) -> Any:
        """Return ``shared``, a result of ``Parts.shared``, with ``made`` in place of ``rows``."""
        total, own = shared
        return total.index_copy(0, rows, made.float()), own


def _halves(x: Tensor, matrix: Any, number: int, rows: int, bias: Tensor | None) -> Tensor:
    """Return the product with a matrix of gate and up rows, [T, rows], gate first."""
    n = rows // 2
    blocks = -(-n // _HALF)

    def in_blocks(values: Tensor) -> Tensor:
        """Return [rows] in the order of the packed columns, padded with zeros."""
        halves = F.pad(values.view(2, n), (0, blocks * _HALF - n)).view(2, blocks, _HALF)
        return halves.transpose(0, 1).flatten()

    scales = _of(matrix, number)
    made = _product(
        x,
        matrix,
        number,
        2 * _HALF * blocks,
        None if bias is None else in_blocks(bias[number]),
        None if scales is None else in_blocks(scales),
    )
    halves = made.view(len(x), blocks, 2, _HALF).transpose(1, 2).flatten(2)[:, :, :n]
    return halves.reshape(len(x), rows)


def _product(
    x: Tensor, matrix: Any, number: int, columns: int, bias: Tensor | None, scales: Tensor | None
) -> Tensor:
    """Return the product with packed columns of one matrix of a stack, [T, columns]."""
    packed = matrix.packed
    # A stack has one dim more than a matrix: plain and int8 matrices have four dims, codes two.
    stacked = packed.dim() == (3 if matrix.coding is not None else 5)
    data = packed[number] if stacked else packed
    scales = _of(matrix, number) if scales is None else scales
    ops = torch.ops.weft_cpu
    made: Tensor
    if matrix.coding is None:
        made = ops.linear.default(x, data, columns, bias, scales, 0)
        return made
    made = ops.linear_coded.default(x, data, columns, bias, scales, 0, **matrix.coding._asdict())
    return made


def _of(matrix: Any, number: int) -> Tensor | None:
    """Return the scales of one matrix, float32 [rows]; None without scales."""
    if matrix.scales is None:
        return None
    scales: Tensor = matrix.scales
    return (scales[number] if scales.dim() == 2 else scales).contiguous()
