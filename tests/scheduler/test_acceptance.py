"""Running shares of accepted drafts."""

from __future__ import annotations

import numpy as np
import pytest

from weft.scheduler.policy.acceptance import AT_ONCE, EXPECTED, Acceptance
from weft.scheduler.slot_columns import SlotColumns


def shares(slots: int = 2, most: int = 3) -> tuple[Acceptance, np.ndarray]:
    columns = SlotColumns(slots)
    made = Acceptance(most, columns)
    for slot in range(slots):
        made.enter(slot)
    return made, columns.acceptance


def see(made: Acceptance, slot: int, drafts: int, accepted: int, times: int = 1) -> None:
    for _ in range(times):
        made.see(np.array([slot]), np.array([drafts]), np.array([accepted]))


def test_what_is_taken_in_together_moves_a_slot_as_far_as_one_by_one() -> None:
    together, far = shares()
    see(together, 0, 3, 3, AT_ONCE - 1)
    assert far[0] == EXPECTED, "they are taken in together"
    see(together, 0, 3, 3)
    alone, near = shares()
    for _ in range(AT_ONCE):
        see(alone, 0, 3, 3)
        alone.learn()
    assert far[0] == pytest.approx(near[0])
    assert far[0] > EXPECTED == far[1]
    assert together.expected == pytest.approx(alone.expected)
    assert together.rose


def test_outcomes_are_of_the_sequence_that_had_them() -> None:
    made, share = shares()
    see(made, 0, 1, 0, 3)
    made.enter(0)
    assert made.expected < EXPECTED
    assert share[0] == made.expected
    made.learn()
    assert share[0] == made.expected


def test_later_places_count_where_they_were_reached() -> None:
    made, _ = shares()
    see(made, 0, 3, 1, 100)  # the second draft is always wrong; the third is never verified
    see(made, 1, 1, 1, 100)  # no draft
    made.learn()
    assert made.later[0] < 0.2
    assert made.later[1] == EXPECTED
    assert made.chain().tolist() == pytest.approx([1.0, made.later[0], made.later[0] * EXPECTED])
