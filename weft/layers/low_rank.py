"""The low-rank part of a linear layer: the matrices of the adapters in the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.layers.build import Build
from weft.ops.low_rank import AdapterRows, LowRankPool, make_pool, scale_rows
from weft.ops.torch_ops import wide

Tensor = torch.Tensor

_UNITS = 256
"""Rows of one product for the lengths of the base's rows."""


class LowRank:
    """Adapters of one matrix. A layer without adapters has none of these."""

    def __init__(self, build: Build) -> None:
        """The pool is made by ``allocate``, when the published parts of the matrix are known."""
        op = build.op("low_rank")
        self._op = op.run
        self.capturable = op.name != "torch"
        """True if the op reads the places from the device only, so that a step with adapters can be
        captured."""
        self._options = build.adapters
        self._dtype = build.dtype
        self._device = build.device
        self.base: Callable[[Tensor], Tensor] | None = None
        """Product of the layer without bias and adapters. Set by layers that support factors (DoRA)."""
        self._squares: Tensor | None = None
        self.pool: LowRankPool | None = None
        """None if no published matrix belongs to the layer: then no adapter can name the layer."""

    def allocate(self, parts: int, shape: tuple[int, int], spans: Sequence[tuple[int, int, int]]) -> None:
        """Make the empty pool. ``shape``: outputs and inputs on this rank; for ``spans`` see
        ``LowRankPool``."""
        options = self._options
        self.pool = make_pool(options.places, options.rank, parts, shape, spans, self._dtype, self._device)

    def allocate_stack(
        self, count: int, parts: int, shape: tuple[int, int], spans: Sequence[tuple[int, int, int]]
    ) -> None:
        """Make the empty pool for ``count`` matrices of ``shape``: place ``number * places + place``."""
        options = self._options
        places = options.places * count
        self.pool = make_pool(places, options.rank, parts, shape, spans, self._dtype, self._device)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return 0 if self.pool is None else self.pool.nbytes

    def clear(self, place: int) -> None:
        """Remove the adapter of ``place``."""
        assert self.pool is not None
        self.pool.clear(place)

    def placed(self, place: int) -> None:
        """Call after the matrices of ``place`` were written."""

    def add(self, y: Tensor, x: Tensor, rows: AdapterRows, bias: Tensor | None = None) -> None:
        """Add the low-rank products of the rows with an adapter to y [T, outputs], in place.

        x: [T, inputs]. bias: part of y, which factors leave alone.
        """
        if self.pool is not None:
            self._op(y, x, self.pool, rows)
            if self.pool.factors and any(place in self.pool.factors for place in rows.present):
                scale_rows(y, self.pool, rows, bias)

    def forget_squares(self) -> None:
        """Forget the square sums of the rows of the weight. Call after the weight has changed."""
        self._squares = None

    def squares(self, inputs: int, a: Tensor, b: Tensor) -> Tensor:
        """Return the square sums of the rows of ``W + B A``, wide [outputs of the layer].

        a: [parts, rank, inputs of this rank]; b: [rank, outputs of this rank], with the scale. W is the
        weight of this rank as the layer computes with W, so sums over divided inputs are partial.
        """
        assert self.base is not None
        assert self.pool is not None
        if self._squares is None:
            self._squares = base_squares(self.base, inputs, self._dtype, self._device)
        return merged_squares(
            self.base, self._squares, self.pool.spans, a.to(self._device), b.to(self._device)
        )


def merged_squares(
    base: Callable[[Tensor], Tensor],
    of_base: Tensor,
    spans: Sequence[tuple[int, int, int]],
    a: Tensor,
    b: Tensor,
) -> Tensor:
    """Return the square sums of the rows of ``W + B A``, see ``LowRank.squares``. ``base``: product with W;
    ``of_base``: square sums of the rows of W."""
    exact = of_base.dtype
    made = of_base.clone()
    for part, begin, end in spans:
        own = b[:, begin:end].to(exact)
        # ||W + BA||^2 = ||W||^2 + 2 <W, BA> + ||BA||^2, row by row; W A^T is a product of the layer.
        crossed = base(a[part].contiguous())[:, begin:end].to(exact)
        inner = a[part].to(exact) @ a[part].to(exact).T
        made[begin:end] += 2 * (own * crossed).sum(0) + (own * (inner @ own)).sum(0)
    return made


def base_squares(
    base: Callable[[Tensor], Tensor], inputs: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the square sums of the rows of W, wide [outputs], by products ``base`` with unit rows."""
    total: Tensor | None = None
    for begin in range(0, inputs, _UNITS):
        count = min(_UNITS, inputs - begin)
        units = torch.zeros(count, inputs, dtype=dtype, device=device)
        units[range(count), range(begin, begin + count)] = 1
        made = base(units).to(wide(dtype)).square().sum(0)
        total = made if total is None else total + made
    assert total is not None
    return total


def make_low_rank(build: Build) -> LowRank | None:
    """Return the low-rank part of a layer, or None without places for adapters."""
    return LowRank(build) if build.adapters.places else None
