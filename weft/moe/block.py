"""A routed feed-forward block: router, experts, shared expert, combination.

Source: Shazeer et al. 2017, arXiv 1701.06538; shared experts, Dai et al. 2024, arXiv 2401.06066. The rules
for choosing experts are in ``weft.ops.routing``. The whole block is one op, ``moe``.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import nn

from weft.config.spec import MoESpec
from weft.layers.build import Build, FeedForward, Packs
from weft.layers.pending_codes import in_place, largest_in_place, take_apart, take_codes
from weft.layers.shard import Shard, joined, picked, whole
from weft.moe.adapted import carried, make_expert_adapters
from weft.moe.exchange_cost import ExchangeShape
from weft.moe.expert_choice import Chooser
from weft.moe.experts import RankExperts, rank_experts, settled
from weft.moe.parallel import DividedExperts
from weft.moe.placement import Placement, in_order
from weft.moe.products import Products
from weft.ops.low_rank import AdapterRows
from weft.ops.moe import Contribution, ExpertSum, Gate, Routed, has_codes
from weft.ops.routing import Rule
from weft.ops.row_routes import RowRoutes
from weft.parallel.comm import Comm, Pending, reduced
from weft.types.exchange import UNAGREED, Exchange

Tensor = torch.Tensor


class ExpertRouter(nn.Module):
    """Parameters of the router. All are float32 (float64 in a float64 model), except the int64 table of
    experts by token id."""

    def __init__(self, hidden: int, spec: MoESpec, build: Build, vocab: int) -> None:
        """``vocab``: size of the table of experts by token id; 0 for a router without a table."""
        super().__init__()
        self.weight = build.weight(spec.experts, hidden, wide=True)
        self.bias = build.weight(spec.experts, wide=True) if spec.bias else None
        self.correction = build.weight(spec.experts, wide=True) if spec.correction and not vocab else None
        self.table: nn.Parameter | None = None
        if vocab:
            ids = torch.arange(spec.top_k, device=build.device).repeat(vocab, 1)
            self.table = nn.Parameter(ids, requires_grad=False)


class Experts(nn.Module):
    """Stacked weights of the experts. Gate rows precede up rows; experts without a gate have up rows only.

    Without ``mine`` every expert is divided over ranks. With ``mine`` this rank has whole experts.
    """

    def __init__(self, hidden: int, spec: MoESpec, build: Build, mine: Shard | None) -> None:
        """``mine``: the experts of this rank; None divides every expert over the ranks."""
        super().__init__()
        hidden = spec.latent or hidden
        inner = build.part(spec.intermediate) if mine is None else whole(spec.intermediate)
        count = spec.experts if mine is None else mine.count
        both = (joined(inner, inner) if spec.gated else inner).at(1)
        up, down = (both, inner.at(2)) if mine is None else (mine, mine)
        self.gate_up = build.matrix(count, both.count, hidden, shard=up)
        self.down = build.matrix(count, hidden, inner.count, shard=down)
        self.gate_up_bias = build.weight(count, both.count, shard=up) if spec.bias else None
        self.down_bias = build.weight(count, hidden, shard=mine) if spec.bias else None
        self.adds_bias = mine is not None or build.comm.rank == 0
        """True if the rank's output includes ``down_bias``."""


class Shared(nn.Module):
    """The expert of every token. Several shared experts are stored side by side as one wide expert.

    The shared expert is divided over ranks, except with divided experts: then every rank has a whole copy.
    """

    def __init__(self, hidden: int, spec: MoESpec, build: Build) -> None:
        super().__init__()
        inner = whole(spec.shared) if build.divides_experts else build.part(spec.shared)
        both = joined(inner, inner) if spec.gated else inner
        self.gate_up = build.matrix(both.count, hidden, shard=both)
        self.down = build.matrix(hidden, inner.count, shard=inner.at(1))
        self.gate = build.weight(1, hidden, wide=True) if spec.shared_gate else None


class RoutedMLP(FeedForward, Packs):
    """The ``top_k`` experts of each token, summed by weight in top-k order, plus the shared expert.

    The router computes in float32 (float64 in a float64 model); ties go to the lowest expert. With
    ``hashed``, the size of the vocabulary, experts come from a table by token id, and scores only give
    weights. If ranks have whole experts, rows travel to the experts and back (``weft.moe.parallel``).
    """

    def __init__(self, hidden: int, spec: MoESpec, activation: str, build: Build, *, hashed: int = 0) -> None:
        """``hashed``: size of the vocabulary for a table of experts by token id; 0 for none.

        Raises ConfigError if no implementation of the op fits, ValueError for too many redundant copies of
        experts.
        """
        super().__init__()
        self.reads_ids = hashed > 0
        self.number: int | None = None
        """Number among the routed layers of the model, for ``RowRoutes``. Set by ``Model.pack``; None for
        layers without routes in answers."""
        self.router = ExpertRouter(hidden, spec, build, hashed)
        self._placement: Placement = ()
        mine = None
        if build.divides_experts:
            ep = build.mesh.ep
            self._placement = in_order(spec.experts, ep.size, build.experts.redundant)
            mine = picked(self._placement[ep.rank], spec.experts)
        self.experts = Experts(hidden, spec, build, mine)
        self.shared = Shared(hidden, spec, build) if spec.shared else None
        self._rule = Rule(
            top_k=spec.top_k,
            scoring=spec.scoring,
            renormalize=spec.renormalize,
            groups=spec.groups,
            top_groups=spec.top_groups,
            group_rule=spec.group_rule,
            scale=spec.scale,
        )
        self._gate = Gate(activation=activation, limit=spec.limit, alpha=spec.alpha)
        self._inner_group = build.row_group(spec.intermediate)
        self._shared_inner_group = build.row_group(spec.shared)
        self._build = build
        self._notes = build.notes
        op = "moe" if spec.gated else "moe_plain"
        self.gated = spec.gated
        self.low = make_expert_adapters(build, spec)
        """Adapters of the experts and the shared expert; None if adapters cannot change any of these."""
        # Rows with such adapters need the parts of the op, and both ops read one packing.
        self._op = build.matrix_op(f"{op}_pieces" if build.divides_experts or self.low else op)
        parts = self._op if build.divides_experts or self.low else build.same_packing(f"{op}_pieces")
        self._rank = rank_experts(parts.run())
        block = self._op if self.low is None or build.divides_experts else build.matrix_op(op)
        self._run, self._terms = block.run, block.terms
        self._packed: Any = None
        self.divided: DividedExperts | None = None
        """The rank's experts if ranks have whole experts; None before ``pack``."""
        self.varying = build.divides_experts and build.experts.moving and not build.invariant
        """True if sums over ranks are grouped by the copies of experts. The last bits of a row then depend on
        the copies that compute the row."""

    @property
    def products(self) -> Products:
        """Products with single matrices of this rank."""
        return self._rank.products(self._packed)

    @property
    def experts_here(self) -> Sequence[int]:
        """Experts of this rank, in order of their local places."""
        placement = self._placement if self.divided is None else self.divided.map.placement
        count = self.router.weight.shape[0]
        return placement[self._build.mesh.ep.rank] if placement else range(count)

    def place(self, placement: Placement) -> None:
        """Select the experts of another placement. Call before the experts are loaded."""
        self._placement = placement
        mine = picked(placement[self._build.mesh.ep.rank], self.router.weight.shape[0])
        for parameter in self.experts.parameters():
            self._notes.weight(parameter).note.shard = mine

    def pack(self) -> None:
        """Pack the weights for the op, and with divided experts make ``divided``.

        Plain matrices are dropped if the op has its own layout.
        """
        router = self.router
        experts = self.experts
        shared = self.shared
        # Taken before ``_matrices``, which replaces parameters without notes.
        down_largest = largest_in_place(self._notes.weight(experts.down))
        shared_down_largest = None if shared is None else largest_in_place(self._notes.weight(shared.down))
        weights = Routed(
            rule=self._rule,
            gate=self._gate,
            router=_data(router.weight),
            router_bias=_data(router.bias),
            correction=_data(router.correction),
            table=_data(router.table),
            dtype=self._build.dtype,
            gate_up=self._matrices(experts, "gate_up"),
            down=self._matrices(experts, "down"),
            gate_up_bias=_data(experts.gate_up_bias),
            down_bias=_data(experts.down_bias) if experts.adds_bias else None,
            shared_gate_up=None if shared is None else self._matrices(shared, "gate_up"),
            shared_down=None if shared is None else self._matrices(shared, "down"),
            shared_gate=None if shared is None else _data(shared.gate),
            down_largest=down_largest,
            shared_down_largest=shared_down_largest,
            inner_group=self._inner_group,
            shared_inner_group=self._shared_inner_group,
        )
        weights = self._completed(weights)
        pack = self._op.pack_codes if has_codes(weights) else self._op.pack
        self._packed = weights if pack is None else pack(weights)
        if self._placement:
            self.divided = self._divide(self._packed)
        if self._op.pack is None and not has_codes(weights):
            return
        # Drop plain matrices now: the op has a layout of packed matrices.
        for module in (experts, shared):
            if module is not None:
                module.gate_up = module.down = None  # type: ignore[assignment]

    def _completed(self, weights: Routed) -> Routed:
        """Return the weights of the op, from the weights that every routed block has."""
        return weights

    def _matrices(self, holder: Experts | Shared, name: str) -> Any:
        """Return the matrices ``name``: codes if loaded as codes and accepted by the op, otherwise plain.

        Codes leave the note; a plain parameter is put in its final memory.
        """
        weight = self._notes.weight(getattr(holder, name))
        apart = self._op.apart and weight.parameter.dim() == 3
        codes = take_apart(weight) if apart else take_codes(weight, self._op.pack_codes is not None)
        if codes is not None:
            return codes
        setattr(holder, name, in_place(weight))
        return getattr(holder, name).data

    def _divide(self, weights: Any) -> DividedExperts:
        """Return this rank's experts for ``weights`` packed by the op."""
        build = self._build
        pieces = self._run()
        size = rank_experts(pieces).answers(build.dtype, build.invariant).itemsize
        shape = ExchangeShape(self.router.weight.shape[1], self._rule.top_k, size, build.invariant)
        return DividedExperts(
            build.mesh,
            Chooser(build.mesh.layout, build.experts.dispatch, shape, build.mesh.nccl),
            pieces,
            weights,
            self._placement,
            exact=build.invariant,
            counts=build.experts.counts,
            low=self.low,
        )

    def steps(
        self,
        comm: Comm,
        x: Tensor,
        ids: Tensor | None,
        exchange: Exchange = UNAGREED,
        adapters: AdapterRows | None = None,
        routes: RowRoutes | None = None,
    ) -> Generator[Pending, None, Tensor]:
        ids, packed = self._settled(x, ids, routes)
        if self.divided is not None:
            return (yield from self.divided.steps(x, ids, exchange, adapters, packed))
        return (yield from reduced(comm, self._whole(x, ids, packed, adapters)))

    def terms(
        self,
        comm: Comm,
        x: Tensor,
        ids: Tensor | None,
        exchange: Exchange = UNAGREED,
        adapters: AdapterRows | None = None,
        routes: RowRoutes | None = None,
    ) -> Generator[Pending, None, Contribution]:
        """Return the block's contribution as terms, if this rank has all parts of every expert."""
        changes = self.low is not None and self.low.concerns(adapters)
        if self._terms is None or comm.size > 1 or changes:
            return (yield from self.steps(comm, x, ids, exchange, adapters, routes))
        terms: ExpertSum = self._terms(x, *self._settled(x, ids, routes))
        return terms

    def _settled(self, x: Tensor, ids: Tensor | None, routes: RowRoutes | None) -> tuple[Tensor | None, Any]:
        """Return (ids, weights) of a step, with the experts of ``routes`` in place of the router's."""
        if routes is None or self.number is None:
            return ids, self._packed
        return settled(self._rank, x, ids, self._packed, self.number, routes)

    def forward(self, x: Tensor, ids: Tensor | None = None, adapters: AdapterRows | None = None) -> Tensor:
        """Return a partial result, for a rank with a part of every expert.

        x: [T, hidden]; ids: int64 [T], token ids of the rows, needed with ``reads_ids``.
        """
        return self._whole(x, ids, self._packed, adapters)

    def _whole(self, x: Tensor, ids: Tensor | None, packed: Any, adapters: AdapterRows | None) -> Tensor:
        """Return ``forward`` with the weights ``packed``."""
        if self.low is not None and adapters is not None and self.low.concerns(adapters):
            return self.low.block(self._rank, self._run, x, ids, packed, adapters)
        partial: Tensor = self._run(x, ids, packed)
        return partial

    def _answers(
        self, parts: RankExperts, x: Tensor, experts: Tensor, scales: Tensor, rows: AdapterRows | None
    ) -> Tensor:
        """Return the weighted sum of the experts, [T, 1, hidden], with all experts on this rank."""
        if self.low is None or rows is None or not self.low.concerns(rows):
            return parts.answer(x, experts, scales, self._packed, False)
        return self.low.answer(parts, x, carried(experts, rows), scales, self._packed, False)


def _data(weight: nn.Parameter | None) -> Any:
    return None if weight is None else weight.data
