"""The budget of drafts: prices of plain steps, decay, and steps without information."""

from __future__ import annotations

import pytest

from weft.scheduler.policy.draft_budget import HALF_LIFE, SETTLED, Account, DraftBudget
from weft.types.plan import Segment, StepPlan, column


def plan(count: int = 1, next_k: int = 0, prompt: bool = False) -> StepPlan:
    """Return a plan with one decode row of ``count`` tokens and ``next_k`` next drafts, optionally with a
    prompt."""
    one = {"slot": column([0]), "gen": column([0]), "start": column([9])}
    decode = Segment(**one, count=column([count]), next_k=column([next_k]))
    return StepPlan(step=0, decode=decode, prefill=decode if prompt else Segment())


def test_a_price_is_of_a_plain_step_behind_another() -> None:
    """The first plain steps after drafts, or after drafts beside a prompt, do not set the price."""
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


def budget_at(price: float, *outcomes: int) -> DraftBudget:
    """Return a budget after plain steps of ``price`` seconds and one verified row for each outcome.

    Each row has 3 drafts; the outcome is the number of correct drafts. No row gains or loses time.
    """
    budget = DraftBudget()
    for _ in range(2 * SETTLED):
        budget.step(plan(), price, 0, uncaptured=False)
    for right in outcomes:
        budget.step(plan(count=4), (1 + right) * price, right, uncaptured=True)
    return budget


@pytest.mark.parametrize(
    ("price", "outcomes", "most"),
    [
        (3e-4, (), 124),  # fast steps get the whole grant: a capture takes as long as a hundred steps
        (1e-2, (), 1),
        (1e-2, (0, 0, 0), 1),
        (1e-2, (1, 0, 0), 40),
        (1e-2, (3, 3), 124),
        (1.0, (), 1),
    ],
)
def test_what_may_be_lost_at_the_start_goes_by_what_drafts_were_right(
    price: float, outcomes: tuple[int, ...], most: int
) -> None:
    """``most``: plain steps that one captured step may lose before the next try (of 4) is refused."""
    for lost, allowed in ((most - 0.5, True), (most + 1.5, False)):
        budget = budget_at(price, *outcomes)
        budget.step(plan(next_k=3), (1 + lost) * price, 0, uncaptured=True)
        assert budget.allows(1) == allowed


def test_a_try_of_which_nothing_is_known_yet_counts_as_lost() -> None:
    budget = budget_at(1e-2)
    assert budget.allows(1)
    budget.drafting()
    assert not budget.allows(1)
    budget.step(plan(next_k=3), 1e-2, 0, uncaptured=True)
    assert budget.allows(1)
    budget.drafting()
    for _ in range(2 * SETTLED):
        budget.step(plan(), 1e-2, 0, uncaptured=False)
    assert budget.allows(1), "a step that nobody told of is waited for"
