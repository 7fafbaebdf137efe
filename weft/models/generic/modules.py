"""Modules with Weft's ops that stand where modules of transformers stood.

Inputs have any leading dims: transformers computes [1, T, hidden], Weft's layers [T, hidden].
"""

from __future__ import annotations

import torch
from torch import nn

from weft.layers.build import Build, Layer
from weft.layers.dense import GateUp, Linear, LMHead, RMSNorm, RowLinear, TokenEmbedding
from weft.layers.shard import Shard, joined
from weft.ops.low_rank import AdapterRows
from weft.parallel.comm import Comm
from weft.types.exchange import UNAGREED

Tensor = torch.Tensor


class Sums:
    """Sums over the tensor parallel ranks, complete when the call returns; facts of the current step.

    A forward pass of transformers cannot pause, so a step has no collective in flight beside computation.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.alone = False
        """True for the self check, which runs before ranks are connected: partial results stay partial."""
        self.exchange = UNAGREED
        """Agreement of the ranks about rows sent to experts of other ranks."""
        self.adapters: AdapterRows | None = None
        """Places of the adapters of the rows; None if no row has an adapter."""
        self.filler = False
        """True if the step has no rows. The one row of the pass is a filler, which no expert may get."""
        self.routed = 0
        """Number of calls of divided experts."""

    def __call__(self, partial: Tensor) -> Tensor:
        """Return the sum of ``partial`` over the ranks."""
        pending = None if self.alone else self.comm.all_reduce(partial)
        return partial if pending is None else pending.result()

    def gathered(self, share: Tensor, size: int) -> Tensor:
        """Return the columns of all ranks, [L, size]; share: [L, columns of a rank]."""
        if self.comm.size == 1:
            return share
        if self.alone:
            return torch.nn.functional.pad(share, (0, max(0, size - share.shape[1])))[:, :size]
        shares = self.comm.all_gather(share).result()  # [ranks, L, columns]
        return shares.transpose(0, 1).flatten(1)[:, :size].contiguous()


class FlatLinear(Layer):
    """A linear layer with outputs divided over ranks, or whole. x: [.., inputs]; returns [.., outputs]."""

    adapted = ("inner",)

    def __init__(self, inputs: int, outputs: Shard, build: Build, sums: Sums, *, bias: bool) -> None:
        super().__init__()
        self.inner = Linear(inputs, outputs, build, bias=bias)
        self._sums = sums

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x.reshape(-1, x.shape[-1]), self._sums.adapters)
        return made.view(*x.shape[:-1], made.shape[-1])


class SummedLinear(Layer):
    """A linear layer with inputs divided over ranks. Returns the sum [.., outputs]."""

    adapted = ("inner",)

    def __init__(self, inputs: Shard, outputs: int, build: Build, sums: Sums, *, bias: bool) -> None:
        super().__init__()
        self.inner = RowLinear(inputs, outputs, build, bias=bias)
        self._sums = sums

    def forward(self, x: Tensor) -> Tensor:
        made = self._sums(self.inner(x.reshape(-1, x.shape[-1]), self._sums.adapters))
        return made.view(*x.shape[:-1], made.shape[-1])


class Joined(Layer):
    """Several linear layers of one input as one matrix."""

    adapted = ("inner",)

    def __init__(self, inputs: int, parts: list[Shard], build: Build, sums: Sums, *, bias: bool) -> None:
        super().__init__()
        self._sums = sums
        self.inner = Linear(inputs, joined(*parts), build, bias=bias)
        self.sizes = [part.count for part in parts]
        self._x: Tensor | None = None
        self._made: list[Tensor] = []
        self._left = 0

    def whole(self, x: Tensor) -> Tensor:
        """Return the outputs of all layers for x [.., inputs]: [rows, outputs]."""
        made: Tensor = self.inner(x.reshape(-1, x.shape[-1]), self._sums.adapters)
        return made

    def part(self, number: int, x: Tensor) -> Tensor:
        """Return the outputs of layer ``number`` for x [.., inputs].

        The first layer computes all outputs. The outputs are dropped after the last layer has taken its part.
        """
        if self._x is not x:
            made = self.whole(x)
            self._made = list(made.view(*x.shape[:-1], made.shape[-1]).split(self.sizes, dim=-1))
            self._x, self._left = x, len(self.sizes)
        result = self._made[number]
        self._left -= 1
        if not self._left:
            self._x, self._made = None, []
        return result


class JoinedPart(Layer):
    """One linear layer of ``Joined``."""

    def __init__(self, group: Joined, number: int) -> None:
        super().__init__()
        # Only the first part shows the group to nn.Module, so that every parameter has one name.
        self.inner = group if not number else None
        self._group = (group,)
        self.number = number

    @property
    def group(self) -> Joined:
        """The matrix of all parts."""
        return self._group[0]

    def forward(self, x: Tensor) -> Tensor:
        return self._group[0].part(self.number, x)


class FlatNorm(Layer):
    """RMS norm over the last dim of x [.., size]."""

    def __init__(self, size: int, eps: float, build: Build, *, wide: bool) -> None:
        super().__init__()
        self.inner = RMSNorm(size, eps, build, wide=wide)

    @property
    def weight(self) -> nn.Parameter:
        """Weight of the norm, for code that reads its dtype."""
        return self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x.reshape(-1, x.shape[-1]))
        return made.view(x.shape)


class FlatMLP(Layer):
    """``down(activation(gate(x)) * up(x))`` for x [.., hidden]. ``inner``: intermediate size of this rank."""

    adapted = ("gate_up", "down")

    def __init__(
        self, hidden: int, inner: Shard, activation: str, build: Build, sums: Sums, *, bias: bool
    ) -> None:
        super().__init__()
        self.gate_up = GateUp(hidden, inner, activation, build, bias=bias)
        self.down = RowLinear(inner, hidden, build, bias=bias)
        self._sums = sums
        self._partial = not inner.whole

    def forward(self, x: Tensor) -> Tensor:
        adapters = self._sums.adapters
        made: Tensor = self.down(self.gate_up(x.reshape(-1, x.shape[-1]), adapters), adapters)
        return (self._sums(made) if self._partial else made).view(x.shape)


class SharedEmbedding(Layer):
    """Token embedding divided over ranks by rows, times ``scale``. ids: int64 [..]; returns [.., hidden]."""

    def __init__(self, vocab: int, hidden: int, build: Build, sums: Sums, *, tied: bool) -> None:
        super().__init__()
        self.table = TokenEmbedding(vocab, hidden, build, tied=tied)
        self._sums = sums
        self._dtype = build.dtype
        self.scale: Tensor | None = None
        """[] in the model's dtype; None for 1."""

    def forward(self, ids: Tensor) -> Tensor:
        made = self.table(ids.reshape(-1))
        if not self.table.shard.whole:
            made = self._sums(made)
        made = made if self.scale is None else made * self.scale
        return made.view(*ids.shape, made.shape[-1])


class SharedHead(Layer):
    """Output head on the rows of a ``SharedEmbedding``. x: [1, L, hidden]; returns [1, L, vocab]."""

    def __init__(
        self, embedding: SharedEmbedding, build: Build, sums: Sums, *, tied: bool, bias: int
    ) -> None:
        """``bias``: size of the bias, 0 for none."""
        super().__init__()
        self.inner = LMHead(embedding.table, build, tied=tied)
        self.bias = build.weight(bias) if bias else None
        self._size = embedding.table.shard.size
        self._sums = sums

    def forward(self, x: Tensor) -> Tensor:
        made = self._sums.gathered(self.inner(x.reshape(-1, x.shape[-1])), self._size)
        made = made if self.bias is None else made + self.bias
        return made.view(*x.shape[:-1], self._size)
