"""Factors of the outputs of experts under DoRA adapters; see ``adapter_factors``.

Lengths of rows need the weights of an expert. A rank with parts of every expert sums over the ranks, once per
adapter. A rank with whole experts computes the factors of its own experts alone, and again after a move.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from weft.layers.low_rank import base_squares, merged_squares
from weft.ops.torch_ops import wide

if TYPE_CHECKING:
    from weft.models.expert_adapters import HeldExperts

Tensor = torch.Tensor


class ScaledExperts:
    """The part of an adapter for one matrix of the experts of this rank. See ``adapter_factors.Scaled``."""

    def __init__(self, held: HeldExperts) -> None:
        self.held = held
        matrix = held.matrix
        self.divided = [(0, matrix.shape[1])] != matrix.columns

    def squares(self) -> Tensor:
        """Return the square sums of the rows of the experts with the adapter, wide [here * outputs]. Partial
        if divided."""
        held, matrix = self.held, self.held.matrix
        pool = matrix.low.pool
        assert pool is not None
        inputs, dtype, device = pool.a.shape[3], pool.a.dtype, pool.a.device
        made = []
        for place, expert in enumerate(matrix.here):
            base = self._base(place)
            of_base = matrix.squares.get(expert)
            if of_base is None:
                of_base = matrix.squares[expert] = base_squares(base, inputs, dtype, device)
            a, b = held.a[expert].to(device), held.b[expert].to(device)
            made.append(merged_squares(base, of_base, pool.spans, a, b))
        return torch.cat(made)

    def factors(self, squares: Tensor) -> Tensor:
        """Return the factors [here, outputs]; 1 for outputs without a length."""
        assert self.held.lengths is not None
        here = list(self.held.matrix.here)
        lengths = self.held.lengths[here].to(squares.device)
        return torch.where(lengths.isnan(), 1.0, lengths / squares.view_as(lengths).sqrt())

    def update(self) -> None:
        """Compute the factors again if other experts are here now. Only for whole experts."""
        here = tuple(self.held.matrix.here)
        if self.held.factors is None or self.held.factors[0] != here:
            self.held.factors = here, self.factors(self.squares())

    def _base(self, place: int) -> Callable[[Tensor], Tensor]:
        """Return the product with the matrix of the local expert ``place``, without bias."""
        matrix = self.held.matrix
        products = matrix.block.products
        if not matrix.experts:
            shared: Callable[[Tensor], Tensor] = getattr(products, matrix.name)
            return shared
        return partial(getattr(products, matrix.name), place, biased=False)


def keep_factors(layers: list[ScaledExperts], made: list[Tensor]) -> None:
    """Keep the result of ``adapter_factors.factors_of`` in the adapters."""
    for layer, factors in zip(layers, made, strict=True):
        layer.held.factors = tuple(layer.held.matrix.here), factors.to(wide(factors.dtype))
