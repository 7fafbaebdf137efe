"""Products with single matrices of a routed block, for rows with LoRA adapters.

The ops of a block compute both matrices of an expert at once, and an adapter changes what comes between. So
rows with adapters of experts take the matrices one by one, from the same packed weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from weft.ops.moe import Pieces, Routed, activate, matrix_of

Tensor = torch.Tensor


class Products(Protocol):
    """Products with one matrix. ``expert``: number of a local expert.

    Experts without a gate have the rows of ``up`` only.
    """

    def up(self, expert: int, x: Tensor, biased: bool = True) -> Tensor:
        """Return the rows of gate and up for x [n, hidden]: [n, 2 inner], gate first, with the bias if
        ``biased``."""

    def down(self, expert: int, inner: Tensor, biased: bool = True) -> Tensor:
        """Return [n, hidden] for ``inner`` [n, inner], with the bias if ``biased`` and this rank adds the
        bias."""

    def biases(self, expert: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the biases of ``up`` and ``down`` on this rank."""

    def shared_up(self, x: Tensor) -> Tensor:
        """Return ``up`` of the shared expert."""

    def shared_down(self, inner: Tensor) -> Tensor:
        """Return ``down`` of the shared expert."""

    def activate(self, inner: Tensor) -> Tensor:
        """Return the activation between both matrices, [n, inner] for [n, 2 inner]."""

    def with_shared(self, shared: Any, rows: Tensor, made: Tensor, share: Tensor | None) -> Any:
        """Return ``shared``, a result of ``RankExperts.shared``, with other rows.

        rows: int64 [n]. made: [n, hidden], outputs of ``shared_down``. share: factors of all rows, as from
        ``RankExperts.route``.
        """


class PieceProducts(NamedTuple):
    """Products in torch, from the pieces of one implementation."""

    pieces: Pieces
    weights: Routed

    def up(self, expert: int, x: Tensor, biased: bool = True) -> Tensor:
        bias = self.biases(expert)[0] if biased else None
        return self.pieces.matrix(x, matrix_of(self.weights.gate_up, expert), bias)

    def down(self, expert: int, inner: Tensor, biased: bool = True) -> Tensor:
        bias = self.biases(expert)[1] if biased else None
        return self.pieces.matrix(inner, matrix_of(self.weights.down, expert), bias)

    def biases(self, expert: int) -> tuple[Tensor | None, Tensor | None]:
        up, down = self.weights.gate_up_bias, self.weights.down_bias
        return None if up is None else up[expert], None if down is None else down[expert]

    def shared_up(self, x: Tensor) -> Tensor:
        return self.pieces.matrix(x, self.weights.shared_gate_up, None)

    def shared_down(self, inner: Tensor) -> Tensor:
        return self.pieces.matrix(inner, self.weights.shared_down, None)

    def activate(self, inner: Tensor) -> Tensor:
        return activate(inner, self.weights.gate, self.pieces.gated)

    def with_shared(self, shared: Any, rows: Tensor, made: Tensor, share: Tensor | None) -> Any:
        made = made.to(shared.dtype)
        return shared.index_copy(0, rows, made if share is None else made * share.index_select(0, rows))
