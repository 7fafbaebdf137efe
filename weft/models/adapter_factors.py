"""Factors of the outputs of layers under DoRA adapters: the saved lengths by the lengths of ``W + B A``.

Computed once per adapter, from the weights with which the layers compute. So a quantized base needs no second
copy. Source: Liu et al. 2024, arXiv 2402.09353.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from weft.layers.low_rank import LowRank
from weft.models.expert_factors import ScaledExperts
from weft.parallel.comm import Comm

Tensor = torch.Tensor


@dataclass(slots=True)
class Scaled:
    """The adapter's matrices of one layer."""

    low: LowRank
    divided: bool
    """True if ranks have parts of the inputs."""
    _matrices: list[tuple[tuple[int, ...], Tensor, Tensor, Tensor, list[tuple[slice, slice]]]] = field(
        default_factory=list
    )

    def add(
        self,
        parts: tuple[int, ...],
        a: Tensor,
        b: Tensor,
        magnitude: Tensor,
        rows: Iterable[tuple[slice, slice]],
    ) -> None:
        """Add a published matrix: a [rank, inputs of this rank], b [rank, outputs], magnitude [outputs].

        ``rows``: (rows of the published matrix, rows of the layer) on this rank.
        """
        self._matrices.append((parts, a, b, magnitude, list(rows)))

    def squares(self) -> Tensor:
        """Return the square sums of the rows of the layer with the adapter, partial if divided."""
        pool = self.low.pool
        assert pool is not None
        _, count, _, inputs = pool.a.shape
        rank = max(len(a) for _, a, *_ in self._matrices)
        first = pool.a.new_zeros(count, rank, inputs)
        second = pool.b.new_zeros(rank, pool.b.shape[2])
        for parts, a, b, _, rows in self._matrices:
            first[list(parts), : len(a)] = a.to(first.device)
            for source, to in rows:
                second[: len(a), to] = b[:, source].to(second.device)
        return self.low.squares(inputs, first, second)

    def factors(self, squares: Tensor) -> Tensor:
        """Return the factors of the outputs; 1 for outputs without a length."""
        made = torch.ones_like(squares)
        for _, _, _, magnitude, rows in self._matrices:
            for source, to in rows:
                made[to] = magnitude[source].to(made.device) / squares[to].sqrt()
        return made


def factors_of(layers: Sequence[Scaled | ScaledExperts], comm: Comm) -> list[Tensor]:
    """Return the wide factors of each layer. One sum over the ranks covers all layers with divided inputs."""
    squares = [layer.squares() for layer in layers]
    divided = [number for number, layer in enumerate(layers) if layer.divided]
    if divided and comm.size > 1:
        pending = comm.all_reduce(torch.cat([squares[number] for number in divided]))
        if pending is not None:
            total: Tensor = pending.result()
            sizes = [len(squares[number]) for number in divided]
            for number, sums in zip(divided, total.split(sizes), strict=True):
                squares[number] = sums
    return [layer.factors(sums) for layer, sums in zip(layers, squares, strict=True)]
