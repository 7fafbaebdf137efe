"""What the fleet actor keeps, without Ray."""

from __future__ import annotations

from tests.control.directory.test_leases import record
from weft.on_ray.fleet_state import FleetState, GroupPlan


def plan(group: str) -> GroupPlan:
    return GroupPlan(group=group, base="decode", role="decode", engines=(group,))


def test_a_known_group_keeps_its_place() -> None:
    state = FleetState()
    state.want([plan("decode0"), plan("decode1")])
    state.want([plan("decode0")])
    assert [one.group for one in state.snapshot().plans] == ["decode0", "decode1"]
    state.unwant("decode0")
    state.unwant("decode0")
    assert [one.group for one in state.snapshot().plans] == ["decode1"]


def test_records_are_replaced_and_withdrawn_by_incarnation() -> None:
    state = FleetState()
    state.publish([record(incarnation=1), record("prefill0")])
    state.publish([record(incarnation=2)])
    state.withdraw("decode0", 1)
    assert {one.name: one.incarnation for one in state.snapshot().records} == {"decode0": 2, "prefill0": 7}
    state.withdraw("decode0", 2)
    assert [one.name for one in state.snapshot().records] == ["prefill0"]


def test_an_order_to_drain_reaches_one_incarnation() -> None:
    state = FleetState()
    state.drain("decode0", 1)
    assert state.publish([record(incarnation=1)]) == {"decode0"}
    assert state.publish([record(incarnation=2)]) == set()
    state.withdraw("decode0", 1)
    assert state.publish([record(incarnation=1)]) == set()
