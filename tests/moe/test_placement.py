"""Plans of where experts are: pure."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.moe.parallel import Map
from weft.moe.placement import WORTH, check, copies, in_order, moves, places, plan, rank_loads


def test_places_are_even() -> None:
    assert places(8, 4) == (2, 2, 2, 2)
    assert places(6, 4) == (2, 2, 1, 1)
    assert places(6, 4, 2) == (2, 2, 2, 2)
    assert places(2, 4) == (1, 1, 0, 0)
    with pytest.raises(ValueError, match="too many"):
        places(4, 2, 5)


def test_in_order() -> None:
    assert in_order(6, 4) == ((0, 1), (2, 3), (4,), (5,))
    assert in_order(4, 2, 2) == ((0, 1, 2), (3, 0, 1))


def test_a_placement_lacks_no_expert_and_doubles_none() -> None:
    with pytest.raises(ValueError, match="has 2 of 3 experts"):
        check(((0, 1),), 3)
    with pytest.raises(ValueError, match="two places on one rank"):
        check(((0, 0), (1,)), 2)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int]:
    experts = draw(st.integers(1, 24))
    ranks = draw(st.integers(1, 6))
    redundant = draw(st.integers(0, min(8, experts * ranks - experts)))
    most = -(-(experts + redundant) // ranks)
    if most > experts:
        redundant = 0
    loads = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    return loads, ranks, redundant


@settings(max_examples=150, deadline=None)
@given(cases())
def test_plans_are_placements_that_are_no_worse(case: tuple[list[int], int, int]) -> None:
    loads, ranks, redundant = case
    old = in_order(len(loads), ranks, redundant)
    new = plan(loads, old)
    check(new, len(loads))
    assert [len(mine) for mine in new] == [len(mine) for mine in old]
    assert abs(sum(rank_loads(new, loads)) - sum(loads)) <= 1e-9 * sum(loads)
    assert max(rank_loads(new, loads)) <= max(rank_loads(old, loads))
    assert new == old or max(rank_loads(new, loads)) < (1 - WORTH) * max(rank_loads(old, loads))
    # Nothing is gained by planning again.
    assert max(rank_loads(plan(loads, new), loads)) <= max(rank_loads(new, loads))
    assert plan(loads, old) == new, "a function of its arguments"


@settings(max_examples=150, deadline=None)
@given(cases())
def test_moves_make_the_new_placement_of_the_old_one(case: tuple[list[int], int, int]) -> None:
    loads, ranks, redundant = case
    old = in_order(len(loads), ranks, redundant)
    new = plan(loads, old)
    held = [list(mine) for mine in old]
    done = moves(old, new)
    for source, place, to, at in done:
        held[to][at] = old[source][place]
    assert tuple(map(tuple, held)) == new
    targets = [(to, at) for _, _, to, at in done]
    assert len(set(targets)) == len(targets)
    for rank, mine in enumerate(new):  # an expert that stays on a rank keeps its place
        for expert in set(mine) & set(old[rank]):
            assert mine.index(expert) == old[rank].index(expert)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=6, max_size=6))
def test_the_busiest_rank_is_near_the_best(loads: list[int]) -> None:
    """Against every way to put six experts on two or three ranks."""
    for ranks in (2, 3):
        each = 6 // ranks
        best = min(
            max(sum(loads[e] for e in order[r * each : (r + 1) * each]) for r in range(ranks))
            for order in itertools.permutations(range(6))
            if all(
                list(order[r * each : (r + 1) * each]) == sorted(order[r * each : (r + 1) * each])
                for r in range(ranks)
            )
        )
        found = max(rank_loads(plan(loads, in_order(6, ranks)), loads))
        assert found <= best * 1.2 / (1 - WORTH)


def test_the_hottest_expert_gets_the_copies() -> None:
    loads = [1000, 10, 10, 10, 10, 10, 10, 10]
    new = plan(loads, in_order(8, 4, 4))
    assert len(copies(new, 8)[0]) == 4
    assert max(rank_loads(new, loads)) < 275


def test_large_layers_are_planned_quickly() -> None:
    """256 experts and 32 copies on 32 ranks with realistic loads: a step sometimes waits for the plan."""
    loads = [int(10_000 / (1 + i % 97)) for i in range(256)]
    old = in_order(256, 32, 32)
    new = plan(loads, old)
    mean = sum(loads) / 32
    assert max(rank_loads(new, loads)) < 1.1 * mean < max(rank_loads(old, loads))


def test_copies_lie_on_different_ranks_and_share_the_rows() -> None:
    """One hot expert with three copies: each rank gets a third of the rows, at its own place."""
    new = plan([900, 10, 10, 10, 10, 10], in_order(6, 3, 3))
    assert [rank for rank, _ in copies(new, 6)[0]] == [0, 1, 2]
    ranks, where = Map(new, 6, torch.device("cpu")).find(torch.zeros(30, 1, dtype=torch.int64), turn=0)
    assert torch.bincount(ranks.view(-1), minlength=3).tolist() == [10, 10, 10]
    for rank, place in zip(ranks.view(-1).tolist(), where.view(-1).tolist(), strict=True):
        assert new[rank][place] == 0


@settings(max_examples=60, deadline=None)
@given(cases())
def test_rows_reach_ranks_as_planned(case: tuple[list[int], int, int]) -> None:
    """The planned load of a rank equals the rows that the map sends there."""
    loads, ranks, redundant = case
    placement = plan(loads, in_order(len(loads), ranks, redundant))
    most = 60  # a multiple of every number of copies
    chosen = torch.arange(len(loads)).repeat(most, 1)
    found, _ = Map(placement, len(loads), torch.device("cpu")).find(chosen, turn=0)
    sent = torch.bincount(found.view(-1), minlength=ranks).tolist()
    assert sent == [round(load) for load in rank_loads(placement, [most] * len(loads))]
