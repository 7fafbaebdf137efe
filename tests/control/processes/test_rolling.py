"""The rolling restart, event by event: no process, no clock."""

from __future__ import annotations

import pytest

from weft.common.errors import EngineDead
from weft.control.processes.rolling import ABSENT_S, QUIT_S, SETTLE_S, Quit, RollingRestart, Switch
from weft.control.processes.table import Kill, Member, ProcessState, ProcessTable, Start

GONE = EngineDead("the process ended")


def made(members: dict[str, Member] | list[str], restarts: int = 5) -> tuple[ProcessTable, RollingRestart]:
    table = ProcessTable("head", members, restarts)
    table.start(0.0)
    return table, RollingRestart(table, 30.0)


def answer(table: ProcessTable, rolling: RollingRestart, *, idle: bool = True) -> None:
    """Report every watched process as answering."""
    for name, incarnation in rolling.watched.items():
        rolling.seen(name, incarnation, idle)


def test_one_after_the_other_and_only_when_it_is_idle() -> None:
    table, rolling = made(["0", "1"])
    assert rolling.tick(1.0) == []
    rolling.begin()
    assert rolling.watched == {"0": 1, "1": 1}
    rolling.seen("0", 1, True)
    assert rolling.tick(1.0) == []
    assert not table.entries["0"].draining  # the other one may still be loading
    rolling.seen("1", 1, True)
    assert rolling.tick(2.0) == []
    assert [entry.draining for entry in table.entries.values()] == [True, False]
    assert rolling.watched == {"0": 1}
    answer(table, rolling)
    assert rolling.tick(2.0 + SETTLE_S / 2) == []  # API servers may not have read the change yet
    rolling.seen("0", 1, False)
    assert rolling.tick(10.0) == []
    rolling.seen("0", 1, True)
    assert rolling.tick(11.0) == [Quit("0", 1)]
    assert rolling.tick(11.1) == []
    assert table.lose("0", 1, GONE, 11.2) == [Kill("head", "0", 1), Start("head", "0", 2)]
    assert rolling.tick(11.3) == []
    assert not table.entries["1"].draining
    rolling.seen("0", 1, True)  # old news
    assert rolling.tick(60.0) == []
    rolling.seen("0", 2, True)
    assert rolling.tick(61.0) == []
    assert table.entries["1"].draining
    answer(table, rolling)
    assert rolling.tick(63.0) == [Quit("1", 1)]
    table.lose("1", 1, GONE, 63.2)
    answer(table, rolling)
    assert rolling.tick(64.0) == []
    assert not rolling.active


def test_it_charges_no_budget() -> None:
    table, rolling = made(["0"], restarts=0)
    rolling.begin()
    answer(table, rolling)
    rolling.tick(1.0)
    assert table.lose("0", 1, GONE, 1.5) == [Kill("head", "0", 1), Start("head", "0", 2)]
    assert table.lose("0", 2, GONE, 2.0) == [Kill("head", "0", 2)]
    assert rolling.tick(2.5) == []
    assert not rolling.active


def test_work_that_does_not_end_and_processes_that_do_not_are_not_waited_for() -> None:
    table, rolling = made(["0"])
    rolling.begin()
    answer(table, rolling, idle=False)
    rolling.tick(1.0)
    answer(table, rolling, idle=False)
    assert rolling.tick(30.9) == []
    assert rolling.tick(31.0) == [Quit("0", 1)]
    assert rolling.tick(31.0 + QUIT_S - 0.1) == []
    assert rolling.tick(31.0 + QUIT_S) == [Kill("head", "0", 1), Start("head", "0", 2)]
    answer(table, rolling)
    rolling.tick(60.0)
    assert not rolling.active


def test_those_of_an_expert_group_go_together() -> None:
    table, rolling = made({"a": Member("d"), "b": Member("d"), "c": Member()})
    rolling.begin()
    answer(table, rolling)
    rolling.tick(1.0)
    assert [entry.draining for entry in table.entries.values()] == [True, True, False]
    rolling.seen("a", 1, True)
    assert rolling.tick(5.0) == []
    rolling.seen("b", 1, True)
    assert rolling.tick(5.0) == [Quit("a", 1), Quit("b", 1)]
    table.lose("a", 1, GONE, 6.0)
    rolling.seen("a", 2, True)
    assert rolling.tick(6.0) == []
    table.lose("b", 1, GONE, 6.0)
    rolling.seen("b", 2, True)
    rolling.tick(7.0)
    assert table.entries["c"].draining


def test_it_ends_where_one_does_not_come_back() -> None:
    table, rolling = made(["0", "1"])
    rolling.begin()
    rolling.begin()
    answer(table, rolling)
    rolling.tick(1.0)
    table.lose("0", 1, GONE, 2.0)
    table.lose("0", 2, GONE, 3.0)
    assert rolling.tick(4.0) == []
    assert not rolling.active
    assert table.entries["1"].state is ProcessState.RUNNING
    assert not table.entries["1"].draining


def test_reports_of_before_the_drain_do_not_prove_an_idle_engine() -> None:
    table, rolling = made(["0"])
    rolling.begin()
    answer(table, rolling)
    rolling.tick(1.0)
    answer(table, rolling)
    assert rolling.tick(1.0 + SETTLE_S / 2) == []
    rolling.seen("0", 1, None)  # the engine computes a long new prompt and sends nothing
    assert rolling.tick(1.0 + 2 * SETTLE_S) == []
    answer(table, rolling)
    assert rolling.tick(1.0 + 3 * SETTLE_S) == [Quit("0", 1)]


def test_a_drain_ends_if_the_expert_group_does_not_come_back() -> None:
    table, rolling = made({"0": Member("all", "g"), "1": Member("all", "g")})
    rolling.begin()
    answer(table, rolling)
    rolling.tick(1.0)
    table.lose("0", 1, GONE, 1.5)
    table.lose("0", 2, GONE, 1.6)
    actions = rolling.tick(1.7)
    assert Kill("head", "1", 1) in actions
    assert Start("head", "1", 2) in actions
    assert not rolling.active
    assert not table.entries["1"].draining


def test_a_switch_waits_until_all_are_idle_and_replaces_all_at_once() -> None:
    """No process of the old operations works beside a process of the new ones."""
    table, rolling = made(["0", "1"])
    rolling.begin_switch()
    assert rolling.watched == {"0": 1, "1": 1}
    rolling.seen("0", 1, True)
    rolling.seen("1", 1, False)
    assert rolling.tick(100.0) == []
    assert not any(entry.draining for entry in table.entries.values())
    rolling.seen("0", 1, False)
    rolling.seen("1", 1, True)
    assert rolling.tick(101.0) == []  # idle by turns is not idle
    rolling.seen("0", 1, True)
    assert rolling.tick(102.0) == []
    assert all(entry.draining for entry in table.entries.values())
    answer(table, rolling)
    assert rolling.tick(102.0 + SETTLE_S / 2) == []
    answer(table, rolling)
    assert rolling.tick(102.0 + SETTLE_S) == [Switch(), Quit("0", 1), Quit("1", 1)]
    for name in ("0", "1"):
        table.lose(name, 1, GONE, 104.0)
    answer(table, rolling)
    assert rolling.tick(105.0) == []
    assert rolling.watched == {}
    assert not any(entry.draining for entry in table.entries.values())


def test_a_switch_waits_for_streams_that_no_engine_has() -> None:
    """A paused stream goes on later from tokens of the old operations."""
    table, rolling = made(["0"])
    rolling.begin_switch()
    rolling.keeps("a", 0)
    rolling.keeps("b", 1)
    answer(table, rolling)
    assert rolling.tick(1.0) == []
    assert not table.entries["0"].draining
    rolling.keeps("b", 0)
    assert rolling.tick(2.0) == []
    assert table.entries["0"].draining
    answer(table, rolling)
    rolling.keeps("a", 1)  # its client stopped reading just before the drain
    assert rolling.tick(2.0 + SETTLE_S) == []
    answer(table, rolling)
    rolling.keeps("a", 0)
    assert rolling.tick(2.5 + SETTLE_S) == [Switch(), Quit("0", 1)]


def test_a_restart_waits_for_no_stream_that_no_engine_has() -> None:
    table, rolling = made(["0"])
    rolling.keeps("a", 1)
    rolling.begin()
    answer(table, rolling)
    rolling.tick(1.0)
    rolling.tick(1.0 + SETTLE_S / 2)
    answer(table, rolling)
    assert rolling.tick(1.0 + SETTLE_S) == [Quit("0", 1)]


def test_a_waiting_restart_names_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    """Once, and not before the process had time to answer."""
    _, rolling = made(["0", "1"])
    rolling.begin()
    rolling.seen("0", 1, True)
    for now in (0.0, ABSENT_S - 1):
        assert rolling.tick(now) == []
    assert "does not answer" not in caplog.text
    for now in (ABSENT_S, ABSENT_S + 1, 10 * ABSENT_S):
        assert rolling.tick(now) == []
    assert caplog.text.count("the rolling restart waits for 1, which does not answer") == 1


def test_work_that_came_before_fronts_knew_keeps_the_old_operations() -> None:
    """Work that outlasts the drain keeps the old operations, and the switch happens later."""
    table, rolling = made(["0", "1"])
    rolling.begin_switch()
    answer(table, rolling)
    rolling.tick(1.0)
    rolling.seen("0", 1, True)
    rolling.seen("1", 1, False)
    assert rolling.tick(30.9) == []
    old = [Kill("head", "0", 1), Start("head", "0", 2), Kill("head", "1", 1), Start("head", "1", 2)]
    assert rolling.tick(31.0) == old
    assert not any(entry.draining for entry in table.entries.values())
    answer(table, rolling)
    rolling.tick(40.0)
    answer(table, rolling)
    assert rolling.tick(42.0) == [Switch(), Quit("0", 2), Quit("1", 2)]


def test_no_switch_while_a_process_waits_to_be_started_again() -> None:
    table, rolling = made(["0", "1"])
    for number in range(1, 4):
        table.lose("1", number, GONE, 0.1 * number)
    assert table.entries["1"].state is ProcessState.WAITING
    rolling.begin_switch()
    rolling.seen("0", 1, True)
    assert rolling.tick(0.5) == []
    assert not table.entries["0"].draining


def test_a_death_before_a_switch_leaves_nobody_draining_and_the_switch_for_later() -> None:
    """The successor of the dead process has the old operations, and takes work."""
    table, rolling = made(["0", "1"])
    rolling.begin_switch()
    answer(table, rolling)
    rolling.tick(1.0)
    assert table.lose("0", 1, GONE, 1.5) == [Kill("head", "0", 1), Start("head", "0", 2)]
    assert rolling.tick(1.6) == [Kill("head", "1", 1), Start("head", "1", 2)]
    assert not any(entry.draining for entry in table.entries.values())
    rolling.seen("0", 1, True)  # old news
    rolling.seen("0", 2, True)
    assert rolling.tick(5.0) == []
    rolling.seen("1", 2, True)
    rolling.tick(6.0)
    answer(table, rolling)
    assert rolling.tick(8.0) == [Switch(), Quit("0", 2), Quit("1", 2)]


def test_a_restart_that_is_asked_for_goes_before_a_switch() -> None:
    table, rolling = made(["0"])
    rolling.begin_switch()
    rolling.begin()
    answer(table, rolling, idle=False)
    rolling.tick(1.0)
    answer(table, rolling)
    assert rolling.tick(3.0) == [Quit("0", 1)]
    table.lose("0", 1, GONE, 3.5)
    answer(table, rolling)
    assert rolling.tick(4.0) == []
    answer(table, rolling)
    rolling.tick(5.0)
    answer(table, rolling)
    assert rolling.tick(7.0) == [Switch(), Quit("0", 2)]


def test_a_server_that_ends_switches_no_more() -> None:
    _, rolling = made(["0"])
    rolling.begin_switch()
    rolling.end()
    rolling.seen("0", 1, True)
    assert rolling.tick(5.0) == []
    assert rolling.watched == {}


def test_where_the_server_ends_those_that_drain_take_work_again() -> None:
    """Otherwise requests without an engine would wait in vain until the end of the server."""
    table, rolling = made({"a": Member("d"), "b": Member("d"), "c": Member()})
    rolling.begin()
    answer(table, rolling)
    rolling.tick(1.0)
    assert [entry.draining for entry in table.entries.values()] == [True, True, False]
    rolling.end()
    assert not any(entry.draining for entry in table.entries.values())
    assert not rolling.active
    assert rolling.tick(60.0) == []


def test_where_the_server_ends_those_that_drain_for_a_switch_take_work_again() -> None:
    table, rolling = made(["0"])
    rolling.begin_switch()
    answer(table, rolling)
    rolling.tick(1.0)
    assert table.entries["0"].draining
    rolling.end()
    assert not table.entries["0"].draining
    answer(table, rolling)
    assert rolling.tick(5.0) == []


def test_a_process_ended_by_the_server_is_replaced() -> None:
    """The next process answers the requests that wait. Engines that were not drained yet stay."""
    table, rolling = made(["0", "1"])
    rolling.begin()
    answer(table, rolling)
    rolling.tick(1.0)
    answer(table, rolling)
    assert rolling.tick(3.0) == [Quit("0", 1)]
    rolling.end()
    assert rolling.tick(3.0 + QUIT_S) == [Kill("head", "0", 1), Start("head", "0", 2)]
    answer(table, rolling)
    assert rolling.tick(30.0) == []
    assert not rolling.active
    assert not table.entries["1"].draining
