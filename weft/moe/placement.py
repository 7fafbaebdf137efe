"""Placement of experts on ranks, and plans of better placements from observed load. Pure, without torch.

A layer has a fixed number of places: one per expert, and some for redundant copies. The places are spread
evenly over the ranks, permanently. Only the experts in the places change.

Source of the idea: DeepSeek-V3, arXiv 2412.19437, section 3.4; the planner is Weft's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

Placement: TypeAlias = tuple[tuple[int, ...], ...]
"""Experts in the places of each rank, for one layer. No expert is twice on one rank."""

WORTH = 0.03
"""Minimum relative decrease of the busiest rank's load for a new placement."""
_SWAPS = 64


def places(experts: int, ranks: int, redundant: int = 0) -> tuple[int, ...]:
    """Return the number of places of each rank: ``experts + redundant``, spread evenly, first ranks larger.

    Raises ValueError if a rank would have more places than there are experts.
    """
    whole, more = divmod(experts + redundant, ranks)
    if whole + (more > 0) > experts:
        raise ValueError(f"{redundant} redundant copies of {experts} experts are too many for {ranks} ranks")
    return tuple(whole + (rank < more) for rank in range(ranks))


def in_order(experts: int, ranks: int, redundant: int = 0) -> Placement:
    """Return experts in order over the ranks; redundant places continue with the first experts again."""
    placement = []
    first = 0
    for count in places(experts, ranks, redundant):
        placement.append(tuple((first + i) % experts for i in range(count)))
        first += count
    return tuple(placement)


def check(placement: Placement, experts: int) -> None:
    """Raise ValueError unless every expert has a place, and no expert has two places on one rank."""
    seen = {expert for mine in placement for expert in mine}
    if seen != set(range(experts)):
        raise ValueError(f"the placement has {len(seen)} of {experts} experts")
    if any(len(set(mine)) != len(mine) for mine in placement):
        raise ValueError("an expert has two places on one rank")


def copies(placement: Placement, experts: int) -> list[list[tuple[int, int]]]:
    """Return the places of each expert as (rank, number on the rank), in order of ranks."""
    result: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    for rank, mine in enumerate(placement):
        for number, expert in enumerate(mine):
            result[expert].append((rank, number))
    return result


def rank_loads(placement: Placement, loads: Sequence[float] | np.ndarray) -> list[float]:
    """Return the load of each rank, with an expert's load divided evenly among its copies."""
    count = [len(of) for of in copies(placement, len(loads))]
    return [float(sum(loads[e] / count[e] for e in mine)) for mine in placement]


def plan(loads: Sequence[float] | np.ndarray, old: Placement) -> Placement:
    """Return a placement for these loads, with as many places on each rank as in ``old``.

    1. The experts with the highest load per copy get the redundant copies.
    2. In order of load, each expert goes to the ranks with the lowest load so far.
    3. The busiest rank swaps experts with other ranks as long as a swap helps.

    Experts that stay on a rank keep their place. Returns ``old`` unless the load of the busiest rank falls by
    the share ``WORTH``. The plan depends only on the arguments, so ranks with the same loads make the same
    plan.
    """
    room = [len(mine) for mine in old]
    spread = _spread(loads, room)
    _improve(spread, loads)
    new = _in_place(spread, old)
    new_peak = max(rank_loads(new, loads))
    old_peak = max(rank_loads(old, loads))
    return new if new_peak < old_peak * (1 - WORTH) else old


def _copies_wanted(loads: Sequence[float] | np.ndarray, ranks: int, total: int) -> list[int]:
    """Return the number of copies of each expert, at most ``ranks``, ``total`` together."""
    wanted = [1] * len(loads)
    for _ in range(total - len(loads)):
        open_ = [e for e in range(len(loads)) if wanted[e] < ranks]
        heaviest = max(open_, key=lambda e: (loads[e] / wanted[e], -e))
        wanted[heaviest] += 1
    return wanted


def _spread(loads: Sequence[float] | np.ndarray, room: list[int]) -> list[list[int]]:
    """Return the experts of each rank, in no particular order, with the loads spread evenly."""
    ranks = len(room)
    left = list(room)
    wanted = _copies_wanted(loads, sum(size > 0 for size in room), sum(room))
    mine: list[list[int]] = [[] for _ in room]
    total = [0.0] * ranks

    def put(expert: int, rank: int) -> None:
        mine[rank].append(expert)
        left[rank] -= 1
        total[rank] += loads[expert] / wanted[expert]

    order = sorted(range(len(loads)), key=lambda e: (-loads[e] / wanted[e], e))
    for expert in order:
        free = sorted((r for r in range(ranks) if left[r]), key=lambda r: (total[r], r))
        for rank in free[: wanted[expert]]:
            put(expert, rank)
    for rank in range(ranks):  # copies without a rank leave places to other experts
        while left[rank]:
            others = [e for e in order if e not in mine[rank]]
            put(others[0], rank)
    return mine


def _improve(mine: list[list[int]], loads: Sequence[float] | np.ndarray) -> None:
    """Swap experts of the busiest rank with lighter experts elsewhere, the best swap first, in place.

    Ends without a useful swap, or after ``_SWAPS``.
    """
    sizes = [len(one) for one in mine]
    owner = np.repeat(np.arange(len(mine)), sizes)
    number = np.concatenate([np.arange(size) for size in sizes])
    expert = np.array([e for one in mine for e in one])
    each = np.asarray(loads, np.float64) / np.bincount(expert, minlength=len(loads))
    for _ in range(_SWAPS):
        total = np.bincount(owner, weights=each[expert], minlength=len(mine))
        has = np.zeros((len(mine), len(loads)), bool)  # [rank, expert]
        has[owner, expert] = True
        busiest = int(total.argmax())
        out = np.flatnonzero(owner == busiest)
        back = np.flatnonzero(owner != busiest)
        if not len(back):
            return
        # [out, back]: load that leaves the busiest rank, and the higher load of both ranks after each swap
        change = each[expert[out]][:, None] - each[expert[back]]
        peak = np.maximum(total[busiest] - change, total[owner[back]] + change)
        # A swap must not put two copies of an expert on one rank.
        peak[has[owner[back]][:, expert[out]].T | has[busiest, expert[back]]] = np.inf
        i, j = np.unravel_index(int(peak.argmin()), peak.shape)
        if not peak[i, j] < total[busiest] * (1 - 1e-12):
            return
        a = out[i]
        b = back[j]
        expert[a], expert[b] = expert[b], expert[a]
        mine[owner[a]][number[a]], mine[owner[b]][number[b]] = int(expert[a]), int(expert[b])


def _in_place(spread: list[list[int]], old: Placement) -> Placement:
    """Return ``spread``, assigned to ranks with as many places so that most experts stay in place."""
    # Greedy: each rank takes the most similar set of the right size. Ties go to the lowest index.
    open_ = set(range(len(spread)))
    placement: list[tuple[int, ...]] = []
    for mine in old:
        fitting = sorted(one for one in open_ if len(spread[one]) == len(mine))
        best = max(fitting, key=lambda one: (len(set(spread[one]) & set(mine)), -one))
        open_.remove(best)
        stays = set(spread[best]) & set(mine)
        new = iter(sorted(set(spread[best]) - stays))
        placement.append(tuple(expert if expert in stays else next(new) for expert in mine))
    return tuple(placement)


def moves(old: Placement, new: Placement) -> list[tuple[int, int, int, int]]:
    """Return the copies to make: (from rank, from place, to rank, to place) for each changed place.

    The source is a copy on the same rank if one exists. Otherwise the copies elsewhere take turns.
    """
    sources_of = copies(old, 1 + max(e for mine in old for e in mine))
    result = []
    turn = 0
    for rank, mine in enumerate(new):
        for number, expert in enumerate(mine):
            if old[rank][number] == expert:
                continue
            sources = sources_of[expert]
            local = [source for source in sources if source[0] == rank]
            if local:
                source = local[0]
            else:
                source = sources[turn % len(sources)]
                turn += 1
            result.append((*source, rank, number))
    return result
