"""Linear layers and the embedding, in the two ways they are split over ranks."""

from __future__ import annotations

from typing import Any

import torch

from weft.layers.build import Build, Packs
from weft.ops import torch_ops

Tensor = torch.Tensor


class Linear(Packs):
    """``x @ weight.T + bias``; its outputs are what ranks divide (column-parallel).

    x: [T, inputs]; returns [T, outputs] in the model's dtype. ``wide`` keeps weight and computation in
    float32 (float64 in a float64 model) whatever the model's dtype: x must come in that dtype.
    """

    def __init__(
        self, inputs: int, outputs: int, build: Build, *, bias: bool = False, wide: bool = False
    ) -> None:
        super().__init__()
        self.weight = build.weight(outputs, inputs, wide=wide)
        self.bias = build.weight(outputs, wide=wide) if bias else None
        self._op = build.matrix_op("linear", wide=wide)
        self._packed: object = None

    def pack(self) -> None:
        self._packed = self._give("weight", self._op)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self._op.run(x, self._packed, self.bias)
        return made


class RowLinear(Linear):
    """A linear whose inputs are what ranks divide: returns a partial, which ``comm`` sums.

    The first rank alone adds the bias.
    """

    def __init__(self, inputs: int, outputs: int, build: Build, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, build, bias=bias)
        self._adds_bias = build.comm.rank == 0

    def forward(self, x: Tensor) -> Tensor:
        partial: Tensor = self._op.run(x, self._packed, self.bias if self._adds_bias else None)
        return partial


class Embedding(Packs):
    """Rows of a table. ids: int64 [T]; returns [T, hidden].

    With ``tied`` the table is the head's matrix too. Where the op that computes logits has a layout of its
    own and can read rows from it, both share that one; else the head makes its own copy of the table.
    """

    def __init__(self, vocab_size: int, hidden: int, build: Build, *, tied: bool = False) -> None:
        super().__init__()
        self.weight = build.weight(vocab_size, hidden)
        matrix, rows = build.op("linear"), build.op("embedding")
        self._matrix = matrix if tied and rows.name == matrix.name else None
        self._rows = rows.run if self._matrix is not None else torch_ops.embedding
        self.table: Any = None
        """What ``forward`` reads."""

    @property
    def shared(self) -> bool:
        """Whether ``table`` is in the layout of the head's op."""
        return self._matrix is not None

    def pack(self) -> None:
        self.table = self.weight if self._matrix is None else self._give("weight", self._matrix)

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self._rows(ids, self.table)
        return made


class Head(Packs):
    """Logits of hidden states [L, hidden]: [L, vocab] in the model's dtype.

    A tied head uses the embedding's table and owns no weight.
    """

    def __init__(self, embedding: Embedding, build: Build, *, tied: bool) -> None:
        super().__init__()
        self._tied_to = (embedding,) if tied else ()  # in a tuple: its parameters are not the head's
        self.weight = None if tied else build.weight(*embedding.weight.shape)
        self._op = build.op("linear")
        self._packed: object = None

    def pack(self) -> None:
        """After the embedding's."""
        if not self._tied_to:
            self._packed = self._give("weight", self._op)
            return
        table = self._tied_to[0].table
        if self._op.pack is not None and not self._tied_to[0].shared:
            table = self._op.pack(table.data)
        self._packed = table

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self._op.run(x, self._packed, None)
        return logits
