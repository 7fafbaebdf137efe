"""LoRA adapters of the embedding and of the output head: low-rank parts, and whole matrices.

    embedding   y[t] += B A[:, id of t]       A is stored as rows by token id; or y[t] = row of a whole table
    head        y[t] += B A x[t]              as in every linear layer; or y[t] = W x[t] with a whole matrix

Ranks divide both by token ids, so the results are partial as those of the layers are.
"""

from __future__ import annotations

import torch

from weft.layers.build import Build
from weft.layers.low_rank import LowRank
from weft.ops.low_rank import AdapterRows

Tensor = torch.Tensor


class EmbeddingAdapters:
    """Adapters of the rows of a table on this rank."""

    def __init__(self, rows: int, hidden: int, build: Build) -> None:
        options = build.adapters
        rank = options.rank
        self.low = LowRank(build)
        # The op multiplies a row of A, found by the token id, with B: the op's own A is the identity.
        self.low.allocate(1, (hidden, rank), [(0, 0, hidden)])
        assert self.low.pool is not None
        self.low.pool.a.copy_(torch.eye(rank, dtype=build.dtype).expand(options.places, 1, rank, rank))
        self.rows = torch.zeros(options.places, rows, rank, dtype=build.dtype, device=build.device)
        """[places, rows, rank]: A by token id."""
        self.whole: Tensor | None = None
        """[places, rows, hidden]: whole tables; None without memory for these."""
        if options.saved:
            shape = (options.places, rows, hidden)
            self.whole = torch.zeros(shape, dtype=build.dtype, device=build.device)
        self.changing: set[int] = set()
        """Places whose adapter changes the embedding."""
        self.replaced: set[int] = set()
        """Places with a whole table."""

    @property
    def nbytes(self) -> int:
        assert self.low.pool is not None
        return self.low.pool.nbytes + self.rows.nbytes + (0 if self.whole is None else self.whole.nbytes)

    def clear(self, place: int) -> None:
        """Remove the adapter of ``place``."""
        if place not in self.changing:
            return
        assert self.low.pool is not None
        self.rows[place].zero_()
        self.low.pool.b[place].zero_()
        self.low.pool.set_rank(place, 0)
        self.changing.discard(place)
        self.replaced.discard(place)

    def add(self, y: Tensor, ids: Tensor, others: Tensor | None, rows: AdapterRows) -> None:
        """Change the rows y [T, hidden] of a partial embedding in place. Not in a captured step.

        ids: int64 [T], rows of this rank's table. others: bool [T], rows of other ranks, where y stays 0.
        """
        if self.changing.isdisjoint(rows.present):
            return
        places = rows.numbers.clamp(min=0).to(torch.int64)
        found = self.rows.view(-1, self.rows.shape[2])[places * self.rows.shape[1] + ids]
        if others is not None:
            found = found.masked_fill(others.unsqueeze(1), 0)
        self.low.add(y, found, rows)
        for place, index in rows.groups():
            if self.whole is None or place not in self.replaced:
                continue
            at = torch.arange(len(ids), device=ids.device) if index is None else index
            own = self.whole[place][ids[at]]
            if others is not None:
                own = own.masked_fill(others[at].unsqueeze(1), 0)
            y[at] = own


class HeadAdapters:
    """Adapters of the output head on this rank."""

    def __init__(self, rows: int, hidden: int, build: Build) -> None:
        self.low = LowRank(build)
        self.low.allocate(1, (rows, hidden), [(0, 0, rows)])
        op = build.op("linear")
        self._run, self._pack, self._device = op.run, op.pack, build.device
        self._whole: dict[int, object] = {}
        self._buffer: Tensor | None = None
        """Memory of whole matrices for an op that takes plain weights."""
        shape = (build.adapters.places, rows, hidden)
        self.whole_bytes = 0
        if build.adapters.saved:
            self.whole_bytes = shape[0] * rows * hidden * build.dtype.itemsize
            if op.pack is None:
                self._buffer = torch.zeros(shape, dtype=build.dtype, device=build.device)

    @property
    def nbytes(self) -> int:
        assert self.low.pool is not None
        return self.low.pool.nbytes + self.whole_bytes

    def clear(self, place: int) -> None:
        """Remove the adapter of ``place``."""
        assert self.low.pool is not None
        if self.low.pool.ranks[place]:
            self.low.pool.clear(place)
        self._whole.pop(place, None)

    def replace(self, place: int, matrix: Tensor) -> None:
        """Use ``matrix`` [rows, hidden] for rows of ``place``."""
        if self._buffer is None:
            assert self._pack is not None
            self._whole[place] = self._pack(matrix.to(self._device))
            return
        self._buffer[place].copy_(matrix)
        self._whole[place] = self._buffer[place]

    def add(self, logits: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """Change the logits [L, rows of this rank] of hidden states x [L, hidden] in place."""
        self.low.add(logits, x, rows)
        if self._whole.keys().isdisjoint(rows.present):
            return
        for place, index in rows.groups():
            matrix = self._whole.get(place)
            if matrix is None:
                continue
            made = self._run(x if index is None else x.index_select(0, index), matrix, None)
            if index is None:
                logits.copy_(made)
            else:
                logits.index_copy_(0, index, made)
