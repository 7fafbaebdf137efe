"""One event gives one line; planned ends are no errors; many refusals are counted."""

from __future__ import annotations

import logging

import pytest

from tests.control.fleet.driver import PATIENCE, Driver
from weft.common.errors import EngineDead
from weft.control.fleet import fleet_events as e
from weft.types import messages as m


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_death_is_one_error_and_a_planned_end_is_none(caplog: pytest.LogCaptureFixture) -> None:
    one = Driver("a", "b").up()
    one.lose("a", EngineDead("the engine's process ended with status -9"))
    assert errors(caplog) == ["engine a is lost: the engine's process ended with status -9"]
    caplog.clear()
    one.on(e.Draining("b"))
    one.lose("b")
    assert errors(caplog) == []


def test_an_engine_that_reports_its_failure_is_one_error(caplog: pytest.LogCaptureFixture) -> None:
    one = Driver("a", "b").up()
    one.say("a", m.EngineFailed(error=EngineDead("no memory").info()))
    assert errors(caplog) == ["engine a is lost: no memory"]


def test_the_first_start_leaves_the_last_line_to_who_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    one = Driver("a")
    one.expect("a")
    one.on(e.Linked("a", one.link["a"]))
    one.say("a", m.EngineFailed(error=EngineDead("--kv-cache-memory is too small").info()))
    assert one.fleet.failure is not None
    assert one.fleet.failure.message == "--kv-cache-memory is too small"
    assert errors(caplog) == []


def test_requests_that_wait_too_long_are_no_errors_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    one = Driver("a").up()
    one.lose("a")
    for number in range(50):
        one.open(number, request=number)
    caplog.clear()
    one.now += PATIENCE.recovery
    one.on(e.Tick())
    assert len(one.delivered()) == 50
    assert errors(caplog) == []
    assert [line for line in caplog.messages if "fails" in line] == [
        "a request fails: the engine failed and did not come back in time; try again later"
    ]
