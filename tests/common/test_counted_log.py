"""Log lines that clients can cause at will: the first is logged, the others are counted."""

from __future__ import annotations

import logging

import pytest

from tests.support.counted import drop_counts
from weft.common.counted_log import MOST_KINDS, CountedLog, Tally


def test_the_first_is_reported_and_the_rest_are_counted() -> None:
    tally = Tally(window=60.0)
    assert [tally.add("refused", f"no {n}", 100.0 + n / 100) for n in range(694)] == [True, *[False] * 693]
    assert tally.next_due() == 160.0
    assert tally.due(159.0) == []
    assert [(one.kind, one.times, one.last) for one in tally.due(160.0)] == [("refused", 693, "no 693")]
    assert tally.next_due() is None
    assert not tally.add("refused", "again", 161.0)  # one line a window
    assert [one.times for one in tally.due(220.0)] == [1]
    assert tally.add("refused", "much later", 400.0)


def test_kinds_are_distinguished_and_bounded() -> None:
    tally = Tally()
    assert all(tally.add(f"kind {n}", "", 0.0) for n in range(MOST_KINDS))
    assert [tally.add(f"further {n}", "text", 0.0) for n in range(3)] == [True, False, False]
    assert [(one.times, one.last) for one in tally.due(60.0)] == [(2, "text")]


def test_a_log_tells_the_sum_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    log = CountedLog(logging.getLogger("weft.test"), window=0.05)
    with caplog.at_level("WARNING", "weft.test"):
        for number in range(5):
            log.warn("refused: %s", number)
        timer = log._timer
        assert timer is not None
        timer.join()
    assert caplog.messages == ["refused: 0", "4 more times; the last one: refused: 4"]


def test_no_count_of_a_test_is_logged_in_a_later_test(caplog: pytest.LogCaptureFixture) -> None:
    log = CountedLog(logging.getLogger("weft.test"), window=0.05)
    with caplog.at_level("WARNING", "weft.test"):
        log.warn("refused: %s", 1)
        log.warn("refused: %s", 2)
        timer = log._timer
        assert timer is not None
        drop_counts()
        timer.join()
        log.warn("refused: %s", 3)
    assert caplog.messages == ["refused: 1", "refused: 3"]
