"""The low-rank part of a linear layer: the matrices of the adapters in the pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.layers.build import Build
from weft.ops.low_rank import AdapterRows, LowRankPool, make_pool

Tensor = torch.Tensor


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

    def add(self, y: Tensor, x: Tensor, rows: AdapterRows | None) -> None:
        """Add the low-rank products of the rows with an adapter to y [T, outputs], in place.

        x: [T, inputs]. rows: None if no row has an adapter.
        """
        if rows is not None and self.pool is not None:
            self._op(y, x, self.pool, rows)


def make_low_rank(build: Build) -> LowRank | None:
    """Return the low-rank part of a layer, or None without places for adapters."""
    return LowRank(build) if build.adapters.places else None
