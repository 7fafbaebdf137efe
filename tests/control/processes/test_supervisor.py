"""The supervisor of several fronts, event by event: no process, no clock."""

from __future__ import annotations

import signal

import pytest

from weft.common.errors import EngineDead, InvalidRequest, NotFound
from weft.config.topology import serves
from weft.control.processes import supervisor as s
from weft.control.processes.rolling import QUIT_S, Quit, Switch
from weft.control.processes.scaling import to_revive
from weft.control.processes.supervisor import ServerPhase, Supervisor
from weft.control.processes.table import (
    SHORT_S,
    WINDOW,
    Kill,
    Member,
    ProcessState,
    ProcessTable,
    Start,
)

GONE = EngineDead("the process ended")


def started(engines: int = 1, fronts: int = 2, restarts: int = 5, together: bool = False) -> Supervisor:
    """Return a supervisor whose processes started at time 0."""
    made = Supervisor(
        {str(n): Member("all" if together else "") for n in range(engines)},
        [str(n) for n in range(fronts)],
        restarts=restarts,
        drain_timeout=30.0,
    )
    assert len(made.start(0.0)) == engines + fronts
    return made


def serving(engines: int = 1, fronts: int = 2, restarts: int = 5, together: bool = False) -> Supervisor:
    """Return a supervisor whose API servers are ready."""
    made = started(engines, fronts, restarts, together)
    for number in range(fronts):
        actions = made.on(s.FrontIsReady(str(number), 1), 1.0)
        assert actions == ([s.Announce()] if number == fronts - 1 else [])
    return made


def test_engines_start_before_fronts_and_have_numbers() -> None:
    made = Supervisor(["0"], ["0", "1"], restarts=1, drain_timeout=1.0)
    assert made.start(0.0) == [Start("head", "0", 1), Start("front", "0", 1), Start("front", "1", 1)]


@pytest.mark.parametrize("role", ["head", "front"])
def test_nothing_is_tried_twice_at_the_first_start(role: str) -> None:
    assert started().on(s.ProcessEnded(role, "0", 1, 1), 1.0) == [s.Exit(1)]
    assert started().on(s.ProcessEnded(role, "0", 1, -9), 1.0) == [s.Exit(1)]
    assert started().on(s.ProcessEnded(role, "0", 1, 2), 1.0) == [s.Exit(2)]


def test_an_engine_that_all_report_is_replaced_once() -> None:
    made = serving()
    assert made.on(s.FrontLostEngine("0", 1, GONE), 2.0) == [Kill("head", "0", 1), Start("head", "0", 2)]
    assert made.on(s.FrontLostEngine("0", 1, GONE), 2.1) == []
    assert made.on(s.ProcessEnded("head", "0", 1, -9), 2.2) == []
    assert made.on(s.FrontLostEngine("0", 2, GONE), 3.0) == [Kill("head", "0", 2), Start("head", "0", 3)]


def test_a_front_that_ends_is_started_again_and_the_server_is_announced_once() -> None:
    made = serving()
    assert made.on(s.ProcessEnded("front", "1", 1, -9), 2.0) == [
        Kill("front", "1", 1),
        Start("front", "1", 2),
    ]
    assert made.on(s.FrontIsReady("1", 2), 3.0) == []
    assert made.on(s.FrontIsReady("1", 1), 3.0) == []
    # Without a signal an end in order is none, either.
    assert made.on(s.ProcessEnded("front", "0", 1, 0), 4.0) == [Kill("front", "0", 1), Start("front", "0", 2)]


def test_fronts_and_engines_have_budgets_of_their_own() -> None:
    made = serving(restarts=1)
    assert Start("front", "0", 2) in made.on(s.ProcessEnded("front", "0", 1, 1), 2.0)
    assert Start("head", "0", 2) in made.on(s.ProcessEnded("head", "0", 1, 1), 2.0)
    assert made.on(s.ProcessEnded("front", "0", 2, 1), 3.0) == [Kill("front", "0", 2)]
    assert made.phase is ServerPhase.SERVING
    assert made.on(s.ProcessEnded("front", "1", 1, 1), 4.0) == [Kill("front", "1", 1), s.Exit(1)]
    assert made.on(s.Signalled(signal.SIGTERM), 5.0) == []


def test_without_an_engine_fronts_end_by_themselves_and_then_the_server() -> None:
    made = serving(restarts=0)
    assert made.on(s.ProcessEnded("head", "0", 1, -9), 2.0) == [Kill("head", "0", 1)]
    assert made.engines.over
    assert made.on(s.ProcessEnded("front", "0", 1, 1), 3.0) == []
    assert made.on(s.ProcessEnded("front", "1", 1, 1), 3.0) == [s.Exit(1)]


def test_engines_of_an_expert_group_are_retired_together() -> None:
    made = serving(engines=2, restarts=0, together=True)
    made.on(s.ProcessEnded("head", "0", 1, -9), 2.0)
    assert [entry.state for entry in made.engines.entries.values()] == [ProcessState.RETIRED] * 2
    alone = serving(engines=2, restarts=0)
    alone.on(s.ProcessEnded("head", "0", 1, -9), 2.0)
    assert [entry.state for entry in alone.engines.entries.values()] == [
        ProcessState.RETIRED,
        ProcessState.RUNNING,
    ]


def test_a_signal_drains_and_a_second_one_cuts() -> None:
    made = serving()
    assert made.on(s.Signalled(signal.SIGHUP), 2.0) == [s.Tell("0", "drain"), s.Tell("1", "drain")]
    assert made.on(s.Signalled(signal.SIGHUP), 2.1) == []
    assert made.on(s.ProcessEnded("front", "0", 1, 0), 3.0) == []
    assert made.on(s.ProcessEnded("front", "0", 1, 0), 3.1) == []
    assert Start("head", "0", 2) in made.on(s.FrontLostEngine("0", 1, GONE), 3.5)  # for the remaining streams
    assert made.on(s.Signalled(signal.SIGTERM), 4.0) == [s.Tell("1", "stop")]
    assert made.on(s.Signalled(signal.SIGTERM), 4.0) == []
    assert made.on(s.ProcessEnded("front", "1", 1, 130), 5.0) == [s.Exit(130)]


def test_a_drain_ends_with_the_last_front() -> None:
    made = serving()
    made.on(s.Signalled(signal.SIGTERM), 2.0)
    made.on(s.ProcessEnded("front", "0", 1, 0), 3.0)
    assert made.on(s.ProcessEnded("front", "1", 1, 0), 3.0) == [s.Exit(0)]
    failed = serving()
    failed.on(s.Signalled(signal.SIGTERM), 2.0)
    failed.on(s.ProcessEnded("front", "0", 1, -9), 3.0)
    assert failed.on(s.ProcessEnded("front", "1", 1, 0), 3.0) == [s.Exit(1)]


def test_a_front_that_is_not_ready_again_has_nothing_to_drain() -> None:
    made = serving()
    made.on(s.ProcessEnded("front", "0", 1, -9), 2.0)
    assert made.on(s.Signalled(signal.SIGTERM), 2.5) == [s.Tell("0", "stop"), s.Tell("1", "drain")]
    made.on(s.ProcessEnded("front", "0", 2, 1), 3.0)
    assert made.on(s.ProcessEnded("front", "1", 1, 0), 3.0) == [s.Exit(0)]


def test_fronts_that_do_not_end_are_not_waited_for() -> None:
    made = serving()
    made.on(s.Signalled(signal.SIGTERM), 2.0)
    assert made.on(s.SupervisorTick(), 2.0 + 30.0) == []
    assert made.on(s.SupervisorTick(), 2.0 + 30.0 + s.END_S) == [s.Exit(1)]
    forced = serving()
    forced.on(s.Signalled(signal.SIGTERM), 2.0)
    forced.on(s.Signalled(signal.SIGTERM), 3.0)
    assert forced.on(s.SupervisorTick(), 3.0 + s.END_S) == [s.Exit(130)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_it_is_ready_ends_it_at_once(number: int) -> None:
    assert started().on(s.Signalled(number), 0.5) == [s.Exit(128 + number)]


def ticks(made: Supervisor, begin: float, end: float, alive: str = "") -> list[s.Action]:
    actions: list[s.Action] = []
    now = begin
    while now < end:
        actions += made.on(s.SupervisorTick(), now)
        if alive:
            made.on(s.FrontIsAlive(alive, 1), now)
        now += 0.5
    return actions


def test_a_front_that_is_silent_is_replaced() -> None:
    made = serving()
    actions = ticks(made, 1.0, 1.0 + s.SILENT_S + 2, alive="1")
    assert actions == [Kill("front", "0", 1), Start("front", "0", 2)]


def test_silence_while_the_supervisor_stood_still_proves_nothing() -> None:
    made = serving()
    assert ticks(made, 1.0, 2.0) == []
    assert ticks(made, 500.0, 500.0 + s.SILENT_S - 2) == []


def test_restarts_are_forgotten_after_the_window() -> None:
    table = ProcessTable("head", ["0"], 1)
    table.start(0.0)
    assert len(table.lose("0", 1, GONE, 1.0)) == 2
    assert len(table.lose("0", 2, GONE, 1.0 + WINDOW)) == 2
    assert table.lose("0", 3, GONE, 2.0 + WINDOW) == [Kill("head", "0", 3)]
    assert table.entries["0"].error is GONE
    assert table.lose("0", 3, GONE, 3 * WINDOW) == []


def test_one_that_dies_again_and_again_is_started_later_and_later() -> None:
    table = ProcessTable("head", ["0"], 100)
    table.start(0.0)
    now, waits = 0.0, []
    for incarnation in range(1, 10):
        now += 1.0
        actions = table.lose("0", incarnation, GONE, now)
        if len(actions) == 1:
            assert table.entries["0"].state is ProcessState.WAITING
            assert table.lose("0", incarnation, GONE, now) == []
            began = now
            while not (started := table.tick(now)):
                now += 0.5
            assert started == [Start("head", "0", incarnation + 1)]
            waits.append(now - began)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    now += SHORT_S  # the process ran well for a while
    assert len(table.lose("0", 10, GONE, now)) == 2
    assert table.tick(now + 100.0) == []


def test_a_process_that_waits_for_its_restart_does_not_delay_the_end() -> None:
    made = serving()
    for incarnation in (1, 2, 3):
        made.on(s.ProcessEnded("front", "0", incarnation, 1), 2.0)
    assert made.fronts.entries["0"].state is ProcessState.WAITING
    assert made.on(s.Signalled(signal.SIGTERM), 2.1) == [s.Tell("1", "drain")]
    assert made.on(s.ProcessEnded("front", "1", 1, 0), 3.0) == [s.Exit(0)]


def groups(restarts: int = 0) -> ProcessTable:
    members = {
        name: Member(group=name, role=name.rstrip("012")) for name in ("prefill0", "decode0", "decode1")
    }
    table = ProcessTable("head", members, restarts, serves)
    table.start(0.0)
    return table


def test_groups_have_budgets_of_their_own() -> None:
    table = groups(restarts=1)
    assert table.lose("decode0", 1, GONE, 1.0)[1:] == [Start("head", "decode0", 2)]
    assert table.lose("decode0", 2, GONE, 2.0) == [Kill("head", "decode0", 2)]
    assert table.entries["decode0"].state is ProcessState.RETIRED
    assert table.lose("decode1", 1, GONE, 3.0)[1:] == [Start("head", "decode1", 2)]
    assert table.lose("prefill0", 1, GONE, 4.0)[1:] == [Start("head", "prefill0", 2)]


def test_remaining_groups_end_if_they_cannot_serve() -> None:
    table = groups()
    assert table.lose("decode0", 1, GONE, 1.0) == [Kill("head", "decode0", 1)]
    assert not table.over
    assert table.lose("decode1", 1, GONE, 2.0) == [Kill("head", "decode1", 1), Kill("head", "prefill0", 1)]
    assert table.over
    assert {entry.error for entry in table.entries.values()} == {GONE}


def test_a_retired_group_is_revived_with_a_new_budget() -> None:
    table = groups(restarts=1)
    for incarnation in (1, 2):
        table.lose("decode0", incarnation, GONE, 1.0)
    table.lose("decode1", 1, GONE, 1.0)
    assert table.revive("decode1", 2.0) == []  # the engine runs
    assert table.revive("decode0", 2.0) == [Start("head", "decode0", 3)]
    entry = table.entries["decode0"]
    assert (entry.state, entry.error, entry.deaths) == (ProcessState.RUNNING, None, 0)
    assert table.revive("decode0", 2.0) == []
    assert table.lose("decode0", 3, GONE, 3.0)[1:] == [Start("head", "decode0", 4)]
    assert table.lose("decode0", 4, GONE, 4.0) == [Kill("head", "decode0", 4)]
    assert entry.state is ProcessState.RETIRED
    assert table.lose("decode1", 2, GONE, 5.0) == [Kill("head", "decode1", 2), Kill("head", "prefill0", 1)]
    assert table.over
    assert table.revive("decode0", 6.0) == []  # the server ends


def test_engines_of_an_expert_group_are_revived_together() -> None:
    members = {
        name: Member(expert_group, name[0]) for name, expert_group in [("a0", "a"), ("a1", "a"), ("b", "")]
    }
    for name in ("a", "a1"):
        table = ProcessTable("head", members, 0)
        table.start(0.0)
        assert len(table.lose("a0", 1, GONE, 1.0)) == 2
        assert table.revive(name, 2.0) == [Start("head", "a0", 2), Start("head", "a1", 2)]


def test_names_of_engines_to_revive() -> None:
    members = {"prefill0": Member(group="prefill0"), "d.0": Member(group="d"), "d.1": Member(group="d")}
    assert to_revive("d", members, ["d.1"]) == ["d.1"]
    assert to_revive("d.1", members, ["d.0", "d.1"]) == ["d.1"]
    with pytest.raises(NotFound, match=r"unknown group 'e'; the groups are prefill0, d$"):
        to_revive("e", members, ["d.1"])
    with pytest.raises(NotFound, match="unknown group ''"):
        to_revive("", {"0": Member()}, ["0"])
    with pytest.raises(InvalidRequest, match=r"no engine of 'd\.0' is retired"):
        to_revive("d.0", members, ["d.1"])


def test_a_supervisor_revives_while_it_serves() -> None:
    made = serving(engines=2, restarts=0)
    assert made.on(s.ProcessEnded("head", "0", 1, 1), 2.0) == [Kill("head", "0", 1)]
    assert made.on(s.ReviveAsked("0"), 3.0) == [Start("head", "0", 2)]
    assert made.engines.entries["0"].state is ProcessState.RUNNING
    made.on(s.ProcessEnded("head", "0", 2, 1), 4.0)
    made.on(s.Signalled(signal.SIGTERM), 5.0)
    assert made.on(s.ReviveAsked("0"), 6.0) == []


def test_a_switch_waits_until_the_server_is_ready() -> None:
    """Before, the end of any process ends the server."""
    made = started()
    made.on(s.SwitchAsked(), 0.5)
    for now in (1.0, 3.0, 5.0):
        made.on(s.EngineSeen("0", 1, True), now)
        assert made.on(s.SupervisorTick(), now) == []
    assert not made.engines.entries["0"].draining
    for number in ("0", "1"):
        made.on(s.FrontIsReady(number, 1), 6.0)
    for now in (6.1, 7.0, 7.2):
        made.on(s.EngineSeen("0", 1, True), now)
        actions = made.on(s.SupervisorTick(), now)
    assert actions == [Switch(), Quit("0", 1)]


def test_a_rolling_restart_is_the_supervisors() -> None:
    made = serving(engines=2)
    made.on(s.RestartAsked(), 2.0)
    for name in ("0", "1"):
        made.on(s.EngineSeen(name, 1, True), 2.0)
    assert made.on(s.SupervisorTick(), 2.0) == []
    made.on(s.EngineSeen("0", 1, True), 2.0)
    assert made.on(s.SupervisorTick(), 4.0) == [Quit("0", 1)]
    assert made.on(s.ProcessEnded("head", "0", 1, 0), 5.0) == [Kill("head", "0", 1), Start("head", "0", 2)]
    made.on(s.Signalled(signal.SIGTERM), 6.0)
    made.on(s.EngineSeen("0", 2, True), 6.5)
    assert made.on(s.SupervisorTick(), 7.0) == []
    assert not made.rolling.active  # the other one is not replaced
    assert not made.engines.entries["1"].draining
    early = started(engines=2)
    early.on(s.RestartAsked(), 0.5)
    assert not early.rolling.active


def test_a_signal_ends_the_drain_of_engines() -> None:
    made = serving(engines=1)
    made.on(s.RestartAsked(), 2.0)
    made.on(s.EngineSeen("0", 1, False), 2.0)
    made.on(s.SupervisorTick(), 2.0)
    assert made.engines.entries["0"].draining
    made.on(s.Signalled(signal.SIGTERM), 2.5)
    assert not made.engines.entries["0"].draining
    assert made.on(s.SupervisorTick(), 20.0) == []


def test_an_engine_with_the_order_to_end_is_replaced_although_the_server_drains() -> None:
    made = serving(engines=1)
    made.on(s.RestartAsked(), 2.0)
    for now in (2.0, 4.0):
        made.on(s.EngineSeen("0", 1, True), now)
        actions = made.on(s.SupervisorTick(), now)
    assert actions == [Quit("0", 1)]
    made.on(s.Signalled(signal.SIGTERM), 4.5)
    assert made.on(s.SupervisorTick(), 4.0 + QUIT_S) == [Kill("head", "0", 1), Start("head", "0", 2)]


def test_a_server_whose_engines_come_and_go_with_models_has_none_here_and_serves() -> None:
    made = serving(engines=0)
    assert made.on(s.RestartAsked(), 2.0) == made.on(s.SupervisorTick(), 2.0) == []
    assert made.on(s.FrontIsLost("0", 1), 3.0) == [Kill("front", "0", 1), Start("front", "0", 2)]
    assert made.on(s.FrontIsLost("0", 1), 3.1) == [], "an earlier process"
    made.on(s.ProcessEnded("front", "1", 1, 1), 4.0)
    assert made.fronts.entries["1"].state is ProcessState.RUNNING, "replaced"
    made.on(s.FrontIsReady("0", 2), 5.0)
    assert made.on(s.Signalled(signal.SIGTERM), 6.0) == [s.Tell("0", "drain"), s.Tell("1", "stop")]
    made.on(s.ProcessEnded("front", "1", 2, 0), 7.0)
    assert made.on(s.ProcessEnded("front", "0", 2, 0), 7.0) == [s.Exit(0)]


def test_an_api_server_that_does_not_answer_is_not_replaced_while_the_server_drains() -> None:
    made = serving(engines=0)
    made.on(s.Signalled(signal.SIGTERM), 2.0)
    assert made.on(s.FrontIsLost("0", 1), 3.0) == [Kill("front", "0", 1)]
    assert made.on(s.FrontIsLost("0", 1), 3.1) == []
    assert made.on(s.ProcessEnded("front", "0", 1, -9), 3.1) == []
    assert made.on(s.ProcessEnded("front", "1", 1, 0), 4.0) == [s.Exit(1)], "streams were cut off"


def test_one_api_server_carries_out_changes_until_its_process_has_ended() -> None:
    made = started(fronts=3)
    assert made.carrier == ""
    made.on(s.FrontIsReady("1", 1), 1.0)
    assert made.carrier == "1"
    for name in "02":
        made.on(s.FrontIsReady(name, 1), 2.0)
    assert made.carrier == "1"
    made.on(s.ProcessEnded("front", "1", 1, -9), 3.0)
    assert made.carrier == "0"
    made.on(s.FrontIsReady("1", 2), 4.0)
    assert made.carrier == "0", "the former one takes nothing back"
    made.on(s.FrontIsLost("0", 1), 5.0)  # the kill comes before the next record
    assert made.carrier == "1"
