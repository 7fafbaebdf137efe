"""Experts with Weft's op where experts of transformers stood: divided inside, or whole experts per rank.

The family's own router chooses the experts on every rank. With expert parallelism rows travel to the ranks of
their experts and back (``weft.moe.parallel``). The exchange ends inside the call, because a forward pass of
transformers cannot pause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from weft.layers.build import Build, Packs
from weft.layers.pending_codes import in_place, largest_in_place, take_apart, take_codes
from weft.layers.shard import Shard, joined, picked, whole
from weft.models.generic.modules import Sums
from weft.moe.exchange_cost import ExchangeShape
from weft.moe.expert_choice import Chooser
from weft.moe.experts import RankExperts, rank_experts
from weft.moe.parallel import DividedExperts
from weft.moe.placement import Placement, in_order
from weft.ops import torch_ops
from weft.ops.moe import Gate, Routed, has_codes
from weft.ops.routing import Rule
from weft.parallel.comm import drive

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Choice:
    """Experts of rows, chosen by the router of the family."""

    experts: Tensor
    """int64 [T, k]."""
    scales: Tensor
    """Weights, wide [T, k]."""

    def __getitem__(self, rows: slice) -> Choice:
        return Choice(self.experts[rows], self.scales[rows])


class _Chosen:
    """Experts of a rank with a router that returns a ``Choice`` instead of computing one."""

    def __init__(self, inner: RankExperts) -> None:
        self.answer = inner.answer
        self.answers = inner.answers
        self.shared = inner.shared
        self.finish = inner.finish
        self.tensors = inner.tensors

    def route(self, x: Tensor, choice: Any, weights: Any) -> tuple[Tensor, Tensor, None]:
        """Return (experts, weights, no factor of a shared expert)."""
        return choice.experts, choice.scales, None


class RoutedExperts(Packs):
    """Experts with gate rows first; the family's own router chooses the experts.

    x: [T, hidden]; ids, weights: [T, k]; returns the weighted sum [T, hidden].
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        inner: Shard,
        top_k: int,
        gate: Gate,
        build: Build,
        sums: Sums,
        *,
        bias: bool = False,
    ) -> None:
        """``inner``: the rank's part of every expert. Must be whole if ranks have whole experts."""
        super().__init__()
        self._placement: Placement = ()
        mine = None
        if build.divides_experts:
            ep = build.mesh.ep
            self._placement = in_order(experts, ep.size, build.experts.redundant)
            mine = picked(self._placement[ep.rank], experts)
        count = experts if mine is None else mine.count
        both = joined(inner, inner).at(1)
        self.gate_up = build.matrix(count, both.count, hidden, shard=mine or both)
        self.down = build.matrix(count, hidden, inner.count, shard=mine or inner.at(2))
        self.gate_up_bias = build.weight(count, both.count, shard=mine or both) if bias else None
        self.down_bias = build.weight(count, hidden, shard=mine) if bias else None
        self._op = build.matrix_op("moe_pieces")
        self._inner_group = build.row_group(inner.size)
        self._rule = Rule(top_k=top_k, scoring="softmax", renormalize=False)
        self._gate = gate
        self._build = build
        self._notes = build.notes
        self._experts = experts
        self._sums = sums
        self._partial = not inner.whole
        self._adds_bias = inner.whole or build.comm.rank == 0
        """True if the rank's output includes ``down_bias``: one rank of a sum."""
        self._rank: Any = None
        self._packed: Any = None
        self.divided: DividedExperts | None = None
        """The rank's experts if ranks have whole experts; None before ``pack``."""

    def place(self, placement: Placement) -> None:
        """Select the experts of another placement. Call before the experts are loaded."""
        self._placement = placement
        mine = picked(placement[self._build.mesh.ep.rank], self._experts)
        for parameter in (self.gate_up, self.down, self.gate_up_bias, self.down_bias):
            if parameter is not None:
                self._notes.weight(parameter).note.shard = mine

    def pack(self) -> None:
        """Pack the experts. The op wants a router; this router is never used."""
        build = self._build
        hidden = self.gate_up.shape[2]
        # Taken before ``_matrices``, which replaces the parameter without notes.
        down_largest = largest_in_place(self._notes.weight(self.down))
        weights = Routed(
            rule=self._rule,
            gate=self._gate,
            router=torch.zeros(self._experts, hidden, dtype=build.wide, device=build.device),
            dtype=build.dtype,
            gate_up=self._matrices("gate_up"),
            down=self._matrices("down"),
            gate_up_bias=None if self.gate_up_bias is None else self.gate_up_bias.data,
            down_bias=self.down_bias.data if self.down_bias is not None and self._adds_bias else None,
            down_largest=down_largest,
            inner_group=self._inner_group,
        )
        op = self._op
        pack = op.pack_codes if has_codes(weights) else op.pack
        self._packed = weights if pack is None else pack(weights)
        self._rank = rank_experts(op.run())
        if op.pack is not None or has_codes(weights):
            self.gate_up = self.down = None  # type: ignore[assignment]
        if self._placement:
            self.divided = self._divide(hidden)

    def _divide(self, hidden: int) -> DividedExperts:
        """Return this rank's experts, for rows of ``hidden`` elements."""
        build = self._build
        size = self._rank.answers(build.dtype, False).itemsize
        shape = ExchangeShape(hidden, self._rule.top_k, size, False)
        return DividedExperts(
            build.mesh,
            Chooser(build.mesh.layout, build.experts.dispatch, shape, build.mesh.nccl),
            _Chosen(self._rank),
            self._packed,
            self._placement,
            exact=False,
            counts=build.experts.counts,
        )

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
        ids = ids.long()
        scales = weights.to(torch_ops.wide(x.dtype))
        if self.divided is not None:
            return self._exchanged(self.divided, x, ids, scales)
        answers = self._rank.answer(x, ids, scales, self._packed, False)  # [T, 1, hidden]
        made: Tensor = answers[:, 0].to(x.dtype)
        return self._sums(made) if self._partial else made

    def _exchanged(self, divided: DividedExperts, x: Tensor, ids: Tensor, scales: Tensor) -> Tensor:
        """Return the sum of the experts of all ranks, [T, hidden]; in the self check of this rank alone."""
        sums = self._sums
        sums.routed += 1
        if sums.alone:
            # Not ``map.find``: copies of an expert alternate by row, and rows of pieces have other numbers.
            places = torch.full((self._experts,), -1, device=x.device)
            mine = divided.map.placement[divided.mesh.ep.rank]
            places[list(mine)] = torch.arange(len(mine), device=x.device)
            answers = self._rank.answer(x, places[ids], scales, self._packed, False)
            made: Tensor = answers[:, 0].to(x.dtype)
            return made
        # A filler row must reach no rank: the ranks agreed on the number of rows.
        rows = 0 if sums.filler else len(x)
        choice: Any = Choice(ids[:rows], scales[:rows])
        made = drive(divided.steps(x[:rows], choice, sums.exchange))
        return torch.zeros_like(x) if sums.filler else made


def part_of_experts(size: int, build: Build, *, divides: bool) -> Shard:
    """Return the rank's part of the ``size`` inner columns of an expert.

    ``divides``: True if the plan divides every expert over the tensor parallel ranks.
    """
    return build.part(size) if divides and not build.divides_experts else whole(size)
