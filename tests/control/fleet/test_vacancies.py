"""A role that an operator has scaled to zero: requests wait for the role, each for its own time."""

from __future__ import annotations

import math

from tests.control.fleet.driver import PATIENCE, Driver
from weft.control.fleet import fleet_events as e
from weft.control.fleet.vacancies import vacant
from weft.front.lifecycle import places
from weft.types import messages as m

LONG = 3 * PATIENCE.recovery


def emptied(**options: bool) -> Driver:
    """Return a fleet of one prefill and one decode instance, of which the decode instance has left."""
    roles: dict[str, m.Role] = {"prefill0": "prefill", "decode0": "decode", "decode1": "decode"}
    driver = Driver("prefill0", "decode0", roles=roles, local_prefill=False, elastic=True).up()
    if options.get("lost"):
        driver.lose("decode0")
    driver.on(e.Left("decode0"))
    driver.wait(LONG)
    return driver


def ended(driver: Driver) -> list[int]:
    """Return the sequences that ended with an error since the last event or wait."""
    return [one.sequence for deliver in driver.of(e.Deliver) for one in deliver.events if one.error]


def test_each_request_waits_for_its_own_time() -> None:
    driver = emptied()
    assert vacant(driver.fleet.table)
    assert driver.fleet.refusal() is None
    assert driver.open(1) is None
    driver.wait(PATIENCE.recovery / 2)
    assert driver.open(2, request=2) is None
    driver.wait(PATIENCE.recovery / 2 - 1)
    assert ended(driver) == []
    driver.wait(2)
    assert ended(driver) == [1]
    driver.wait(PATIENCE.recovery / 2)
    assert ended(driver) == [2]
    assert driver.fleet.next_deadline() > driver.now


def test_a_group_that_joins_gets_the_requests() -> None:
    driver = emptied()
    assert driver.open(1) is None
    driver.on(e.Joined("decode1", ""))
    driver.wait(5)
    assert ended(driver) == []
    driver.up("decode1")
    assert driver.fleet.entries[1].places.keys() == {"prefill0", "decode1"}
    assert not vacant(driver.fleet.table)
    driver.on(e.Closed((1,)))
    assert driver.fleet.next_deadline() > driver.now


def test_a_group_that_dies_while_it_joins_changes_nothing() -> None:
    driver = emptied()
    assert driver.open(1) is None
    driver.on(e.Joined("decode1", ""))
    driver.expect("decode1")
    driver.lose("decode1")
    assert ended(driver) == []
    assert driver.fleet.refusal() is None


def test_a_lost_group_is_no_vacancy() -> None:
    """The wait counts from the loss, as for a group that is restarted."""
    driver = emptied(lost=True)
    assert not vacant(driver.fleet.table)
    assert driver.fleet.refusal() is not None


def test_a_lost_group_of_a_role_that_others_left_is_no_vacancy() -> None:
    driver = emptied()
    driver.on(e.Joined("decode1", ""))
    driver.up("decode1")
    driver.lose("decode1")
    driver.wait(LONG)
    assert not vacant(driver.fleet.table)
    assert driver.fleet.refusal() is not None


def test_waiting_sequences_have_a_deadline() -> None:
    driver = emptied()
    assert driver.open(1) is None
    assert driver.fleet.next_deadline() < math.inf


def test_a_server_without_groups_has_room_for_requests_that_wait() -> None:
    assert (places([], elastic=True), places([])) == (1, 0)
