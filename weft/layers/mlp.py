"""The dense feed-forward block."""

from __future__ import annotations

import torch

from weft.layers.build import Build, Layer, Packs
from weft.layers.linear import RowLinear

Tensor = torch.Tensor


class GateUp(Packs):
    """``activation(gate(x)) * up(x)``; its outputs are what ranks divide (column-parallel).

    ``weight`` holds both matrices, gate first: [2 * intermediate, hidden]; ``bias`` likewise.
    """

    def __init__(self, hidden: int, intermediate: int, activation: str, build: Build, *, bias: bool) -> None:
        super().__init__()
        self.weight = build.weight(2 * intermediate, hidden)
        self.bias = build.weight(2 * intermediate) if bias else None
        self._activation = activation
        self._op = build.matrix_op("gated_linear")
        self._packed: object = None

    def pack(self) -> None:
        self._packed = self._give("weight", self._op)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self._op.run(x, self._packed, self.bias, self._activation)
        return made


class GatedMLP(Layer):
    """``down(activation(gate(x)) * up(x))``; returns a partial. Source: Shazeer 2020, arXiv 2002.05202."""

    def __init__(
        self, hidden: int, intermediate: int, activation: str, build: Build, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up = GateUp(hidden, intermediate, activation, build, bias=bias)
        self.down = RowLinear(intermediate, hidden, build, bias=bias)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """x: [T, hidden]; ids are not read."""
        partial: Tensor = self.down(self.gate_up(x))
        return partial
