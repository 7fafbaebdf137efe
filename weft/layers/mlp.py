"""The dense feed-forward block."""

from __future__ import annotations

import torch

from weft.layers.build import Build, FeedForward, Packs
from weft.layers.linear import RowLinear
from weft.layers.shard import Shard, joined

Tensor = torch.Tensor


class GateUp(Packs):
    """``activation(gate(x)) * up(x)`` with outputs divided over ranks (column-parallel).

    ``weight`` contains both matrices, gate first: [2 * intermediate, hidden]. ``bias`` has the same order.
    """

    def __init__(
        self, hidden: int, intermediate: Shard, activation: str, build: Build, *, bias: bool
    ) -> None:
        super().__init__()
        both = joined(intermediate, intermediate)
        self.weight = build.matrix(both.count, hidden, shard=both)
        self.bias = build.weight(both.count, shard=both) if bias else None
        self._activation = activation
        self._op = build.matrix_op("gated_linear")
        self._notes = build.notes
        self._packed: object = None

    def pack(self) -> None:
        self._packed = self._give("weight", self._op)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self._op.run(x, self._packed, self.bias, self._activation)
        return result


class GatedMLP(FeedForward):
    """``down(activation(gate(x)) * up(x))``, a partial result. Source: Shazeer 2020, arXiv 2002.05202."""

    def __init__(
        self, hidden: int, intermediate: int, activation: str, build: Build, *, bias: bool = False
    ) -> None:
        super().__init__()
        inner = build.part(intermediate)
        self.gate_up = GateUp(hidden, inner, activation, build, bias=bias)
        self.down = RowLinear(inner, hidden, build, bias=bias)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the partial result for x [T, hidden]. ``ids`` are not read."""
        partial: Tensor = self.down(self.gate_up(x))
        return partial
