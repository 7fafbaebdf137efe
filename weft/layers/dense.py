"""Dense layers: linear layers and the embedding, in both ways of division over ranks; the RMS norm; the dense
feed-forward block.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from weft.layers.adapted_tables import EmbeddingAdapters, HeadAdapters
from weft.layers.build import Build, FeedForward, Layer, Packs
from weft.layers.low_rank import make_low_rank
from weft.layers.pending_codes import Weight, has_pending_codes, in_place, put_codes, take_codes
from weft.layers.shard import Shard, joined, whole
from weft.ops import torch_ops
from weft.ops.low_rank import AdapterRows
from weft.ops.moe import Contribution
from weft.parallel.comm import Pending, awaited

Tensor = torch.Tensor


class Linear(Packs):
    """``x @ weight.T + bias`` with outputs divided over ranks (column-parallel) according to ``outputs``.

    x: [T, inputs]; returns [T, outputs of this rank] in the model's dtype. ``wide`` keeps weight and
    computation in float32 (float64 in a float64 model) for any model dtype; x must have the wide dtype.
    """

    def __init__(
        self, inputs: int, outputs: int | Shard, build: Build, *, bias: bool = False, wide: bool = False
    ) -> None:
        super().__init__()
        shard = whole(outputs) if isinstance(outputs, int) else outputs
        self.weight = build.matrix(shard.count, inputs, shard=shard, wide=wide)
        self.bias = build.weight(shard.count, shard=shard, wide=wide) if bias else None
        self._op = build.matrix_op("linear", wide=wide)
        self._notes = build.notes
        self._packed: object = None
        self.low = None if wide else make_low_rank(build)
        """Adapters of the matrix; None without places for adapters."""
        if self.low is not None:
            self.low.base = lambda x: self._op.run(x, self._packed, None)

    def pack(self) -> None:
        self._packed = self._give("weight", self._op)

    def forward(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """``adapters``: places of the rows; None if no row has an adapter."""
        result: Tensor = self._op.run(x, self._packed, self.bias)
        if self.low is not None and adapters is not None:
            self.low.add(result, x, adapters, self.bias)
        return result


class RowLinear(Packs):
    """A linear layer with inputs divided over ranks according to ``inputs``. Returns a partial result.

    x: [T, inputs of this rank]; returns [T, outputs], to be summed over ranks. Only the first rank adds the
    bias. If every rank has all inputs, the result is no part, and every rank adds the bias.
    """

    def __init__(self, inputs: Shard, outputs: int, build: Build, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = build.matrix(outputs, inputs.count, shard=inputs.at(1))
        self.bias = build.weight(outputs) if bias else None
        self._op = build.matrix_op("linear", divided=inputs.size)
        self._notes = build.notes
        self._packed: object = None
        self._adds_bias = inputs.whole or build.comm.rank == 0
        self.low = make_low_rank(build)
        """Adapters of the matrix; None without places for adapters."""
        if self.low is not None:
            self.low.base = lambda x: self._op.run(x, self._packed, None)

    def pack(self) -> None:
        self._packed = self._give("weight", self._op)

    def forward(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """``adapters``: places of the rows; None if no row has an adapter."""
        bias = self.bias if self._adds_bias else None
        partial: Tensor = self._op.run(x, self._packed, bias)
        # Added before the sum over ranks: A has the inputs of this rank, so the products are partial, too.
        if self.low is not None and adapters is not None:
            self.low.add(partial, x, adapters, bias)
        return partial


class TokenEmbedding(Packs):
    """Rows of a table divided over ranks. ids: int64 [T]; returns a partial result, [T, hidden].

    With ``tied`` the table is also the head's matrix. If the op for logits has its own layout and can read
    rows from the layout, embedding and head share one table. Otherwise the head copies the table. A table of
    codes always has the layout of the op for logits. With ``quantization`` a tied table is rounded to 8 bits,
    like all heads.
    """

    def __init__(
        self, vocab_size: int, hidden: int, build: Build, *, tied: bool = False, adapted: bool = False
    ) -> None:
        """``adapted``: with memory for adapters of the table and of the head, if the build has places."""
        super().__init__()
        self.shard = build.part(vocab_size)
        """The rank's rows. The table has the size of the largest share, padded with zero rows."""
        rows_of_all = -(-vocab_size // build.comm.size)
        self.weight = build.matrix(rows_of_all, hidden, shard=self.shard)
        self._notes = build.notes
        self._first = self.shard.spans[0][0]
        self._coded = False
        matrix = build.op("linear")
        rows = build.op("embedding")
        self._matrix = matrix if tied and rows.name == matrix.name else None
        self._rows = rows.run if self._matrix is not None else torch_ops.embedding
        self._codes_of = matrix.pack_codes
        self._rounds = tied and build.quantization != "none"
        self._coded_rows = functools.partial(build.op("coded_embedding").run, dtype=build.dtype)
        self.table: Any = None
        """Table in the layout for ``forward``."""
        places = build.adapters.places if adapted else 0
        self.low = EmbeddingAdapters(rows_of_all, hidden, build) if places else None
        """Adapters of the table; None without places for adapters."""

    @property
    def shared(self) -> bool:
        """True if ``table`` has the layout of the head's op."""
        return self._matrix is not None or self._coded

    def pack(self) -> None:
        """Make ``table`` from the weight: codes, the layout shared with the head, or the plain weight.

        A packed weight becomes None.
        """
        if self._rounds:
            _round(self._notes.weight(self.weight))
        codes = take_codes(self._notes.weight(self.weight), self._codes_of is not None)
        if codes is not None and self._codes_of is not None:
            self.table = self._codes_of(codes)
            self._rows = self._coded_rows
            self._coded = True
            setattr(self, "weight", None)  # noqa: B010
            return
        self.weight = in_place(self._notes.weight(self.weight))
        self.table = self.weight if self._matrix is None else self._give("weight", self._matrix)

    def forward(self, ids: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Return the rows of ``ids``, [T, hidden], with zeros for rows of other ranks. ``adapters``: places
        of the rows; None if no row has an adapter."""
        if self.shard.whole:
            result: Tensor = self._rows(ids, self.table)
            if self.low is not None and adapters is not None:
                self.low.add(result, ids, None, adapters)
            return result
        local = ids - self._first  # [T], row of the rank's table
        # Rows of other ranks are 0 here, so the sum over ranks is the embedding.
        others = (local < 0) | (local >= self.shard.count)
        partial: Tensor = self._rows(local.masked_fill_(others, 0), self.table)
        partial = partial.masked_fill_(others.unsqueeze(1), 0)
        if self.low is not None and adapters is not None:
            self.low.add(partial, local, others, adapters)
        return partial


def _round(head: Weight) -> None:
    """Replace the matrix by codes of 8 bits on the same device. A head waiting on the host moves as codes."""
    if not has_pending_codes(head):
        put_codes(head, 0, 0, torch_ops.to_int8_codes(head.parameter.detach()))


class LMHead(Packs):
    """Logits of hidden states [L, hidden], for the part of the vocabulary in this rank's embedding.

    A tied head uses the embedding's table and owns no weight. With ``quantization`` heads have 8 bits,
    independent of other matrices.
    """

    def __init__(self, embedding: TokenEmbedding, build: Build, *, tied: bool) -> None:
        super().__init__()
        # a tuple hides the embedding's parameters from nn.Module
        self._tied_to = (embedding,) if tied else ()
        self.weight = None if tied else build.matrix(*embedding.weight.shape, shard=embedding.shard)
        self._vocab_size = embedding.shard.size
        self._comm = build.comm
        self._op = build.op("linear")
        self._notes = build.notes
        self._rounds = build.quantization != "none"
        self._packed: object = None
        rows, hidden = embedding.weight.shape
        self.low = HeadAdapters(rows, hidden, build) if embedding.low is not None else None
        """Adapters of the head; None without places for adapters."""
        if self.low is not None:
            self.low.low.base = lambda x: self._op.run(x, self._packed, None)

    @property
    def tied(self) -> bool:
        """True if the head uses the embedding's table."""
        return bool(self._tied_to)

    def pack(self) -> None:
        """Pack the head. The embedding must be packed first."""
        if not self._tied_to:
            if self._rounds:
                assert self.weight is not None
                _round(self._notes.weight(self.weight))
            self._packed = self._give("weight", self._op)
            return
        table = self._tied_to[0].table
        if self._op.pack is not None and not self._tied_to[0].shared:
            table = self._op.pack(table.data)
        self._packed = table

    def forward(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        logits: Tensor = self._op.run(x, self._packed, None)
        if self.low is not None and adapters is not None:
            self.low.add(logits, x, adapters)
        return logits

    def steps(self, x: Tensor, adapters: AdapterRows | None = None) -> Generator[Pending, None, Tensor]:
        """Return the logits of all ranks, [L, vocab] in the model's dtype. Yields once with several ranks.
        ``adapters``: places of the rows."""
        mine = self.forward(x, adapters)
        if self._comm.size == 1:
            return mine
        shares = yield from awaited(self._comm, self._comm.all_gather(mine))  # [ranks, L, rows of all]
        return shares.transpose(0, 1).flatten(1)[:, : self._vocab_size].contiguous()


class NoHead(nn.Module):
    """Substitute for a head without weights in the checkpoint: every logit is 0.

    Requests of such a model never sample (``check_submit``). But captured CUDA graphs contain rows with
    samples, which need a head.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    def steps(self, x: Tensor, adapters: AdapterRows | None = None) -> Generator[Pending, None, Tensor]:
        """Return zeros [L, vocab] in the model's dtype, for hidden states ``x`` [L, hidden]."""
        yield from ()
        return x.new_zeros(len(x), self._vocab_size)


class RMSNorm(Layer):
    """RMS norm over the last dim, of ``size``, in float32 (float64 in a float64 model). Keeps x's dtype.

    ``wide``: the weight is stored in float32 (float64).
    Source: Zhang and Sennrich 2019, arXiv 1910.07467.
    """

    def __init__(self, size: int, eps: float, build: Build, *, wide: bool = False) -> None:
        super().__init__()
        self.weight = build.weight(size, wide=wide)
        self._eps = eps
        self._norm = build.op("rms_norm").run
        self._add_norm = build.op("add_rms_norm").run

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self._norm(x, self.weight, self._eps)
        return result

    def add(self, x: Tensor, delta: Contribution | None) -> tuple[Tensor, Tensor]:
        """Return (x + delta, norm of the sum). The sum is the new residual stream and may overwrite x."""
        result: tuple[Tensor, Tensor] = self._add_norm(x, delta, self.weight, self._eps)
        return result


class GateUp(Packs):
    """``activation(gate(x)) * up(x)`` with outputs divided over ranks (column-parallel).

    ``weight`` contains both matrices, gate first: [2 * intermediate, hidden]. ``bias`` has the same order.
    With places for adapters, product and activation are two ops for every row, because the low-rank product
    comes between them. So the bits of a row do not depend on the adapters of other rows.
    """

    def __init__(
        self, hidden: int, intermediate: Shard, activation: str, build: Build, *, bias: bool
    ) -> None:
        super().__init__()
        both = joined(intermediate, intermediate)
        self.weight = build.matrix(both.count, hidden, shard=both)
        self.bias = build.weight(both.count, shard=both) if bias else None
        self._activation = activation
        self.low = make_low_rank(build)
        """Adapters of both matrices; None without places for adapters."""
        # Layouts of "gated_linear" can interleave both matrices.
        self._op = build.matrix_op("linear" if build.adapters.apart else "gated_linear")
        self._gated = build.op("gated").run if build.adapters.apart else None
        self._notes = build.notes
        self._packed: object = None
        if self.low is not None:
            self.low.base = lambda x: self._op.run(x, self._packed, None)

    def pack(self) -> None:
        self._packed = self._give("weight", self._op)

    def forward(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """``adapters``: places of the rows; None if no row has an adapter."""
        result: Tensor
        if self._gated is None:
            result = self._op.run(x, self._packed, self.bias, self._activation)
            return result
        both: Tensor = self._op.run(x, self._packed, self.bias)
        if self.low is not None and adapters is not None:
            self.low.add(both, x, adapters, self.bias)
        result = self._gated(both, self._activation)
        return result


class GatedMLP(FeedForward):
    """``down(activation(gate(x)) * up(x))``, a partial result. Source: Shazeer 2020, arXiv 2002.05202."""

    adapted = ("gate_up", "down")

    def __init__(
        self, hidden: int, intermediate: int, activation: str, build: Build, *, bias: bool = False
    ) -> None:
        super().__init__()
        inner = build.part(intermediate)
        self.gate_up = GateUp(hidden, inner, activation, build, bias=bias)
        self.down = RowLinear(inner, hidden, build, bias=bias)

    def forward(self, x: Tensor, ids: Tensor | None = None, adapters: AdapterRows | None = None) -> Tensor:
        """Return the partial result for x [T, hidden]. ``ids`` are not read."""
        partial: Tensor = self.down(self.gate_up(x, adapters), adapters)
        return partial
