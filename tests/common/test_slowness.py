"""Deadlines grow on a machine that was measured as slow, and never shrink."""

from __future__ import annotations

import os
import time

import pytest

from tests.support import slowness


@pytest.mark.parametrize(
    ("speed", "contention", "load", "factor"),
    [
        (0.5, 1.0, 0.0, 1.0),  # faster than the reference
        (1.5, 1.0, 1.0, 1.5),
        (1.5, 3.0, 1.0, 4.5),  # the core was taken away while it was measured
        (1.0, 1.0, 5.0, 3.0),  # others came later
        (2.0, 2.0, 40.0, slowness.MOST),
    ],
)
def test_the_factor(
    monkeypatch: pytest.MonkeyPatch, speed: float, contention: float, load: float, factor: float
) -> None:
    monkeypatch.setattr(slowness, "_measured", lambda: (speed, contention))
    monkeypatch.setattr(slowness, "_cores", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert slowness.slowness() == factor
    assert slowness.deadline(20) == 20 * factor


def test_a_core_that_is_taken_away_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.process_time
    monkeypatch.setattr(time, "process_time", lambda: real() / 4)
    speed, contention = slowness._measured.__wrapped__()
    assert speed > 0
    assert contention > 3


def test_the_time_out_of_a_test_is_scaled(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("timeout")
    assert marker.args[0] >= float(request.config.getini("timeout"))
