"""Linear layers and the embedding, in the two ways they are split over ranks."""

from __future__ import annotations

import torch
from torch import nn

from weft.layers.build import Build
from weft.ops.registry import choose

Tensor = torch.Tensor


class Linear(nn.Module):
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
        self._run = choose("linear", self.weight.dtype, build.device)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self._run(x, self.weight, self.bias)
        return made


class RowLinear(Linear):
    """A linear whose inputs are what ranks divide: returns a partial, which ``comm`` sums.

    The first rank alone adds the bias.
    """

    def __init__(self, inputs: int, outputs: int, build: Build, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, build, bias=bias)
        self._adds_bias = build.comm.rank == 0

    def forward(self, x: Tensor) -> Tensor:
        partial: Tensor = self._run(x, self.weight, self.bias if self._adds_bias else None)
        return partial


class Embedding(nn.Module):
    """Rows of a table. ids: int64 [T]; returns [T, hidden]."""

    def __init__(self, vocab_size: int, hidden: int, build: Build) -> None:
        super().__init__()
        self.weight = build.weight(vocab_size, hidden)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, self.weight)


class Head(nn.Module):
    """Logits of hidden states [L, hidden]: [L, vocab] in the model's dtype.

    A tied head uses the embedding's table and owns no weight.
    """

    def __init__(self, embedding: Embedding, build: Build, *, tied: bool) -> None:
        super().__init__()
        self.weight = embedding.weight if tied else build.weight(*embedding.weight.shape)
        self._run = choose("linear", build.dtype, build.device)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self._run(x, self.weight)
        return logits
