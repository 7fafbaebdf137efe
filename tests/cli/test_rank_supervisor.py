"""Worker processes that a server keeps for its engines: one per rank, and none after the server's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

import msgspec
import pytest

from tests.faults.rig import config_of
from tests.support.processes import is_alive
from tests.support.slowness import deadline, until
from weft.common.errors import EngineDead
from weft.config.resolved import EngineConfig
from weft.engine.ranks.rank_supervisor import RankSupervisor
from weft.engine.ranks.ranks import RankProcesses, rank_address
from weft.engine.ranks.supervised_ranks import SupervisedRanks

PATIENCE = deadline(60.0)


def config_in(folder: str) -> EngineConfig:
    """Return a configuration whose workers wait for an engine that never listens."""
    return msgspec.structs.replace(config_of(tensor_parallel_size=2), socket_folder=folder)


@pytest.mark.requirement("F40")
def test_the_next_engine_finds_the_workers() -> None:
    with tempfile.TemporaryDirectory(prefix="w") as folder:
        config = config_in(folder)
        supervisor = RankSupervisor(1, lambda _: RankProcesses(config, rank_address(config), "error"))
        try:
            first = SupervisedRanks(supervisor.link(0))
            assert [first.spawn(1), first.spawn(2), first.spawn(1)] == [False, False, True]
            pids = [first.pid(1), first.pid(2)]
            assert pids[0] != pids[1]
            first.close(0)
            second = SupervisedRanks(supervisor.link(0))
            assert not second.keeps(1)
            assert second.spawn(1)
            assert second.pid(1) == pids[0]
            os.kill(pids[1], signal.SIGKILL)  # not a process of this engine
            os.kill(pids[0], signal.SIGKILL)
            until(second.dead)
            assert second.dead() == [(1, "its process ended with signal 9")]
            second.kill(1)
            assert second.dead() == []
            assert [second.spawn(1), second.spawn(2)] == [False, False]
            os.kill(second.pid(1), signal.SIGSTOP)
            stopped = second.pid(1)
            second.kill(1)
            assert not is_alive(stopped)
            left = second.pid(2)
            assert is_alive(left)
        finally:
            supervisor.close(0.0)
        assert not is_alive(left)
        with pytest.raises(EngineDead, match="the rank supervisor"):
            second.spawn(1)


def test_workers_with_former_settings_end_when_the_next_engine_comes() -> None:
    with tempfile.TemporaryDirectory(prefix="w") as folder:
        config = config_in(folder)
        processes = RankProcesses(config, rank_address(config), "error")
        supervisor = RankSupervisor(1, lambda _: processes)
        try:
            first = SupervisedRanks(supervisor.link(0))
            first.spawn(1)
            before = first.pid(1)
            renewed = msgspec.structs.replace(config, group="renewed")
            supervisor.use(lambda _: renewed)
            assert is_alive(before)  # the present engine goes on with its worker
            second = SupervisedRanks(supervisor.link(0))
            assert not second.spawn(1)
            assert not is_alive(before)
            assert msgspec.msgpack.decode(processes._config, type=EngineConfig) == renewed
            third = SupervisedRanks(supervisor.link(0))
            assert third.spawn(1)  # the settings are those of the worker
        finally:
            supervisor.close(0.0)


def test_workers_end_with_the_server_however_it_ends() -> None:
    code = (
        "import os, signal, sys, msgspec\n"
        "from weft.config.resolved import EngineConfig\n"
        "from weft.engine.ranks.supervised_ranks import SupervisedRanks\n"
        "from weft.engine.ranks.ranks import RankProcesses, rank_address\n"
        "from weft.engine.ranks.rank_supervisor import RankSupervisor\n"
        "config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)\n"
        "supervisor = RankSupervisor(1, lambda _: RankProcesses(config, rank_address(config), 'error'))\n"
        "ranks = SupervisedRanks(supervisor.link(0))\n"
        "ranks.spawn(1)\n"
        "print(ranks.pid(1), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with tempfile.TemporaryDirectory(prefix="w") as folder:
        config = msgspec.msgpack.encode(config_in(folder))
        made = subprocess.run(
            [sys.executable, "-c", code], input=config, capture_output=True, timeout=PATIENCE
        )
        assert made.returncode == -signal.SIGKILL, made.stderr
        until(lambda: not is_alive(int(made.stdout)))
