"""The state of the fleet actor, without Ray."""

from __future__ import annotations

import msgspec

from tests.control.directory.test_leases import record
from weft.control.directory.record import EngineRecord
from weft.on_ray.fleet_state import GRACE_S, SILENT_S, FleetState
from weft.on_ray.plans import GroupPlan, Kept, Offer


def plan(group: str) -> GroupPlan:
    return GroupPlan(group=group, base="decode", role="decode", engines=(group,))


def offer(*groups: str, topology: str = "text", model: str = "m", named: bool = False) -> Offer:
    plans = tuple(plan(group) for group in groups)
    return Offer(topology=topology, model=model, named=named, restarts=1, drain_timeout=5, plans=plans)


def made(*groups: str) -> FleetState:
    """Return a state at time 0 after one offer, with all groups placed."""
    state = FleetState(Kept(secret="secret"), 0.0)
    assert state.offer(offer(*groups)) == ""
    assert [one.group for one in state.due([], 0.0)] == list(groups)
    return state


def wanted(state: FleetState) -> list[str]:
    return [one.group for one in state.snapshot().plans]


def attempt(state: FleetState, group: str = "decode0") -> int:
    return state.plans[group].attempt


def test_a_known_group_keeps_its_place_and_its_attempt() -> None:
    state = made("decode0", "decode1")
    first = attempt(state)
    state.want([plan("decode0")])
    assert (wanted(state), attempt(state)) == (["decode0", "decode1"], first)
    state.unwant("decode0")
    state.unwant("decode0")
    assert wanted(state) == ["decode1"]
    state.want([plan("decode0")])
    assert attempt(state) != first


def test_the_same_topology_again_undoes_no_order_of_the_operator() -> None:
    state = made("decode0", "decode1")
    state.want([plan("decode2")])
    state.unwant("decode0")
    assert state.offer(offer("decode0", "decode1")) == ""
    assert wanted(state) == ["decode1", "decode2"]
    assert state.offer(offer("decode0", topology="other")) == ""
    assert wanted(state) == ["decode1", "decode2", "decode0"]


def test_after_a_stop_the_same_topology_starts_its_groups_again() -> None:
    state = made("decode0", "decode1")
    state.stop()
    assert wanted(state) == []
    assert state.offer(offer("decode0", "decode1")) == ""
    assert wanted(state) == ["decode0", "decode1"]
    state.unwant("decode1")
    assert state.offer(offer("decode0", "decode1")) == ""
    assert wanted(state) == ["decode0"]


def test_a_name_outlives_its_groups_and_the_process() -> None:
    state = made("decode0", "decode1")
    state.unwant("decode0")
    state.unwant("decode1")
    again = FleetState(msgspec.msgpack.decode(msgspec.msgpack.encode(state.kept), type=Kept), 50.0)
    assert again.snapshot().plans == ()
    assert [one.group for one in again.snapshot().shapes] == ["decode0"]


def test_another_model_needs_a_name() -> None:
    state = made("decode0")
    assert state.offer(offer("decode9", topology="other", model="n")) == "m"
    assert (wanted(state), state.kept.topology, state.kept.model) == (["decode0"], "text", "m")
    assert state.offer(offer("decode9", topology="other", model="n", named=True)) == ""
    assert (state.kept.topology, state.kept.model) == ("other", "n")


def test_records_are_replaced_and_withdrawn_by_incarnation() -> None:
    state = made("decode0", "prefill0")

    def records(group: str, *found: EngineRecord) -> dict[str, int]:
        assert state.publish(group, attempt(state, group), 1, found, 0.0)
        return {one.name: one.incarnation for one in state.snapshot().records}

    records("decode0", record(incarnation=1))
    records("prefill0", record("prefill0"))
    assert records("decode0", record(incarnation=2)) == {"decode0": 2, "prefill0": 7}
    assert state.snapshot().ended == {"decode0": 1}
    assert records("decode0") == {"prefill0": 7}
    assert state.snapshot().ended == {"decode0": 1}  # a missing record proves no end
    assert records("decode0", record(incarnation=2)) == {"decode0": 2, "prefill0": 7}
    assert records("decode0") == {"prefill0": 7}
    assert state.publish("decode0", attempt(state), 1, [], 0.0, ended=True)
    assert state.snapshot().ended == {"decode0": 2}
    assert records("decode0", record(incarnation=3)) == {"decode0": 3, "prefill0": 7}
    # Another process of the actor: the engines of the one before have ended.
    assert state.admit("decode0", attempt(state), 2, 1.0)
    assert state.snapshot().ended == {"decode0": 3}


def test_a_late_call_changes_nothing() -> None:
    state = made("decode0")
    first = attempt(state)
    assert state.publish("decode0", first, 1, [record(incarnation=1)], 0.0, call=2)
    assert state.publish("decode0", first, 1, [], 1.0, call=1)
    assert [one.incarnation for one in state.snapshot().records] == [1]
    # The next process counts from 1 again.
    assert state.admit("decode0", first, 2, 2.0)
    assert state.publish("decode0", first, 2, [record(incarnation=2)], 3.0, call=1)
    assert [one.incarnation for one in state.snapshot().records] == [2]


def test_groups_start_with_the_topology_of_their_last_order() -> None:
    state = made("decode0", "decode1")
    larger = msgspec.structs.replace(plan("decode0"), cpus=2.0)
    changed = msgspec.structs.replace(offer(topology="new"), plans=(larger, plan("decode2")))
    assert state.offer(changed) == ""
    assert [state.text(f"decode{n}") for n in range(3)] == ["text", "text", "new"]
    assert not state.moves("decode1")
    assert state.text("decode1") == "new"
    state.kept.retired.add("decode0")
    state.revive("decode0")
    assert (state.text("decode0"), state.plans["decode0"].cpus) == ("new", 2.0)
    # A topology without the name: groups of the name keep the last topology that has the name.
    other = msgspec.structs.replace(plan("prefill0"), base="prefill")
    state.offer(msgspec.structs.replace(offer(topology="third"), plans=(other,)))
    assert not state.moves("decode1")
    state.want([plan("decode3")])
    assert [state.text(one) for one in ("decode1", "decode3", "prefill0")] == ["new", "new", "third"]


def test_a_group_that_waits_for_a_place_does_not_delay_a_rolling_restart() -> None:
    state = made("decode0", "decode1")
    assert state.admit("decode1", attempt(state, "decode1"), 1, 0.0)
    assert not state.waits("decode0", GRACE_S)  # perhaps this is a restarted fleet actor
    assert [state.waits(f"decode{n}", GRACE_S + 1) for n in range(2)] == [True, False]


def test_restarts_of_further_hosts_have_the_budget_of_the_group() -> None:
    state = made("decode0")
    first = attempt(state)
    for process in (1, 1, 2):
        state.claim("decode0/1", first, process, 0.0)
    assert state.snapshot().retired == ()
    state.claim("decode0/1", first, 3, 1.0)
    assert state.snapshot().retired == ("decode0",)


def test_a_process_on_a_node_that_ray_has_given_up_publishes_nothing() -> None:
    state = made("decode0")
    first = attempt(state)
    assert state.admit("decode0", first, 1, 0.0)
    assert state.admit("decode0", first, 2, 1.0)  # Ray has started the actor elsewhere
    assert state.publish("decode0", first, 2, [record(incarnation=2)], 2.0)
    assert state.publish("decode0", first, 1, [record(incarnation=1)], 3.0)
    assert [one.incarnation for one in state.snapshot().records] == [2]


def test_a_rolling_restart_outlives_the_process() -> None:
    state = made("decode0", "decode1")
    state.restart(["decode0", "decode1"])
    state.restart(["decode1"])
    state.restarted("decode0")
    again = FleetState(msgspec.msgpack.decode(msgspec.msgpack.encode(state.kept), type=Kept), 50.0)
    assert again.kept.restarting == ["decode1"]


def test_other_resources_hold_from_the_next_restart() -> None:
    """Then other actors start, after the end of the present ones."""
    state = made("decode0", "decode1")
    first = attempt(state)
    state.want([msgspec.structs.replace(plan("decode0"), cpus=2.0), plan("decode1")])
    assert (attempt(state), state.plans["decode0"].cpus) == (first, 1.0)
    assert not state.moves("decode1")
    assert state.moves("decode0")
    assert state.plans["decode0"].cpus == 2.0
    assert not state.publish("decode0", first, 1, [record()], 1.0)  # drains
    assert state.ending(["decode0", "decode1"]) == {"decode0"}
    assert state.due(["decode0", "decode1"], 1.0) == []
    state.left("decode0", first)
    assert [one.cpus for one in state.due(["decode1"], 2.0)] == [2.0]
    assert state.ending(["decode0", "decode1"]) == set()
    assert not state.kept.several_hosts
    for hosts in (2, 1):
        state.want([msgspec.structs.replace(plan("decode0"), hosts=hosts)])
    assert state.kept.several_hosts  # there may be placement groups


def test_restarts_have_a_budget_of_ten_minutes_and_a_revival_renews_the_budget() -> None:
    state = made("decode0")
    first = attempt(state)
    assert state.admit("decode0", first, 1, 0.0)
    assert state.admit("decode0", first, 1, 0.0)  # a lost answer, or a rolling restart
    assert state.admit("decode0", first, 2, 1.0)
    assert state.admit("decode0", first, 3, 700.0)
    assert not state.admit("decode0", first, 4, 701.0)
    assert not state.admit("decode0", first, 4, 2000.0)
    assert state.snapshot().retired == ("decode0",)
    assert state.due([], 2000.0) == []
    state.left("decode0", first)
    assert wanted(state) == ["decode0"]
    state.revive("decode0")
    assert [one.group for one in state.due([], 2000.0)] == ["decode0"]
    assert state.admit("decode0", attempt(state), 5, 2000.0)
    assert not state.admit("decode0", first, 4, 2000.0)


def test_an_actor_that_is_lost_for_good_counts_as_a_restart() -> None:
    state = made("decode0")
    assert state.due(["decode0"], 1.0) == []
    assert [one.group for one in state.due([], 2.0)] == ["decode0"]
    assert state.due([], 3.0) == []
    assert state.snapshot().retired == ("decode0",)


def test_a_removed_group_is_not_admitted_and_drains() -> None:
    state = made("decode0", "decode1")
    first = attempt(state)
    assert state.publish("decode0", first, 1, [record()], 0.0)
    state.unwant("decode0")
    assert not state.publish("decode0", first, 1, [record()], 1.0)
    assert not state.admit("decode0", first, 2, 1.0)


def test_a_group_that_is_wanted_again_while_it_drains_survives_its_end() -> None:
    state = made("decode0")
    first = attempt(state)
    state.publish("decode0", first, 1, [record()], 0.0)
    state.unwant("decode0")
    state.want([plan("decode0")])
    assert not state.publish("decode0", first, 1, [record()], 1.0)  # the old one still drains
    assert state.due(["decode0"], 1.0) == []
    state.left("decode0", first)
    assert state.snapshot().records == ()
    assert [one.group for one in state.due([], 2.0)] == ["decode0"]
    state.left("decode0", attempt(state))
    assert wanted(state) == []


def test_unwanted_actors_without_a_place_are_killed_and_others_drain() -> None:
    state = made("decode0", "decode1")
    first = attempt(state)
    late = GRACE_S + 1
    assert state.admit("decode0", first, 1, late)
    state.unwant("decode0")
    state.unwant("decode1")
    living = ["decode0", "decode1"]
    assert state.abandoned(living, GRACE_S - 1) == []  # perhaps this is a restarted fleet actor
    assert state.admit("decode0", first, 1, late) is False
    assert state.abandoned(living, late) == ["decode1"]
    assert state.abandoned(living, late + SILENT_S + 1) == living


def test_hosts_of_a_group_end_after_its_head_and_before_the_next_one() -> None:
    state = FleetState(Kept(secret="secret"), 0.0)
    state.want([msgspec.structs.replace(plan("decode0"), hosts=2)])
    first = attempt(state)
    assert len(state.due([], 0.0)) == 1
    assert [one.group for one in state.incomplete(["decode0"])] == ["decode0"]
    assert state.incomplete(["decode0", "decode0/1"]) == []
    state.meet("decode0", first, "10.0.0.1:99")
    assert state.kept.meetings == {"decode0": "10.0.0.1:99"}
    state.unwant("decode0")
    state.want([msgspec.structs.replace(plan("decode0"), hosts=2)])
    assert state.joins("decode0", first, ["decode0", "decode0/1"])  # the head drains
    assert state.due(["decode0", "decode0/1"], 1.0) == []
    assert not state.joins("decode0", first, ["decode0/1"])
    assert state.due(["decode0/1"], 2.0) == []
    assert len(state.due([], 3.0)) == 1
    assert not state.joins("decode0", first, ["decode0"])  # the next head
    assert state.joins("decode0", attempt(state), ["decode0"])


def test_engines_on_a_further_host_are_published_until_another_process_has_the_host() -> None:
    state = made("decode0")
    first = attempt(state)
    state.claim("decode0/1", first, 5, 0.0)
    assert state.publish("decode0/1", first, 5, [record("decode0.1")], 1.0)
    assert [one.name for one in state.snapshot().records] == ["decode0.1"]
    state.claim("decode0/1", first, 6, 1.0)
    assert state.snapshot().records == ()
    state.publish("decode0/1", first, 5, [record("decode0.1")], 2.0)
    assert state.snapshot().records == ()
    state.unwant("decode0")
    assert not state.publish("decode0/1", first, 6, [record("decode0.1")], 3.0)  # drains with the head


def test_hosts_without_a_place_are_killed_after_their_head() -> None:
    state = FleetState(Kept(secret="secret"), 0.0)
    state.want([msgspec.structs.replace(plan("decode0"), hosts=2)])
    first, late = attempt(state), GRACE_S + 1
    state.due([], 0.0)
    state.claim("decode0/2", first, 1, late)
    state.unwant("decode0")
    assert state.abandoned(["decode0", "decode0/1", "decode0/2"], late) == ["decode0"]
    assert state.abandoned(["decode0/1", "decode0/2"], late) == ["decode0/1"]
    assert state.abandoned(["decode0/2"], late + SILENT_S + 1) == ["decode0/2"]
    # The name is wanted again: actors of the earlier attempt block the next one.
    state.want([msgspec.structs.replace(plan("decode0"), hosts=2)])
    assert state.due(["decode0/1"], late) == []
    assert state.abandoned(["decode0/1"], late) == ["decode0/1"]
    assert len(state.due([], late)) == 1
    assert state.abandoned(["decode0", "decode0/1"], late) == []


def test_a_killed_actor_leaves_no_record_and_a_failed_start_costs_no_restart() -> None:
    state = made("decode0")
    state.unplaced(state.plans["decode0"])
    for now in (1.0, 2.0):  # one restart is permitted
        assert len(state.due([], now)) == 1
    state.publish("decode0", attempt(state), 1, [record()], 2.0)
    state.unwant("decode0")
    state.killed("decode0")
    assert (state.snapshot().records, state.snapshot().ended) == ((), {"decode0": 7})


def test_a_restarted_fleet_actor_kills_no_silent_group_that_is_wanted() -> None:
    kept = made("decode0").kept
    again = FleetState(kept, 50.0)
    assert again.abandoned(["decode0", "decode0/1"], 50.0 + SILENT_S) == []


def test_a_restarted_fleet_actor_has_the_groups_and_the_secret() -> None:
    state = made("decode0", "decode1")
    state.unwant("decode1")
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(state.kept), type=Kept)
    again = FleetState(kept, 50.0)
    assert (again.kept.secret, again.kept.topology, wanted(again)) == ("secret", "text", ["decode0"])
    assert again.ending(["decode0"]) == {"decode0"}
    assert again.publish("decode0", attempt(state), 1, [record()], 51.0)
    assert again.ending(["decode0"]) == set()
    assert again.due(["decode0"], 51.0) == []
    assert again.offer(offer("decode0", "decode1")) == ""
    assert wanted(again) == ["decode0"]
