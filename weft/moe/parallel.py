"""A routed block with experts divided over ranks.

    route -> rows to their experts' ranks -> experts -> answers home -> sum in top-k order, then shared expert

If all ranks of a replica have its rows, each rank is home to a slice of the rows, and the slices are gathered
at the end. In the form ``reduce`` all ranks are home to all rows. Every rank has the whole router and shared
expert.

All forms sum to the same bits (``weft.moe.dispatch``), so the choice of a form may depend on the step. Under
--deterministic experts answer one by one, and the bits equal the bits of one rank.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

import torch

from weft.moe import placement as placing
from weft.moe.adapted import ExpertAdapters, carried
from weft.moe.dispatch import FORMS, Rows, Work
from weft.moe.expert_choice import Chooser
from weft.moe.experts import rank_experts
from weft.moe.placement import Placement
from weft.ops.low_rank import AdapterRows
from weft.parallel.comm import Pending, awaited
from weft.parallel.group_comm import ONE_SHOT
from weft.parallel.mesh import Mesh
from weft.types.exchange import Exchange

Tensor = torch.Tensor


class Map:
    """A placement as tensors: rank and place of each copy of an expert. Changed in place."""

    def __init__(self, placement: Placement, experts: int, device: torch.device) -> None:
        """``placement``: the first placement; later placements have as many places.

        Raises ValueError if ``placement`` lacks an expert.
        """
        most = max(1, min(len(placement), 1 + sum(map(len, placement)) - experts))
        self._columns = torch.zeros(3, experts, most, dtype=torch.int64, device=device)
        self._single = most == 1
        self.placement: Placement = ()
        self.set(placement)

    def __len__(self) -> int:
        """Return the number of experts."""
        return self._columns.shape[1]

    def set(self, placement: Placement) -> None:
        """Use another placement of the same experts. Raises ValueError if the placement lacks an expert."""
        _, experts, most = self._columns.shape
        placing.check(placement, experts)
        rows = []
        for of in placing.copies(placement, experts):
            # Experts with few copies repeat the first copy, so all rows have ``most`` columns.
            there = of + [of[0]] * (most - len(of))
            rows.append([[rank for rank, _ in there], [place for _, place in there], [len(of)] * most])
        self._columns.copy_(torch.tensor(rows).transpose(0, 1))
        self.placement = placement

    def find(self, chosen: Tensor, turn: int) -> tuple[Tensor, Tensor]:
        """Return (rank, place), int64 [n, k] each, of experts ``chosen`` [n, k].

        Copies alternate by row; ``turn`` shifts the alternation.
        """
        ranks = self._columns[0]
        places = self._columns[1]
        count = self._columns[2]
        if self._single:
            return ranks[chosen, 0], places[chosen, 0]
        rows = torch.arange(turn, turn + len(chosen), device=chosen.device).unsqueeze(1)
        # ``turn`` shifts the alternation by rank, so ranks with few rows do not all use the first copies.
        copy = rows % count[chosen, 0]
        return ranks[chosen, copy], places[chosen, copy]


class Slice(NamedTuple):
    """One rank's part of the rows that all ranks of a replica have."""

    begin: int
    end: int
    each: int
    """Rows of a full part."""


def slice_of(rows: int, rank: int, ranks: int) -> Slice:
    """Return the part of ``rank``. Parts are contiguous and equal as far as rows suffice, or else empty."""
    each = -(-rows // ranks)
    return Slice(min(rows, rank * each), min(rows, (rank + 1) * each), each)


class DividedExperts:
    """The experts of one layer, divided over ranks.

    ``weights`` has the whole router and this rank's experts in order of places, packed for ``pieces``, an
    implementation of the op ``moe_pieces``.
    """

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
        low: ExpertAdapters | None = None,
    ) -> None:
        """Create the layer. exact: experts answer one by one. counts: count tokens per expert. low: adapters
        of the experts."""
        self.mesh = mesh
        self.chooser = chooser
        self.weights, self._mine = weights, rank_experts(pieces)
        device = weights.device
        experts = weights.experts
        self.map = Map(placement, experts, device)
        self._exact = exact
        self._low = low
        self.loads = torch.zeros(experts, dtype=torch.int64, device=device) if counts else None
        """Rows that chose each expert, among the rows of this home rank, int64 [experts], or None."""

    def steps(
        self,
        x: Tensor,
        ids: Tensor | None,
        exchange: Exchange,
        adapters: AdapterRows | None = None,
        router: Any = None,
    ) -> Generator[Pending, None, Tensor]:
        """Return the output of the whole block for x [T, hidden], equal on all ranks of a replica, ids
        int64 [T], and the adapters of the rows. ``router``: weights with another table of experts, or None.

        Yields once per collective. Counts ``loads``.
        """
        # All ranks of a replica have the same adapters in a step, so all ranks send carried places, or none.
        if self._low is None or not self._low.concerns(adapters):
            adapters = None
        adapted = exchange.adapted or self._reaches(adapters)
        form, most = self.chooser.choose(len(x), exchange)
        if form == "reduce":
            return (yield from self._reduced(x, ids, exchange.rows or len(x), adapters, router))
        tp = self.mesh.tp
        mine = slice_of(len(x), tp.rank, tp.size)
        result = yield from self._at_home(form, x, ids, mine, most, adapters, router, adapted)
        if tp.size == 1:
            return result
        return (yield from self._all_slices(result, mine, len(x)))

    def tensors(self) -> Iterable[Tensor]:
        """Return all tensors of this rank's experts. The first dim is the expert's place."""
        return self._mine.tensors(self.weights)

    def moving(self) -> Iterable[Tensor]:
        """Return all tensors that move with an expert: ``tensors``, and the adapters of the experts."""
        yield from self.tensors()
        if self._low is not None:
            yield from self._low.tensors(len(self.map.placement[self.mesh.ep.rank]))

    def _route(
        self, x: Tensor, ids: Tensor | None, turn: int, adapters: AdapterRows | None, router: Any
    ) -> tuple[Rows, Tensor | None, Tensor]:
        """Return (rows, factor of the shared expert, chosen experts)."""
        chosen, scales, share = self._mine.route(x, ids, self.weights if router is None else router)
        ranks, places = self.map.find(chosen, turn)
        if self._reaches(adapters):
            assert self._low is not None
            places = carried(places, adapters, self._low.first)
        return Rows(x=x, ranks=ranks, places=places, scales=scales), share, chosen

    def _reaches(self, adapters: AdapterRows | None) -> bool:
        """Return True if an adapter of the rows changes experts, perhaps on other ranks."""
        return self._low is not None and self._low.changes_experts(adapters)

    def _count(self, chosen: Tensor) -> None:
        if self.loads is not None:
            flat = chosen.reshape(-1)
            self.loads.scatter_add_(0, flat, torch.ones_like(flat))

    def _answer(self, x: Tensor, places: Tensor, scales: Tensor | None) -> Tensor:
        return self._mine.answer(x, places, scales, self.weights, self._exact)

    def _answer_adapted(self, x: Tensor, places: Tensor, scales: Tensor | None) -> Tensor:
        assert self._low is not None
        return self._low.answer(self._mine, x, places, scales, self.weights, self._exact)

    def _work(self, x: Tensor, share: Tensor | None, adapters: AdapterRows | None, adapted: bool) -> Work:
        """Return the work of this rank in a step. x, share, adapters: of the own rows. ``adapted``: True if
        rows that come may carry adapters."""
        answer = self._answer_adapted if adapted else self._answer
        return Work(answer, self._exact, lambda: self._shared(x, share, adapters))

    def _shared(self, x: Tensor, share: Tensor | None, adapters: AdapterRows | None) -> Any:
        if adapters is None or self._low is None:
            return self._mine.shared(x, share, self.weights)
        return self._low.shared(self._mine, x, share, self.weights, adapters)

    def _at_home(
        self,
        form: str,
        x: Tensor,
        ids: Tensor | None,
        mine: Slice,
        most: int | None,
        adapters: AdapterRows | None,
        router: Any,
        adapted: bool,
    ) -> Generator[Pending, None, Tensor]:
        """Return the output of the block for this rank's slice of x, [rows of the slice, hidden]."""
        x = x[mine.begin : mine.end]
        ids = None if ids is None else ids[mine.begin : mine.end]
        adapters = None if adapters is None else adapters.part(mine.begin, mine.end)
        rows, share, chosen = self._route(x, ids, self.mesh.ep.rank, adapters, router)
        self._count(chosen)
        work = self._work(x, share, adapters, adapted)
        came = yield from FORMS[form](self.mesh.ep, rows, work, most)
        return self._finish(came.total, rows.scales, came.under, x.dtype)

    def _reduced(
        self, x: Tensor, ids: Tensor | None, most: int, adapters: AdapterRows | None, router: Any
    ) -> Generator[Pending, None, Tensor]:
        """Compute the block with all ranks home to all rows. For many rows each rank finishes its slice only.

        ``most``, the rows of the larger micro-batch, selects between both ways: micro-batches must
        communicate equally often.
        """
        ep = self.mesh.ep
        rows_all = len(x)
        mine = slice_of(rows_all, ep.rank, ep.size)
        rows, share, chosen = self._route(x, ids, 0, adapters, router)
        self._count(chosen[mine.begin : mine.end])
        answers = rows.ranks.shape[1] if self._exact else 1
        size = self._mine.answers(x.dtype, self._exact).itemsize
        # Small sums: a one-shot all-reduce gives every rank all rows. Large sums: reduce-scatter, then
        # all-gather.
        if most * answers * x.shape[1] * size * ep.size <= ONE_SHOT:
            came = yield from FORMS["reduce"](
                ep, rows, self._work(x, share, adapters, self._reaches(adapters)), None
            )
            return self._finish(came.total, rows.scales, came.under, x.dtype)
        places = torch.where(rows.ranks == ep.rank, rows.places, -1)
        answer = self._answer_adapted if self._reaches(adapters) else self._answer
        partial = answer(x, places, rows.scales)  # [rows, A, hidden], answers of this rank's experts
        # Equal parts for the reduce-scatter: the padding is zero and dropped below.
        missing = mine.each * ep.size - rows_all
        if missing:
            partial = torch.cat([partial, partial.new_zeros(missing, *partial.shape[1:])])
        pending = ep.reduce_scatter(partial.view(ep.size, mine.each, *partial.shape[1:]))
        part = slice(mine.begin, mine.end)
        adapters = None if adapters is None else adapters.part(mine.begin, mine.end)
        shared = self._shared(x[part], None if share is None else share[part], adapters)
        yield pending
        total = pending.result()[: mine.end - mine.begin]
        out = self._finish(total, rows.scales[part], shared, x.dtype)
        return (yield from self._all_slices(out, mine, rows_all))

    def _finish(self, total: Tensor, scales: Tensor, shared: Any, dtype: torch.dtype) -> Tensor:
        """Return the block's output from ``total`` [n, A, hidden], the sum of all answers, and ``shared``."""
        return self._mine.finish(total, scales, shared, dtype, self._exact)

    def _all_slices(self, part: Tensor, mine: Slice, rows: int) -> Generator[Pending, None, Tensor]:
        """Return the slices of all ranks of the replica as one tensor, [rows, hidden]. ``part``: the slice of
        this rank."""
        tp = self.mesh.tp
        # The all-gather needs parts of equal size: the padding is dropped below.
        missing = mine.each - len(part)
        if missing:
            part = torch.cat([part, part.new_zeros(missing, part.shape[1])])
        whole: Any = yield from awaited(tp, tp.all_gather(part))
        return whole.view(-1, part.shape[1])[:rows]
