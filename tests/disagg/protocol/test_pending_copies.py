"""Copies of a receiving rank that end later than the next event."""

from __future__ import annotations

import numpy as np
import pytest

from weft.common.errors import Unavailable
from weft.disagg.protocol import arrivals as a
from weft.disagg.protocol.coverage import Coverage
from weft.types.transfer import Outcome, TransferKey

KEY = TransferKey(1, 0, 1)
ERROR = Unavailable("planted").info()


def write(number: int, begin: int, size: int) -> a.Incoming:
    return a.Incoming(KEY, "s", number, ((0, np.array([[begin, size]])),), 100)


def expecting() -> a.Arrivals:
    into = a.Arrivals()
    into.on(a.ExpectedArrival(KEY, Coverage({0: np.array([[0, 30]], np.int64)})), 0.0)
    return into


def test_copies_may_end_in_any_order() -> None:
    into, first, last = expecting(), write(0, 0, 10), write(1, 10, 20)
    assert a.Copy(first) in into.on(first, 0.0)
    assert into.on(last, 0.0) == [a.Copy(last)]
    assert into.on(a.Copied(last, None), 0.0) == [a.Answer(last, None)]
    assert into.on(a.Copied(first, None), 0.0) == [a.Answer(first, None), a.ArrivalReport(KEY, Outcome.done)]


@pytest.mark.requirement("E30")
@pytest.mark.parametrize("error", [None, ERROR])
def test_a_repeated_write_waits_for_the_end_of_its_copy(error: object) -> None:
    """An answer before the end would report bytes that may never come."""
    into, once, again = expecting(), write(0, 0, 10), write(0, 0, 10)
    into.on(once, 0.0)
    assert into.on(again, 0.0) == []
    actions = into.on(a.Copied(once, error), 0.0)  # type: ignore[arg-type]
    answers = [action for action in actions if isinstance(action, a.Answer)]
    assert [answer.error for answer in answers] == [error, error]
    assert [answer.write for answer in answers] == [once, again]


@pytest.mark.requirement("E8")
def test_bytes_that_are_under_way_twice_fail_the_transfer() -> None:
    """The late copy would write into memory of a transfer that is done."""
    into, whole, late = expecting(), write(0, 0, 30), write(1, 4, 8)
    into.on(late, 0.0)
    into.on(whole, 0.0)
    answer, report = into.on(a.Copied(whole, None), 0.0)
    assert isinstance(answer, a.Answer)
    assert isinstance(report, a.ArrivalReport)
    assert report.outcome is Outcome.failed
    assert report.error is not None
    assert report.error.code == "bad_spans"
    assert into.on(a.Copied(late, None), 0.0) == [a.Answer(late, None)]


def test_a_copy_that_ends_after_its_transfer_is_answered_alone() -> None:
    into, once, again = expecting(), write(0, 0, 10), write(0, 0, 10)
    into.on(once, 0.0)
    into.on(again, 0.0)
    (dropped,) = into.on(a.ArrivalStopped(KEY), 0.0)
    assert isinstance(dropped, a.Answer)
    assert dropped.write is again
    assert dropped.error is not None
    assert into.on(a.Copied(once, ERROR), 0.0) == [a.Answer(once, ERROR)]
