"""First start without one of the hosts: all requests that can be served are served."""

from __future__ import annotations

import pytest

from tests.control.fleet.driver import Driver
from tests.control.fleet.test_pairs import ROLES
from weft.control.fleet import fleet_events as e
from weft.control.fleet.instance_table import ABSENT_S
from weft.types import messages as m


def start(one: Driver, *there: str) -> None:
    """Expect processes for all instances. The processes of ``there`` come and answer."""
    for name in one.fleet.table.instances:
        one.expect(name)
    for name in there:
        one.on(e.Located(name, one.link[name]))
        one.on(e.Linked(name, one.link[name]))
        one.say(name, one.welcome(name))


def passes(one: Driver, seconds: float) -> bool:
    """Let time pass. Return True if requests are now accepted."""
    one.now += seconds
    for name, instance in one.fleet.table.instances.items():
        if instance.alive:
            one.say(name, m.Heartbeat(idle=True, stats=m.EngineStats()))
    one.on(e.Tick())
    return one.of(e.Complete) == [e.Complete()]


def test_one_path_is_enough_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    one = Driver("a", "b")
    start(one, "a")
    assert one.fleet.refusal() is not None
    assert one.fleet.next_deadline() == one.now + ABSENT_S
    assert not passes(one, ABSENT_S - 1)
    assert passes(one, 1)
    assert caplog.messages == ["the server starts without b: the hosts have not connected"]
    assert one.fleet.refusal() is None
    assert one.open(1) == "a"
    assert one.fleet.table.alive
    assert not one.fleet.table.whole
    one.on(e.Located("b", one.link["b"]))
    one.on(e.Linked("b", one.link["b"]))
    one.say("b", one.welcome("b"))
    assert one.fleet.table.whole
    assert one.open(2, request=2) == "b"


def test_one_that_is_there_and_loads_is_waited_for() -> None:
    one = Driver("a", "b")
    start(one, "a")
    one.on(e.Located("b", one.link["b"]))
    assert not passes(one, 2 * ABSENT_S)
    assert one.fleet.refusal() is not None


def test_half_a_path_is_none() -> None:
    one = Driver("p", "d", roles=ROLES, local_prefill=False)
    start(one, "p")
    assert not passes(one, 2 * ABSENT_S)
