"""What drafts may lose: prices, fading, steps that tell nothing."""

from __future__ import annotations

import pytest

from weft.scheduler.draft_budget import HALF_LIFE, SETTLED, Account, DraftBudget
from weft.types.plan import Segment, StepPlan, column


def plan(count: int = 1, next_k: int = 0, prompt: bool = False) -> StepPlan:
    """One row of ``count`` tokens, which leaves ``next_k`` drafts; perhaps beside a prompt."""
    one = {"slot": column([0]), "gen": column([0]), "start": column([9])}
    decode = Segment(**one, count=column([count]), next_k=column([next_k]))
    return StepPlan(step=0, decode=decode, prefill=decode if prompt else Segment())


def test_a_price_is_of_a_plain_step_behind_another() -> None:
    """The first ones behind drafts take longer; so do those behind a prompt beside drafts."""
    budget = DraftBudget()
    for before in (plan(next_k=2), plan(count=3), plan(count=3, prompt=True)):
        budget.step(before, 9.0, 0, uncaptured=False)
        for _ in range(SETTLED):
            budget.step(plan(), 5.0, 0, uncaptured=False)
            assert not budget.settled
        budget.step(plan(), 1.0, 0, uncaptured=False)
        assert budget.settled
    assert budget.plain(1) == 1.0


def test_sums_fade_by_the_time_that_passed_at_rest_too() -> None:
    steady, paused = Account(), Account()
    for account in (steady, paused):
        account.spend(1.0, lost=1.0)
    steady.spend(HALF_LIFE)
    for _ in range(10):
        paused.pause(HALF_LIFE / 11)
    paused.spend(HALF_LIFE / 11)
    assert paused.loss == pytest.approx(steady.loss)
    assert paused.loss == pytest.approx(0.5)
