"""Groups that are added and removed: the plan, the process table and the drain, event by event."""

from __future__ import annotations

import functools

import pytest

from weft.common.errors import EngineDead, InvalidRequest, NotFound
from weft.config.topology import serves
from weft.control.processes.rolling import SETTLE_S, Quit, RollingRestart
from weft.control.processes.scaling import Change, plan_removal, plan_restart, plan_scale
from weft.control.processes.table import Forget, Kill, Member, ProcessTable, Start

GONE = EngineDead("the process ended")
MEMBERS = {
    "prefill0": Member("", "prefill0", "prefill", "prefill"),
    "decode0": Member("", "decode0", "decode", "decode"),
    "decode1": Member("", "decode1", "decode", "decode"),
}
NONE: frozenset[str] = frozenset()


def made() -> tuple[ProcessTable, RollingRestart]:
    table = ProcessTable("head", MEMBERS, 5, serves)
    table.start(0.0)
    return table, RollingRestart(table, 30.0)


def test_more_groups_take_the_smallest_free_numbers() -> None:
    members = {name: one for name, one in MEMBERS.items() if name != "decode0"}
    change = plan_scale("decode", 3, members, NONE, NONE, serves)
    assert change.starting == ("decode0", "decode2")
    assert change.new["decode2"] == {"decode2": Member("", "decode2", "decode", "decode")}
    assert (change.leaving, change.like) == ([], "decode1")


def test_a_group_of_several_engines_is_added_and_removed_whole() -> None:
    members = {f"all0.{n}": Member("all0", "all0", "unified", "all") for n in range(2)}
    change = plan_scale("all", 2, members, NONE, NONE, serves)
    assert change.new == {"all1": {f"all1.{n}": Member("all1", "all1", "unified", "all") for n in range(2)}}
    both = {**members, **change.new["all1"]}
    assert plan_scale("all", 1, both, NONE, NONE, serves).leaving == ["all1.0", "all1.1"]
    assert plan_removal("all0.1", both, NONE, NONE, serves) == ["all0.0", "all0.1"]


def test_the_last_group_of_a_role_stays() -> None:
    assert plan_scale("decode", 1, MEMBERS, NONE, NONE, serves).leaving == ["decode1"]
    with pytest.raises(InvalidRequest, match="without a decode group"):
        plan_scale("decode", 0, MEMBERS, NONE, NONE, serves)
    with pytest.raises(InvalidRequest, match="without a prefill group"):
        plan_removal("prefill0", MEMBERS, NONE, NONE, serves)
    # A group that leaves already is no group that serves.
    with pytest.raises(InvalidRequest, match="without a decode group"):
        plan_removal("decode0", MEMBERS, frozenset({"decode1"}), NONE, serves)


def test_the_last_group_of_a_role_leaves_where_requests_wait_for_the_role() -> None:
    change = plan_scale("decode", 0, MEMBERS, NONE, NONE, serves, empty=True)
    assert change.leaving == ["decode0", "decode1"]
    left = {name: one for name, one in MEMBERS.items() if one.base != "decode"}
    assert plan_scale("decode", 1, left, NONE, NONE, serves, first=MEMBERS).starting == ("decode0",)
    one_left = {name: one for name, one in MEMBERS.items() if name != "decode1"}
    with pytest.raises(InvalidRequest, match="without a decode group"):
        plan_removal("decode0", one_left, NONE, NONE, serves)


def test_a_retired_group_is_no_group_that_serves() -> None:
    retired = frozenset({"decode0"})
    assert plan_scale("decode", 1, MEMBERS, NONE, retired, serves).leaving == ["decode0"]
    assert plan_removal("decode0", MEMBERS, NONE, retired, serves) == ["decode0"]
    with pytest.raises(InvalidRequest, match="without a decode group"):
        plan_removal("decode1", MEMBERS, NONE, retired, serves)


def test_one_engine_of_a_group_does_not_leave_alone_and_nobody_leaves_twice() -> None:
    members = {
        **MEMBERS,
        **{f"spare.{n}": Member("", "spare", "decode", "spare") for n in range(2)},
    }
    with pytest.raises(InvalidRequest, match="give the group spare"):
        plan_removal("spare.0", members, NONE, NONE, serves)
    assert plan_removal("spare", members, NONE, NONE, serves) == ["spare.0", "spare.1"]
    with pytest.raises(InvalidRequest, match="leaves the server already"):
        plan_removal("decode1", members, frozenset({"decode1"}), NONE, serves)


def test_unknown_names_and_numbers_are_refused() -> None:
    with pytest.raises(NotFound, match="prefill, decode"):
        plan_scale("decod", 2, MEMBERS, NONE, NONE, serves)
    with pytest.raises(InvalidRequest, match="0 to 1024"):
        plan_scale("decode", 5000, MEMBERS, NONE, NONE, serves)
    with pytest.raises(NotFound, match="decode9"):
        plan_removal("decode9", MEMBERS, NONE, NONE, serves)
    with pytest.raises(NotFound, match="weft up"):
        plan_scale("0", 2, {"0": Member()}, NONE, NONE, serves)


def test_a_group_drains_quits_and_is_gone() -> None:
    table, rolling = made()
    assert rolling.remove(["decode1"], 1.0) == []
    assert table.entries["decode1"].condition == "leaving"
    assert rolling.watched == {"decode1": 1}
    rolling.seen("decode1", 1, False)
    assert rolling.tick(1.0 + SETTLE_S) == []
    rolling.seen("decode1", 1, True)
    assert rolling.tick(9.0) == [Quit("decode1", 1)]
    assert table.lose("decode1", 1, GONE, 9.1) == [Kill("head", "decode1", 1), Forget("head", "decode1")]
    assert rolling.tick(9.2) == []
    assert not rolling.active
    assert list(table.entries) == ["prefill0", "decode0"]


def test_a_later_process_of_the_name_has_a_new_incarnation() -> None:
    table, rolling = made()
    rolling.remove(["decode1"], 1.0)
    table.lose("decode1", 1, GONE, 2.0)
    assert table.join({"decode1": MEMBERS["decode1"]}, 3.0) == [Start("head", "decode1", 2)]


def test_work_that_does_not_end_is_cut_after_the_drain_time() -> None:
    _, rolling = made()
    rolling.remove(["decode1"], 1.0)
    rolling.seen("decode1", 1, False)
    assert rolling.tick(30.9) == []
    assert rolling.tick(31.0) == [Quit("decode1", 1)]
    assert rolling.tick(60.0) == [Kill("head", "decode1", 1), Forget("head", "decode1")]


def test_a_group_that_waits_for_its_restart_is_gone_at_once() -> None:
    table, rolling = made()
    for incarnation in (1, 2, 3):
        table.lose("decode1", incarnation, GONE, 1.0)
    assert table.entries["decode1"].condition == "waiting"
    assert rolling.remove(["decode1"], 2.0) == [Forget("head", "decode1")]
    assert table.tick(100.0) == []


def test_a_removal_waits_for_the_replacement_under_way_and_survives_its_failure() -> None:
    table, rolling = made()
    rolling.begin()
    for name in table.entries:
        rolling.seen(name, 1, True)
    rolling.tick(1.0)  # prefill0 drains
    assert rolling.remove(["decode1"], 2.0) == []
    assert rolling.watched == {"prefill0": 1}
    rolling.seen("prefill0", 1, True)
    assert rolling.tick(3.0) == [Quit("prefill0", 1)]
    table.lose("prefill0", 1, GONE, 3.1)
    table.lose("prefill0", 2, GONE, 3.2)  # the new process does not come up: the restart is cancelled
    rolling.tick(3.3)
    rolling.tick(3.4)
    assert rolling.watched == {"decode1": 1}
    rolling.seen("decode1", 1, True)
    assert rolling.tick(5.0) == [Quit("decode1", 1)]
    table.lose("decode1", 1, GONE, 5.1)
    rolling.tick(5.2)
    assert not rolling.active  # decode0 was not replaced


def test_a_restart_of_one_group_leaves_the_others_alone() -> None:
    table, rolling = made()
    rolling.begin(plan_restart("decode0", table.members, table.leaving))
    for name in table.entries:
        rolling.seen(name, 1, True)
    rolling.tick(1.0)
    rolling.seen("decode0", 1, True)
    assert rolling.tick(3.0) == [Quit("decode0", 1)]
    table.lose("decode0", 1, GONE, 3.1)
    rolling.seen("decode0", 2, True)
    rolling.tick(4.0)
    assert not rolling.active
    assert [entry.incarnation for entry in table.entries.values()] == [1, 2, 1]


def test_a_removal_of_a_replacement_that_never_answers_ends() -> None:
    table, rolling = made()
    rolling.begin(["decode1"])
    for name in table.entries:
        rolling.seen(name, 1, True)
    rolling.tick(1.0)
    rolling.seen("decode1", 1, True)
    assert rolling.tick(3.0) == [Quit("decode1", 1)]
    table.lose("decode1", 1, GONE, 3.1)  # the next process hangs while it loads
    rolling.remove(["decode1"], 4.0)
    assert rolling.tick(5.0) == []
    assert rolling.tick(40.0) == [Quit("decode1", 2)]
    assert rolling.tick(80.0) == [Kill("head", "decode1", 2), Forget("head", "decode1")]
    rolling.tick(80.1)
    assert not rolling.active


def test_a_restart_that_is_requested_during_a_removal_follows() -> None:
    table, rolling = made()
    rolling.remove(["decode1"], 1.0)
    rolling.begin(plan_restart("decode0", table.members, table.leaving))
    with pytest.raises(InvalidRequest, match="the engines leave"):
        plan_restart("decode1", table.members, table.leaving)
    rolling.seen("decode1", 1, True)
    rolling.tick(3.0)
    table.lose("decode1", 1, GONE, 3.1)
    rolling.tick(3.2)
    rolling.tick(3.3)
    assert rolling.watched == {"prefill0": 1, "decode0": 1}  # until all answer
    for name in table.entries:
        rolling.seen(name, 1, True)
    rolling.tick(4.0)
    assert table.entries["decode0"].condition == "draining"


def test_a_group_that_comes_back_has_a_new_budget() -> None:
    table = ProcessTable("head", MEMBERS, 1, serves)
    table.start(0.0)
    for incarnation in (1, 2):
        table.lose("decode1", incarnation, GONE, 1.0)
    assert table.entries["decode1"].condition == "retired"
    RollingRestart(table, 30.0).remove(["decode1"], 2.0)
    table.join({"decode1": MEMBERS["decode1"]}, 3.0)
    assert Start("head", "decode1", 4) in table.lose("decode1", 3, GONE, 4.0)


def test_a_leaving_group_does_not_serve_when_another_is_retired() -> None:
    table = ProcessTable("head", MEMBERS, 0, serves)
    table.start(0.0)
    RollingRestart(table, 30.0).remove(["decode1"], 1.0)
    actions = table.lose("decode0", 1, GONE, 2.0)
    assert Kill("head", "prefill0", 1) in actions  # nothing is left that decodes


# -- groups that come back


def scaled(table: ProcessTable, rolling: RollingRestart, base: str, groups: int) -> Change:
    """Return the plan for a number of groups, with all that the owner knows."""
    state = (table.members, table.leaving, table.retired, table.serves)
    return plan_scale(base, groups, *state, first=table.first, returnable=rolling.returnable)


def test_a_group_that_drains_stays_before_a_new_group_starts() -> None:
    table, rolling = made()
    table.join({"decode2": Member("", "decode2", "decode", "decode")}, 0.0)
    rolling.remove(["decode1"], 1.0)
    rolling.remove(["decode2"], 2.0)
    assert rolling.returnable == ["decode2", "decode1"]
    change = scaled(table, rolling, "decode", 2)
    assert (change.returning, change.new) == (["decode2"], {})
    rolling.take_back(change.returning)
    assert table.entries["decode2"].condition == "running"
    assert scaled(table, rolling, "decode", 2) == Change({}, [], "decode0", [])
    change = scaled(table, rolling, "decode", 4)
    assert (change.returning, change.starting) == (["decode1"], ("decode3",))
    rolling.take_back(change.returning)
    rolling.tick(2.1)
    assert (rolling.watched, table.leaving) == ({}, NONE)
    # A later removal has its whole drain time.
    rolling.remove(["decode2"], 40.0)
    assert rolling.tick(41.0) == []


def test_a_group_with_the_order_to_quit_does_not_stay() -> None:
    table, rolling = made()
    rolling.remove(["decode1"], 1.0)
    rolling.tick(1.0)
    rolling.seen("decode1", 1, True)
    assert rolling.tick(9.0) == [Quit("decode1", 1)]
    assert rolling.returnable == []
    change = scaled(table, rolling, "decode", 2)
    assert (change.returning, change.starting) == ([], ("decode2",))


def test_one_of_two_groups_that_drain_together_stays() -> None:
    table, rolling = made()
    table.join({"decode2": Member("", "decode2", "decode", "decode")}, 0.0)
    rolling.remove(["decode1", "decode2"], 1.0)
    rolling.take_back(scaled(table, rolling, "decode", 2).returning)
    assert table.leaving == {"decode2"}
    rolling.tick(1.0)
    rolling.seen("decode2", 1, True)
    assert rolling.tick(9.0) == [Quit("decode2", 1)]


def test_a_restart_under_way_goes_on_when_the_group_stays() -> None:
    table, rolling = made()
    rolling.begin(["decode1"])
    for name in table.entries:
        rolling.seen(name, 1, True)
    rolling.tick(1.0)
    rolling.remove(["decode1"], 2.0)
    rolling.take_back(["decode1"])
    assert table.entries["decode1"].condition == "draining"
    rolling.seen("decode1", 1, True)
    assert rolling.tick(5.0) == [Quit("decode1", 1)]
    assert table.lose("decode1", 1, GONE, 5.1) == [Kill("head", "decode1", 1), Start("head", "decode1", 2)]


def test_a_name_without_groups_stays_known() -> None:
    members = {**MEMBERS, "big": Member("", "big", "decode", "big")}
    table = ProcessTable("head", members, 5, serves)
    table.start(0.0)
    rolling = RollingRestart(table, 30.0)
    rolling.remove(scaled(table, rolling, "big", 0).leaving, 1.0)
    table.lose("big", 1, GONE, 2.0)
    rolling.tick(2.1)
    change = scaled(table, rolling, "big", 1)
    assert change == Change({"big0": {"big0": Member("", "big0", "decode", "big")}}, [], "big", [])
    with pytest.raises(NotFound, match="prefill, decode, big"):
        scaled(table, rolling, "small", 1)


# -- the last group of a role


TOWER, BLIND = Member(role="unified", tower=True), Member(role="unified")
ENCODE = Member("", "encode0", "encode", "encode", tower=True)


@pytest.mark.parametrize(
    ("computing", "leaves"), [([TOWER], True), ([BLIND], False), ([TOWER, BLIND], False)]
)
def test_encode_groups_may_leave_if_all_other_groups_have_a_tower(
    computing: list[Member], leaves: bool
) -> None:
    members = {"encode0": ENCODE, **{str(n): one for n, one in enumerate(computing)}}
    if leaves:
        assert plan_scale("encode", 0, members, NONE, NONE, serves).leaving == ["encode0"]
    else:
        with pytest.raises(InvalidRequest, match="without an encode group"):
            plan_scale("encode", 0, members, NONE, NONE, serves)


def test_a_role_may_leave_if_other_groups_do_its_work() -> None:
    members = {**MEMBERS, "all0": Member("", "all0", "unified", "all")}
    assert plan_removal("prefill0", members, NONE, NONE, serves) == ["prefill0"]
    assert plan_scale("decode", 0, members, NONE, NONE, serves).leaving == ["decode0", "decode1"]
    assert plan_removal("all0", members, NONE, NONE, serves) == ["all0"]
    # The fallback of decode groups is for failures, not for a planned removal.
    local = functools.partial(serves, fallback="local")
    with pytest.raises(InvalidRequest, match="without a prefill group"):
        plan_removal("prefill0", MEMBERS, NONE, NONE, local)
    # A unified group without a tower cannot replace a prefill group with images.
    seeing = {**members, "prefill0": MEMBERS["prefill0"]._replace(tower=True)}
    with pytest.raises(InvalidRequest, match="without a prefill group"):
        plan_removal("prefill0", seeing, NONE, NONE, serves)
