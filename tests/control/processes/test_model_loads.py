"""The engines of all models at the supervisor: ends of processes, and reports about earlier loads."""

from __future__ import annotations

import time

from tests.support.slowness import deadline
from weft.common.errors import EngineDead
from weft.control.links.link import Address
from weft.control.model_fronts import SharedTable
from weft.control.models import ModelFacts, ModelState
from weft.control.processes import channel
from weft.control.processes.engine_owner import EngineOwner
from weft.control.processes.model_loads import ModelLoads


class Process:
    """An engine process; ``status`` is None while the process runs."""

    status: int | None = None

    def poll(self) -> int | None:
        return self.status


class Processes:
    """The engine processes of one model, and their starter."""

    def __init__(self) -> None:
        self.started: list[Process] = []
        self.closed = 0

    def start(self, name: str = "", incarnation: int = 0) -> object:
        if not name:
            owner = EngineOwner(["0"], self, 0)  # type: ignore[arg-type]
            owner.start()
            return owner
        self.started.append(Process())
        return Address("ipc:///nowhere", self.started[-1], incarnation=incarnation)

    def kill(self, name: str, incarnation: int) -> None:
        self.started[-1].status = self.started[-1].status or -9

    def close(self, seconds: float) -> None:
        self.closed += 1


def test_a_model_without_engines_is_unloaded_although_no_api_server_is_connected() -> None:
    table, processes = SharedTable([ModelFacts("a", 1)]), Processes()
    loads = ModelLoads(table, {"a": processes})  # type: ignore[dict-item]
    loads.command(channel.ModelAsked("a", "load", 0))
    loads.report("0/1", channel.ModelReady(channel.Load("a", 1)))
    assert table.admits("a")
    assert [record.load for record in loads.engine_records()] == [1]
    processes.started[0].status = -9
    loads.turn()
    (shown,) = table.record().models
    assert (shown.state, shown.failure) == ("draining", "the engine 0 ended with status -9")
    until = time.monotonic() + deadline(10)
    while table.entries["a"].state is not ModelState.COLD:
        assert time.monotonic() < until
        time.sleep(0.01)
        loads.turn()
    assert processes.closed == 1
    assert loads.engine_records() == []
    # Reports about the load that has ended
    loads.report("0/1", channel.ModelReady(channel.Load("a", 1)))
    loads.lost(channel.EngineLost("0", 1, EngineDead("gone").info(), channel.Load("a", 1)))
    assert table.entries["a"].state is ModelState.COLD
    assert len(processes.started) == 1
