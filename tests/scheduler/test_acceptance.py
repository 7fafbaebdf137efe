"""Running shares of accepted drafts."""

from __future__ import annotations

import numpy as np
import pytest

from weft.scheduler.policy.acceptance import AT_ONCE, EXPECTED, Acceptance
from weft.scheduler.slot_columns import SlotColumns

SLOTS = np.arange(2)


def made(most: int = 3) -> Acceptance:
    shares = Acceptance(most, SlotColumns(len(SLOTS) + 1))
    for slot in SLOTS.tolist():
        shares.enter(slot)
    return shares


def average(shares: Acceptance) -> np.ndarray:
    """Return the chances of a slot without drafts."""
    return shares.chances(np.array([len(SLOTS)]))[0]


def see(shares: Acceptance, slot: int, drafts: int, accepted: int, times: int = 1) -> None:
    for _ in range(times):
        shares.see(np.array([slot]), np.array([drafts]), np.array([accepted]))


def test_before_the_first_draft_all_chances_are_expected() -> None:
    expected = [EXPECTED, EXPECTED**2, EXPECTED**3]
    assert average(made()).tolist() == pytest.approx(expected)
    assert made().chances(SLOTS)[1].tolist() == pytest.approx(expected)


def test_steps_are_learned_in_batches() -> None:
    shares = made()
    see(shares, 0, 3, 3, AT_ONCE - 1)
    assert average(shares)[0] == EXPECTED
    see(shares, 0, 3, 3)
    assert average(shares)[0] > EXPECTED
    first = shares.chances(SLOTS)[:, 0]
    assert first[0] > first[1] > EXPECTED


def test_the_average_follows_within_some_dozen_drafts() -> None:
    shares = made()
    see(shares, 0, 1, 1, 1000)
    shares.learn()
    assert average(shares)[0] == pytest.approx(1.0, abs=0.01)
    see(shares, 0, 1, 0, 64)
    shares.learn()
    assert average(shares)[0] < 0.5
    see(shares, 0, 1, 0, 128)
    shares.learn()
    assert average(shares)[0] < 0.1


def test_a_new_sequence_of_a_slot_begins_with_the_average() -> None:
    shares = made()
    see(shares, 0, 1, 0, 3)
    shares.enter(0)
    assert shares.chances(SLOTS)[0, 0] == pytest.approx(average(shares)[0])
    assert average(shares)[0] < EXPECTED


def test_later_places_count_where_they_were_reached() -> None:
    shares = made()
    see(shares, 0, 3, 1, 100)  # the second draft is always wrong; the third is never verified
    see(shares, 1, 1, 1, 100)  # no draft
    shares.learn()
    first, second, third = average(shares).tolist()
    assert first > 0.9
    assert second < 0.1 * first
    assert third == pytest.approx(EXPECTED * second)
