"""A routed block whose experts are divided over ranks.

    route -> rows to their experts' ranks -> experts -> answers home -> sum in top-k order, then shared expert

Where the ranks of a replica all have its rows, each is home to its slice of them, and the slices are
gathered in the end; in the form ``reduce`` all are home to all. Routers and shared experts are whole on every
rank.

The sums of all forms have the same bits (``weft.moe.dispatch``), so which one is taken may follow from what a
step is made of. Under --deterministic experts answer one by one, and the bits are those of one rank.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

import torch

from weft.moe import placement as placing
from weft.moe.choice import Chooser
from weft.moe.dispatch import FORMS, Rows, Work
from weft.moe.experts import rank_experts
from weft.moe.placement import Placement
from weft.parallel.comm import Pending, awaited
from weft.parallel.group_comm import ONE_SHOT
from weft.parallel.mesh import Mesh
from weft.types.exchange import Exchange

Tensor = torch.Tensor


class Map:
    """A placement as tensors: which rank and place each copy of an expert has. Changed in place."""

    def __init__(self, placement: Placement, experts: int, device: torch.device) -> None:
        most = max(1, min(len(placement), 1 + sum(map(len, placement)) - experts))
        self._columns = torch.zeros(3, experts, most, dtype=torch.int64, device=device)
        self._single = most == 1
        self.placement: Placement = ()
        self.set(placement)

    def __len__(self) -> int:
        """Experts."""
        return self._columns.shape[1]

    def set(self, placement: Placement) -> None:
        """Takes another placement of the same experts. Raises ValueError for one that lacks some."""
        _, experts, most = self._columns.shape
        placing.check(placement, experts)
        rows = []
        for of in placing.copies(placement, experts):
            there = of + [of[0]] * (most - len(of))
            rows.append([[rank for rank, _ in there], [place for _, place in there], [len(of)] * most])
        self._columns.copy_(torch.tensor(rows).transpose(0, 1))
        self.placement = placement

    def find(self, chosen: Tensor, turn: int) -> tuple[Tensor, Tensor]:
        """Rank and place, int64 [n, k] each, of the experts ``chosen`` [n, k]. Copies take turns by row."""
        ranks = self._columns[0]
        places = self._columns[1]
        count = self._columns[2]
        if self._single:
            return ranks[chosen, 0], places[chosen, 0]
        rows = torch.arange(turn, turn + len(chosen), device=chosen.device).unsqueeze(1)
        copy = rows % count[chosen, 0]
        return ranks[chosen, copy], places[chosen, copy]


class Slice(NamedTuple):
    """A rank's part of the rows that the ranks of its replica have in common."""

    begin: int
    end: int
    each: int
    """Rows of a whole part."""


def slice_of(rows: int, rank: int, ranks: int) -> Slice:
    """Parts are neighbours, of one size as far as rows go; the last may be empty."""
    each = -(-rows // ranks)
    return Slice(min(rows, rank * each), min(rows, (rank + 1) * each), each)


class DividedExperts:
    """The experts of one layer, divided over ranks. ``weights`` has all of the router and this rank's
    experts, in order of their places, as the implementation ``pieces`` of the op ``moe_pieces`` takes
    them."""

    def __init__(
        self,
        mesh: Mesh,
        chooser: Chooser,
        pieces: Any,
        weights: Any,
        placement: Placement,
        *,
        exact: bool,
        counts: bool,
    ) -> None:
        """exact: experts answer one by one. counts: tokens of each expert are counted, for rebalancing."""
        self.mesh = mesh
        self.chooser = chooser
        self.weights, self._mine = weights, rank_experts(pieces)
        device = weights.device
        experts = weights.experts
        self.map = Map(placement, experts, device)
        self._exact = exact
        self.loads = torch.zeros(experts, dtype=torch.int64, device=device) if counts else None
        """Rows that chose each expert, of those that this rank is home to."""

    def steps(self, x: Tensor, ids: Tensor | None, exchange: Exchange) -> Generator[Pending, None, Tensor]:
        """The whole block: x [T, hidden], the same on all ranks of a replica; ids int64 [T]."""
        form, most = self.chooser.choose(len(x), exchange)
        if form == "reduce":
            return (yield from self._reduced(x, ids, exchange.rows or len(x)))
        tp = self.mesh.tp
        mine = slice_of(len(x), tp.rank, tp.size)
        result = yield from self._at_home(form, x, ids, mine, most)
        if tp.size == 1:
            return result
        return (yield from self._all_slices(result, mine, len(x)))

    def tensors(self) -> Iterable[Tensor]:
        """All that belongs to this rank's experts; the first dim is their places."""
        return self._mine.tensors(self.weights)

    def _route(self, x: Tensor, ids: Tensor | None, turn: int) -> tuple[Rows, Tensor | None, Tensor]:
        """(rows, what the shared expert is multiplied by, experts chosen)."""
        chosen, scales, share = self._mine.route(x, ids, self.weights)
        ranks, places = self.map.find(chosen, turn)
        return Rows(x=x, ranks=ranks, places=places, scales=scales), share, chosen

    def _count(self, chosen: Tensor) -> None:
        if self.loads is not None:
            flat = chosen.reshape(-1)
            self.loads.scatter_add_(0, flat, torch.ones_like(flat))

    def _answer(self, x: Tensor, places: Tensor, scales: Tensor | None) -> Tensor:
        return self._mine.answer(x, places, scales, self.weights, self._exact)

    def _at_home(
        self, form: str, x: Tensor, ids: Tensor | None, mine: Slice, most: int | None
    ) -> Generator[Pending, None, Tensor]:
        """What the block makes of this rank's slice."""
        x = x[mine.begin : mine.end]
        ids = None if ids is None else ids[mine.begin : mine.end]
        rows, share, chosen = self._route(x, ids, self.mesh.ep.rank)
        self._count(chosen)
        work = Work(self._answer, self._exact, lambda: self._mine.shared(x, share, self.weights))
        came = yield from FORMS[form](self.mesh.ep, rows, work, most)
        return self._finish(came.total, rows.scales, came.under, x.dtype)

    def _reduced(self, x: Tensor, ids: Tensor | None, most: int) -> Generator[Pending, None, Tensor]:
        """All ranks are home to all rows; of many rows each finishes its slice alone. ``most`` decides, the
        rows of the larger micro-batch where there are two: both must communicate equally often."""
        ep = self.mesh.ep
        rows_all = len(x)
        mine = slice_of(rows_all, ep.rank, ep.size)
        rows, share, chosen = self._route(x, ids, 0)
        self._count(chosen[mine.begin : mine.end])
        answers = rows.ranks.shape[1] if self._exact else 1
        size = self._mine.answers(x.dtype, self._exact).itemsize
        if most * answers * x.shape[1] * size * ep.size <= ONE_SHOT:
            work = Work(self._answer, self._exact, lambda: self._mine.shared(x, share, self.weights))
            came = yield from FORMS["reduce"](ep, rows, work, None)
            return self._finish(came.total, rows.scales, came.under, x.dtype)
        places = torch.where(rows.ranks == ep.rank, rows.places, -1)
        made = self._answer(x, places, rows.scales)
        missing = mine.each * ep.size - rows_all
        if missing:
            made = torch.cat([made, made.new_zeros(missing, *made.shape[1:])])
        pending = ep.reduce_scatter(made.view(ep.size, mine.each, *made.shape[1:]))
        part = slice(mine.begin, mine.end)
        shared = self._mine.shared(x[part], None if share is None else share[part], self.weights)
        yield pending
        total = pending.result()[: mine.end - mine.begin]
        out = self._finish(total, rows.scales[part], shared, x.dtype)
        return (yield from self._all_slices(out, mine, rows_all))

    def _finish(self, total: Tensor, scales: Tensor, shared: Any, dtype: torch.dtype) -> Tensor:
        """total: [n, A, hidden], all ranks' answers; shared: what the shared expert made."""
        return self._mine.finish(total, scales, shared, dtype, self._exact)

    def _all_slices(self, made: Tensor, mine: Slice, rows: int) -> Generator[Pending, None, Tensor]:
        tp = self.mesh.tp
        missing = mine.each - len(made)
        if missing:
            made = torch.cat([made, made.new_zeros(missing, made.shape[1])])
        whole: Any = yield from awaited(tp, tp.all_gather(made))
        return whole.view(-1, made.shape[1])[:rows]
