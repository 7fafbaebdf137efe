"""Masks of constrained entries: which fit a plan, and which are refused."""

from __future__ import annotations

import pytest

from weft.common.errors import EngineDead
from weft.types.plan import EMPTY, Segment, StepPlan, TokenMasks, column

VOCAB = 70
ZEROS = dict.fromkeys(("slot", "gen", "start", "next_k"), column([0, 0]))
PLAN = StepPlan(
    step=5,
    prefill=Segment(count=column([4, 4]), logits=column([0, 1]), sample=column([0, 1]), **ZEROS),
    decode=Segment(count=column([3, 1]), logits=column([3, 1]), sample=column([3, 1]), **ZEROS),
    constrained=True,
)
"""Rows: a chunk that does not sample, a chunk that samples, a verify row with two drafts, a decode row."""


def masks(*entries: int, words: int = 3) -> TokenMasks:
    return TokenMasks(entries=column(list(entries)), words=column([-1] * (words * len(entries))))


def test_there_is_one_for_each_sampled_entry_at_most() -> None:
    assert PLAN.entries == 5
    for fitting in (masks(), masks(0), masks(1, 2, 3), masks(0, 1, 2, 3, 4)):
        fitting.check(PLAN, VOCAB)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (masks(5), "out of range"),
        (masks(-1), "out of range"),
        (masks(1, 1), "in order"),
        (masks(2, 1), "in order|out of range"),
        (masks(3, words=2), "width"),
        (TokenMasks(entries=EMPTY, words=column([1])), "width"),
    ],
)
def test_others_are_refused(wrong: TokenMasks, match: str) -> None:
    with pytest.raises(EngineDead, match=match):
        wrong.check(PLAN, VOCAB)


def test_a_plan_that_is_not_constrained_takes_none() -> None:
    with pytest.raises(EngineDead, match="step 1, which is not constrained"):
        masks().check(StepPlan(step=1), VOCAB)
