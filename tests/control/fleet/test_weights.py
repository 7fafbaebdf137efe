"""Versions of the weights in a fleet: new attempts go to the newest, tokens carry the version."""

from __future__ import annotations

from tests.control.fleet.driver import Driver
from weft.control.fleet import fleet_events as e
from weft.types.weights import WeightsChanged


def test_new_attempts_wait_for_the_newest_weights() -> None:
    driver = Driver("a", "b").up()
    first = driver.open(1)
    assert first is not None
    driver.tokens(first, 1, 5)
    driver.on(e.Versioned(1))
    assert driver.open(2, request=2) is None  # no instance has changed yet
    driver.tokens(first, 1, 6)
    driver.say(first, WeightsChanged(version=1))
    assert driver.fleet.entries[2].places.keys() == {first}
    driver.tokens(first, 1, 7)
    versions = [event.weights for event in driver.delivered() if event.sequence == 1 and event.token_ids]
    assert versions[-1] == 1
    # The other instance still has the old weights, so a stream of a lost instance waits.
    driver.lose(first)
    assert not driver.fleet.entries[1].places
    other = "b" if first == "a" else "a"
    driver.say(other, WeightsChanged(version=1))
    assert driver.fleet.entries[1].places.keys() == {other}
