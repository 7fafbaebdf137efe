"""Waits for a device: the deadline, the check, and the timer slack of the thread."""

from __future__ import annotations

import sys
import time

import pytest

from tests.support.slowness import deadline
from weft.common.errors import EngineDead
from weft.runner import event_wait
from weft.runner.event_wait import SPIN_S, wait_until


def slack() -> int:
    assert event_wait._prctl is not None
    return event_wait._prctl(event_wait._GET, 0, 0, 0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="timer slack is Linux's")
def test_sleeps_are_exact_during_the_wait_alone() -> None:
    before, during, until = slack(), [], time.monotonic() + 0.003

    def there() -> bool:
        during.append(slack())
        return time.monotonic() > until

    wait_until(there, time.monotonic() + deadline(30), "late")
    assert during[0] == before == slack()
    assert during[-1] == event_wait.TIMER_SLACK_NS < before


def test_a_wait_ends_at_the_deadline_and_restores_the_slack() -> None:
    before = slack() if sys.platform == "linux" else 0
    with pytest.raises(EngineDead, match="too late"):
        wait_until(lambda: False, time.monotonic() + 0.01, "too late")
    assert not before or slack() == before


def test_a_sandbox_without_timer_slack_waits_with_plain_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, until = list[tuple[int, ...]](), time.monotonic() + 0.001
    monkeypatch.setattr(event_wait, "_prctl", lambda *given: calls.append(given) or -1)
    wait_until(lambda: time.monotonic() > until, time.monotonic() + deadline(30), "late")
    assert calls == [(event_wait._GET, 0, 0, 0, 0)]


def test_sleeps_grow_with_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long wait asks rarely, and a result that is nearly there is found without a sleep."""
    now, naps = [0.0], []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        now[0] += seconds

    def clock() -> float:
        now[0] += 1e-6
        return now[0]

    monkeypatch.setattr(event_wait.time, "monotonic", clock)
    monkeypatch.setattr(event_wait.time, "sleep", nap)
    wait_until(lambda: now[0] > SPIN_S / 2, 100.0, "late")
    assert not naps
    wait_until(lambda: now[0] > 1.0, 100.0, "late")
    assert naps[0] == event_wait.NAP_S
    assert naps[-1] == pytest.approx(1 / event_wait.SHARE, rel=0.1)
    assert len(naps) < 2500
