"""Modules with Weft's ops that stand where modules of transformers stood.

Inputs have any leading dims: transformers computes [1, T, hidden], Weft's layers [T, hidden].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.layers.build import Build, Layer, Packs
from weft.layers.dense import GateUp, Linear, LMHead, RMSNorm, RowLinear, TokenEmbedding
from weft.layers.pending_codes import in_place, take_apart, take_codes
from weft.layers.shard import Shard, joined, whole
from weft.moe.experts import rank_experts
from weft.ops import torch_ops
from weft.ops.moe import Gate, Routed, has_codes
from weft.ops.routing import Rule
from weft.parallel.comm import Comm

Tensor = torch.Tensor


class Sums:
    """Sums over the tensor parallel ranks, complete when the call returns.

    A forward pass of transformers cannot pause, so a step has no collective in flight beside computation.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.alone = False
        """True for the self check, which runs before ranks are connected: partial results stay partial."""

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

    def __init__(self, inputs: int, outputs: Shard, build: Build, *, bias: bool) -> None:
        super().__init__()
        self.inner = Linear(inputs, outputs, build, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x.reshape(-1, x.shape[-1]))
        return made.view(*x.shape[:-1], made.shape[-1])


class SummedLinear(Layer):
    """A linear layer with inputs divided over ranks. Returns the sum [.., outputs]."""

    def __init__(self, inputs: Shard, outputs: int, build: Build, sums: Sums, *, bias: bool) -> None:
        super().__init__()
        self.inner = RowLinear(inputs, outputs, build, bias=bias)
        self._sums = sums

    def forward(self, x: Tensor) -> Tensor:
        made = self._sums(self.inner(x.reshape(-1, x.shape[-1])))
        return made.view(*x.shape[:-1], made.shape[-1])


class Joined(Layer):
    """Several linear layers of one input as one matrix."""

    def __init__(self, inputs: int, parts: list[Shard], build: Build, *, bias: bool) -> None:
        super().__init__()
        self.inner = Linear(inputs, joined(*parts), build, bias=bias)
        self.sizes = [part.count for part in parts]
        self._x: Tensor | None = None
        self._made: list[Tensor] = []
        self._left = 0

    def part(self, number: int, x: Tensor) -> Tensor:
        """Return the outputs of layer ``number`` for x [.., inputs].

        The first layer computes all outputs. The outputs are dropped after the last layer has taken its part.
        """
        if self._x is not x:
            made: Tensor = self.inner(x.reshape(-1, x.shape[-1]))
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
        self._number = number

    def forward(self, x: Tensor) -> Tensor:
        return self._group[0].part(self._number, x)


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

    def __init__(
        self, hidden: int, inner: Shard, activation: str, build: Build, sums: Sums, *, bias: bool
    ) -> None:
        super().__init__()
        self.gate_up = GateUp(hidden, inner, activation, build, bias=bias)
        # A whole block on every rank is no partial result: each rank adds the bias.
        self.down = (
            Linear(inner.count, hidden, build, bias=bias)
            if inner.whole
            else RowLinear(inner, hidden, build, bias=bias)
        )
        self._sums = None if inner.whole else sums

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(self.gate_up(x.reshape(-1, x.shape[-1])))
        return (made if self._sums is None else self._sums(made)).view(x.shape)


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


class RoutedExperts(Packs):
    """Experts with gate rows first; the family's own router chooses the experts.

    x: [T, hidden]; ids, weights: [T, k]; returns the weighted sum [T, hidden].
    """

    def __init__(
        self, experts: int, hidden: int, inner: Shard, top_k: int, gate: Gate, build: Build, sums: Sums
    ) -> None:
        super().__init__()
        both = joined(inner, inner).at(1)
        self.gate_up = build.matrix(experts, both.count, hidden, shard=both)
        self.down = build.matrix(experts, hidden, inner.count, shard=inner.at(2))
        self._op = build.matrix_op("moe_pieces", divided=0 if inner.whole else inner.size)
        self._rule = Rule(top_k=top_k, scoring="softmax", renormalize=False)
        self._gate = gate
        self._build = build
        self._notes = build.notes
        self._sums = None if inner.whole else sums
        self._rank: Any = None
        self._packed: Any = None

    def pack(self) -> None:
        """Pack the experts. The op wants a router; this router is never used."""
        build = self._build
        experts, hidden = self.gate_up.shape[0], self.gate_up.shape[2]
        weights = Routed(
            rule=self._rule,
            gate=self._gate,
            router=torch.zeros(experts, hidden, dtype=build.wide, device=build.device),
            dtype=build.dtype,
            gate_up=self._matrices("gate_up"),
            down=self._matrices("down"),
        )
        op = self._op
        pack = op.pack_codes if has_codes(weights) else op.pack
        self._packed = weights if pack is None else pack(weights)
        self._rank = rank_experts(op.run())
        if op.pack is not None or has_codes(weights):
            self.gate_up = self.down = None  # type: ignore[assignment]

    def _matrices(self, name: str) -> Any:
        """Return the stack ``name``: codes if loaded as codes, otherwise plain in its final memory."""
        weight = self._notes.weight(getattr(self, name))
        op = self._op
        codes = take_apart(weight) if op.apart else take_codes(weight, op.pack_codes is not None)
        if codes is not None:
            return codes
        setattr(self, name, in_place(weight))
        return getattr(self, name).data

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        scales = weights.to(torch_ops.wide(x.dtype))
        answers = self._rank.answer(x, ids.long(), scales, self._packed, False)  # [T, 1, hidden]
        made: Tensor = answers[:, 0].to(x.dtype)
        return made if self._sums is None else self._sums(made)


def all_of(size: int) -> Shard:
    """Return the shard of a dim that every rank has whole."""
    return whole(size)
