"""LoRA adapters of the experts of one layer, and of the shared expert.

    row  ->  experts, and the place of the row's adapter      the place travels with the row to other ranks
    pair of row and expert  ->  product with gate and up, low-rank product, activation, product with down,
                                low-rank product

A pool has the matrices of every (local expert, adapter). A row is computed in this way only if the row's own
adapter changes experts of this layer, so the bits of a row do not depend on other rows. All other rows take
the usual op.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from weft.config.spec import MoESpec
from weft.layers.build import Build
from weft.layers.low_rank import LowRank, make_low_rank
from weft.moe.experts import RankExperts
from weft.ops.low_rank import AdapterRows
from weft.ops.moe import combine
from weft.ops.moe_plain import LatentRouted

Tensor = torch.Tensor

_SHIFT = 32
_MASK = (1 << _SHIFT) - 1


def carried(places: Tensor, rows: AdapterRows | None, first: int = 0) -> Tensor:
    """Return ``places`` [n, k] of experts with the place of each row's adapter in the upper 32 bits.

    Without an adapter a place stays as it is. ``first``: place 0 of this replica among the places of all
    replicas.
    """
    if rows is None:
        return places
    numbers = rows.numbers.to(torch.int64)
    return places + (torch.where(numbers < 0, 0, numbers + first + 1) << _SHIFT).unsqueeze(1)


class ExpertAdapters:
    """Adapters of the experts of one layer on one rank."""

    def __init__(self, build: Build, spec: MoESpec) -> None:
        layout = build.mesh.layout
        places = build.adapters.places
        shares = layout.expert and build.divides_experts
        self.first = layout.replica(build.mesh.rank) * places if shares else 0
        """Place 0 of this replica among the places of all replicas that share the experts."""
        self.replicas = layout.data if shares else 1
        self._places = places * self.replicas
        experts = build.adapters.experts
        self.up = LowRank(build) if experts else None
        """Adapters of gate and up. The pool has a place for each local expert and adapter of a replica:
        ``(expert * replicas + replica) * places + place``. None without memory for adapters of experts."""
        self.down = LowRank(build) if experts else None
        self.shared_up = make_low_rank(build) if spec.shared else None
        self.shared_down = make_low_rank(build) if spec.shared else None
        self.changing: set[int] = set()
        """Places of all replicas whose adapter changes experts of this layer, on any rank."""
        self.changing_shared: set[int] = set()
        """Places of this replica whose adapter changes the shared expert."""
        self.around: tuple[LowRank, ...] = ()
        """Adapters of the projections before and behind latent experts."""

    def tensors(self, experts: int) -> Iterable[Tensor]:
        """Return the tensors of the pools that move with an expert. The first dim is the expert's place."""
        for low in (self.up, self.down):
            if low is not None and low.pool is not None:
                yield low.pool.a.unflatten(0, (experts, self._places))
                yield low.pool.b.unflatten(0, (experts, self._places))

    def concerns(self, rows: AdapterRows | None) -> bool:
        """Return True if an adapter of ``rows`` changes this layer. False in a captured step."""
        if rows is None:
            return False
        return self.changes_experts(rows) or not self._changing_here.isdisjoint(rows.present)

    @property
    def _changing_here(self) -> set[int]:
        """Places of this replica whose adapter changes the shared expert or a projection."""
        made = set(self.changing_shared)
        for low in self.around:
            if low.pool is not None:
                made |= {place for place, rank in enumerate(low.pool.ranks) if rank}
        return made

    def changes_experts(self, rows: AdapterRows | None) -> bool:
        """Return True if an adapter of ``rows`` changes experts of this layer."""
        return rows is not None and any(self.first + place in self.changing for place in rows.present)

    def _with(self, numbers: Tensor, places: set[int]) -> Tensor:
        """Return int64 [n]: the rows whose number is one of ``places``."""
        found = torch.zeros_like(numbers, dtype=torch.bool)
        for place in sorted(places):
            found |= numbers == place
        return found.nonzero().view(-1)

    def block(
        self, parts: RankExperts, whole: Any, x: Tensor, ids: Tensor | None, weights: Any, rows: AdapterRows
    ) -> Tensor:
        """Return the output of a block with all experts on this rank, [T, hidden]: see ``ops.moe.block``.

        ``whole``: the op ``moe`` for rows that this layer's adapters do not change.
        """
        mine = self._with(rows.numbers, self.changing | self._changing_here)
        if not len(mine):
            made: Tensor = whole(x, ids, weights)
            return made
        if len(mine) == len(x):
            return self._block(parts, x, ids, weights, rows)
        other = torch.ones(len(x), dtype=torch.bool, device=x.device)
        other[mine] = False
        rest = other.nonzero().view(-1)
        changed = self._block(parts, x[mine], None if ids is None else ids[mine], weights, rows.at(mine))
        made = whole(x[rest], None if ids is None else ids[rest], weights)
        out = made.new_empty(len(x), made.shape[1])
        out[rest] = made
        out[mine] = changed
        return out

    def _block(
        self, parts: RankExperts, x: Tensor, ids: Tensor | None, weights: Any, rows: AdapterRows
    ) -> Tensor:
        experts, scales, share = parts.route(x, ids, weights)
        latent = weights if isinstance(weights, LatentRouted) else None
        inner = x if latent is None else latent.enter(x, rows)
        total = self.answer(parts, inner, carried(experts, rows), scales, weights, exact=True)
        shared = self.shared(parts, x, share, weights, rows)
        if latent is None:
            return parts.finish(total, scales, shared, x.dtype, True)
        summed = latent.leave(combine(total, scales).to(x.dtype), rows)
        return parts.finish(summed.unsqueeze(1), scales, shared, x.dtype, False)

    def answer(
        self, parts: RankExperts, x: Tensor, places: Tensor, scales: Tensor | None, weights: Any, exact: bool
    ) -> Tensor:
        """Return ``RankExperts.answer`` for ``carried`` places."""
        numbers = torch.where(places < 0, -1, (places >> _SHIFT) - 1).amax(1)
        places = torch.where(places < 0, -1, places & _MASK)
        mine = self._with(numbers, self.changing)
        if not len(mine):
            return parts.answer(x, places, scales, weights, exact)
        made = self._pairs(parts, x[mine], places[mine], numbers[mine], weights)
        answers = parts.answers(x.dtype, exact)
        if exact:
            made = made.to(answers)
        else:
            assert scales is not None
            made = combine(made, scales[mine]).to(answers).unsqueeze(1)
        if len(mine) == len(x):
            return made
        # Rows without a change: the op of the block, alone.
        other = torch.ones(len(x), dtype=torch.bool, device=x.device)
        other[mine] = False
        rest = other.nonzero().view(-1)
        out = made.new_empty(len(x), *made.shape[1:])
        out[mine] = made
        out[rest] = parts.answer(
            x[rest], places[rest], None if scales is None else scales[rest], weights, exact
        )
        return out

    def _pairs(self, parts: RankExperts, x: Tensor, places: Tensor, numbers: Tensor, weights: Any) -> Tensor:
        """Return [n, k, hidden] for x [n, hidden], local experts ``places`` [n, k] (-1: none) and places of
        adapters ``numbers`` [n]."""
        assert self.up is not None
        assert self.down is not None
        products = parts.products(weights)
        top_k = places.shape[1]
        made = x.new_zeros(places.numel(), x.shape[1])
        # Pairs by expert, in order of rows, so that a matrix is read once.
        flat = places.reshape(-1)
        order = torch.argsort(flat, stable=True)
        found, sizes = torch.unique(flat[order], return_counts=True)
        begin = 0
        for expert, size in zip(found.tolist(), sizes.tolist(), strict=True):
            pairs = order[begin : begin + size]
            begin += size
            if expert < 0:
                continue
            row = pairs // top_k
            mine = x[row]
            at = (numbers[row] + expert * self._places).to(torch.int32)
            rows = AdapterRows(at, torch.unique(at).tolist())
            biases = products.biases(expert)
            inner = products.up(expert, mine)
            self.up.add(inner, mine, rows, biases[0])
            inner = products.activate(inner).contiguous()
            out = products.down(expert, inner)
            self.down.add(out, inner, rows, biases[1])
            made[pairs] = out
        return made.view(*places.shape, -1)

    def shared(
        self, parts: RankExperts, x: Tensor, share: Tensor | None, weights: Any, rows: AdapterRows
    ) -> Any:
        """Return ``RankExperts.shared`` with the adapters of the shared expert."""
        made = parts.shared(x, share, weights)
        mine = self._with(rows.numbers, self.changing_shared)
        if not len(mine):
            return made
        assert self.shared_up is not None
        assert self.shared_down is not None
        products = parts.products(weights)
        own, x = rows.at(mine), x[mine]
        inner = products.shared_up(x)
        self.shared_up.add(inner, x, own)
        inner = products.activate(inner).contiguous()
        out = products.shared_down(inner)
        self.shared_down.add(out, inner, own)
        return products.with_shared(made, mine, out, share)


def make_expert_adapters(build: Build, spec: MoESpec) -> ExpertAdapters | None:
    """Return the adapters of a routed block. None without places, and where an adapter can change nothing."""
    options = build.adapters
    if not options.places or not (options.experts or spec.shared or spec.latent):
        return None
    return ExpertAdapters(build, spec)
