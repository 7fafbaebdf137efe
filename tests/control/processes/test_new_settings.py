"""A rolling restart that brings new settings, event by event."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from typing import Any

import pytest

from tests.control.processes.test_rolling import GONE, answer, made
from tests.control.processes.test_supervisor import serving
from tests.support.slowness import deadline
from weft.common.errors import InvalidRequest, Unavailable
from weft.control.processes import channel
from weft.control.processes.commands import Prepares, carry_out
from weft.control.processes.engine_owner import EngineOwner
from weft.control.processes.rolling import Quit, RollingRestart, Settings
from weft.control.processes.supervisor import FrontIsReady, Supervisor
from weft.control.processes.table import Kill, Member, ProcessState, ProcessTable, Start


def begun(restarts: int = 5) -> tuple[ProcessTable, RollingRestart]:
    """Return a restart with new settings whose first process has ended and starts again."""
    table, rolling = made(["0", "1"], restarts)
    rolling.begin(renews=True)
    answer(table, rolling)
    assert rolling.tick(1.0) == [Settings(("0",), True)]  # from here on any next process has the settings
    answer(table, rolling)
    assert rolling.tick(2.0) == [Quit("0", 1)]
    assert table.lose("0", 1, GONE, 3.1) == [Kill("head", "0", 1), Start("head", "0", 2)]
    return table, rolling


def test_each_process_gets_the_settings_when_its_turn_comes() -> None:
    table, rolling = begun()
    rolling.seen("0", 2, True)
    assert rolling.tick(4.0) == [Settings(("1",), True)]
    answer(table, rolling)
    assert rolling.tick(5.0) == [Quit("1", 1)]
    table.lose("1", 1, GONE, 6.1)
    answer(table, rolling)
    assert rolling.tick(7.0) == []
    assert not rolling.active
    rolling.begin()  # a later restart keeps the settings
    answer(table, rolling)
    assert rolling.tick(8.0) == []


def test_a_process_that_does_not_come_up_gets_its_former_settings_and_the_rest_stays() -> None:
    table, rolling = begun()
    assert table.lose("0", 2, GONE, 4.0) == [Kill("head", "0", 2)]
    assert rolling.tick(4.1) == [Settings(("0",), False)]
    assert not rolling.active
    assert table.tick(5.0) == [Start("head", "0", 3)]
    entries = table.entries
    assert (entries["0"].incarnation, entries["0"].state) == (3, ProcessState.RUNNING)
    assert entries["0"].error is GONE
    assert (entries["1"].incarnation, entries["1"].draining) == (1, False)


def test_the_only_process_comes_back_without_a_restart_left_and_keeps_the_reason() -> None:
    table, rolling = made(["0"], restarts=0)
    rolling.begin(renews=True)
    answer(table, rolling)
    rolling.tick(1.0)
    table.lose("0", 1, GONE, 1.5)
    table.lose("0", 2, GONE, 4.0)
    assert not table.over
    assert rolling.tick(4.1) == [Settings(("0",), False)]
    assert table.tick(5.0) == [Start("head", "0", 3)]
    assert table.entries["0"].error is GONE
    assert rolling.tick(5.1) == []  # from here on a death counts again
    table.lose("0", 3, GONE, 6.0)
    assert table.over


def test_an_expert_parallel_group_without_a_restart_left_starts_once() -> None:
    table, rolling = made({"a": Member("all"), "b": Member("all")}, restarts=0)
    rolling.begin(renews=True)
    answer(table, rolling)
    rolling.tick(1.0)
    table.lose("a", 1, GONE, 1.5)
    table.lose("b", 1, GONE, 1.6)
    assert table.lose("a", 2, GONE, 4.0) == [Kill("head", "a", 2)]
    back = [Kill("head", "b", 2), Start("head", "b", 3)]
    assert rolling.tick(4.1) == [Settings(("a", "b"), False), *back]
    assert table.tick(5.0) == [Start("head", "a", 3)]


def test_a_process_that_leaves_gets_no_settings() -> None:
    table, rolling = made(["0", "1"])
    rolling.begin(["0"], renews=True)
    assert rolling.remove(["0"], 1.0) == []
    answer(table, rolling)
    assert rolling.tick(1.1) == []


def test_a_process_that_died_before_its_turn_gets_the_settings_too() -> None:
    table, rolling = begun()
    assert table.lose("1", 1, GONE, 3.2) == [Kill("head", "1", 1), Start("head", "1", 2)]  # former settings
    rolling.seen("0", 2, True)
    assert rolling.tick(4.0) == [Settings(("1",), True)]
    assert rolling.watched == {"1": 2}
    answer(table, rolling)
    assert rolling.tick(5.0) == [Quit("1", 2)]
    table.lose("1", 2, GONE, 6.1)
    answer(table, rolling)
    assert rolling.tick(7.0) == []
    assert not rolling.active
    assert table.entries["1"].incarnation == 3


def test_a_process_without_a_successor_delays_the_restart() -> None:
    table, rolling = begun()
    for number in (1, 2, 3):
        table.lose("1", number, GONE, 3.2)
    rolling.seen("0", 2, True)
    assert rolling.tick(4.0) == []
    assert rolling.active
    table.tick(10.0)
    assert rolling.tick(10.1) == [Settings(("1",), True)]
    assert rolling.watched == {"1": 4}


def test_a_process_that_is_retired_before_its_turn_ends_the_restart_without_a_kill() -> None:
    table, rolling = begun(restarts=0)
    table.lose("1", 1, GONE, 3.2)
    rolling.seen("0", 2, True)
    assert rolling.tick(4.0) == []
    assert not rolling.active
    assert table.entries["1"].state is ProcessState.RETIRED


def test_a_whole_expert_parallel_group_gets_the_settings() -> None:
    table, rolling = made({"0": Member(), "a": Member("all"), "b": Member("all")})
    rolling.begin(renews=True)
    answer(table, rolling)
    rolling.tick(1.0)
    table.lose("a", 1, GONE, 1.5)
    answer(table, rolling)
    rolling.tick(2.0)
    table.lose("0", 1, GONE, 2.5)
    rolling.seen("0", 2, True)
    assert rolling.tick(3.0) == [Settings(("a", "b"), True)]
    answer(table, rolling)
    assert rolling.tick(4.0) == [Quit("a", 2), Quit("b", 1)]


class Starter:
    """A starter whose settings are prepared once ``go`` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def prepare(self, topology: str, names: Collection[str]) -> None:
        """Wait for ``go``; refuse the topology "wrong"."""
        assert self.go.wait(deadline(10))
        if topology == "wrong":
            raise InvalidRequest("wrong", param="topology")


@pytest.mark.parametrize("topology", ["right", "wrong"])
def test_a_supervisor_goes_on_while_new_settings_are_prepared(topology: str) -> None:
    supervisor, starter = serving(), Starter()
    asked = channel.GroupRestarted("", 7, topology)

    def on(event: Any) -> None:
        assert supervisor.on(event, 2.0) == []

    found = carry_out(asked, supervisor, starter, on)  # type: ignore[arg-type]
    assert isinstance(found, Prepares)
    assert not supervisor.rolling.active
    starter.go.set()
    found.done.exception(10)
    verdict = carry_out(asked, supervisor, starter, on, found.done)  # type: ignore[arg-type]
    assert isinstance(verdict, channel.Verdict)
    assert (verdict.error is None) == supervisor.rolling.active == (topology == "right")


def test_an_api_server_goes_on_while_new_settings_are_prepared() -> None:
    async def restart() -> None:
        starter = Starter()
        owner = EngineOwner(["0"], starter, 5)  # type: ignore[arg-type]
        first = asyncio.create_task(owner.restart("", "right"))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="try again later"):
            await owner.restart("", "right")
        starter.go.set()
        assert await first == ["0"]

    asyncio.run(restart())


def test_no_group_starts_while_groups_get_new_settings() -> None:
    supervisor = Supervisor({"all0": Member(group="all0", base="all")}, ["0"], restarts=5, drain_timeout=30.0)
    supervisor.start(0.0)
    supervisor.on(FrontIsReady("0", 1), 1.0)
    supervisor.rolling.begin(renews=True)
    asked = channel.GroupsScaled("all", 2, 7)
    refused = carry_out(asked, supervisor, Starter(), lambda _: None)  # type: ignore[arg-type]
    assert isinstance(refused, channel.Verdict)
    assert refused.error is not None
    assert "new groups are possible afterwards" in refused.error.message
