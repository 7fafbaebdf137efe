"""Orders of operators, planned in the state of the fleet."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")

from tests.control.directory.test_leases import record
from tests.on_ray.test_fleet_state import attempt, offer
from weft.on_ray.fleet_state import FleetState
from weft.on_ray.orders import carry_out
from weft.on_ray.plans import GroupPlan, Kept, Order, Ordered


def group(name: str, role: str) -> GroupPlan:
    return GroupPlan(group=name, base=name.rstrip("0123456789"), role=role, engines=(name,))


def made(**roles: str) -> FleetState:
    """Return a state with groups, name -> role."""
    state = FleetState(Kept(secret="secret"), 0.0)
    plans = tuple(group(name, role) for name, role in roles.items())
    state.offer(msgspec.structs.replace(offer(), plans=plans))
    return state


def refusal(answer: Ordered) -> str:
    return "" if answer.error is None else answer.error.message


def test_two_orders_at_the_same_time_leave_a_group_of_each_role() -> None:
    """Both API servers have seen two decode groups."""
    state = made(prefill0="prefill", decode0="decode", decode1="decode")
    assert carry_out(state, Order(what="drain", name="decode0")).leaving == ("decode0",)
    assert "without a decode group" in refusal(carry_out(state, Order(what="drain", name="decode1")))
    assert list(state.plans) == ["prefill0", "decode1"]
    for wanted in (3, 3):
        carry_out(state, Order(what="scale", name="decode", groups=wanted))
    assert list(state.plans) == ["prefill0", "decode1", "decode0", "decode2"]


@pytest.mark.parametrize(("tower", "drained"), [(True, True), (False, False)])
def test_the_last_encode_group_drains_if_all_others_have_a_tower(tower: bool, drained: bool) -> None:
    """The records know the towers. A group without a record counts as one without."""
    state = made(encode0="encode", unified0="unified")
    order = Order(what="drain", name="encode0")
    assert "without an encode group" in refusal(carry_out(state, order))
    published = msgspec.structs.replace(record("unified0"), role="unified", tower=tower)
    assert state.publish("unified0", attempt(state, "unified0"), 1, [published], 0.0)
    assert (carry_out(state, order).leaving == ("encode0",)) is drained


def test_restarts_and_revivals_name_groups_and_engines() -> None:
    state = made(unified0="unified", unified1="unified")
    assert carry_out(state, Order(what="restart", name="")).starting == ("unified0", "unified1")
    assert state.kept.restarting == ["unified0", "unified1"]
    assert "no engine of 'unified1' is retired" in refusal(
        carry_out(state, Order(what="revive", name="unified1"))
    )
    state.kept.retired.add("unified1")
    before = attempt(state, "unified1")
    assert carry_out(state, Order(what="revive", name="unified1")).starting == ("unified1",)
    assert attempt(state, "unified1") != before
    for order in (Order(what="drain", name="nobody"), Order(what="restart", name="nobody")):
        assert "the groups are unified0, unified1" in refusal(carry_out(state, order))
