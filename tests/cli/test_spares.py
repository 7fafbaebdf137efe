"""Spare processes replace dead processes with the right settings, and none is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.support.slowness import deadline, until
from weft.bench.process import ServerProcess, role_of
from weft.bench.process_memory import tree
from weft.cli.processes.spares import open_spares
from weft.common.errors import ConfigError
from weft.config.sections.front_section import FrontSection
from weft.engine.ranks import processes
from weft.engine.ranks.processes import ProcessCommand, Spares

PATIENCE = deadline(60.0)
TELLS = """
import os, sys
from weft.cli.processes import spare_main

def work(arguments):
    *words, descriptor = arguments
    told = os.read(int(descriptor), 100)
    print(words, told, os.environ.get("MORE"), os.environ.get("LESS"), sys.stdin.buffer.read(), flush=True)
    return 7

spare_main.PROGRAMS["engine_main"] = work
spare_main.IMPORTED = ()
sys.exit(spare_main.run(sys.argv[1:]))
"""


def title(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return ""
    return line.split("\0")[0].removeprefix("weft: ")


def told_spare(code: str) -> processes._Spare:
    """A spare process of ``code``, with a variable ``LESS``."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(os.getpid())],
            stdin=theirs.fileno(),
            stdout=subprocess.PIPE,
            env={**os.environ, "LESS": "1"},
        )
    return processes._Spare(process, ours)


@pytest.mark.parametrize("size", [0, 10, 3_000_000])
def test_a_spare_process_has_all_that_a_new_one_inherits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LESS", raising=False)
    spare = told_spare(TELLS)
    read, write = os.pipe()
    os.write(write, b"by the pipe")
    os.close(write)
    with os.fdopen(read):
        command = ProcessCommand("engine_main", ("a", "b"), bytes(size), {"MORE": "2"}, (read,))
        assert spare.become(command)
    assert spare.process.stdout is not None
    with spare.process.stdout as out:
        printed = out.read().decode()
    assert spare.process.wait(PATIENCE) == 7
    assert printed == f"['a', 'b'] b'by the pipe' 2 None {bytes(size)!r}\n"


def test_a_spare_process_that_is_not_needed_ends_by_itself() -> None:
    spare = told_spare(TELLS)
    spare.link.close()
    assert spare.process.wait(PATIENCE) == 0
    assert spare.process.stdout is not None
    spare.process.stdout.close()


def refused() -> ProcessCommand:
    """Return an engine command with unreadable settings; the engine ends with a specific status."""
    return ProcessCommand("engine_main", ("ipc://nowhere", "error"), msgspec.msgpack.encode(1))


def test_one_that_died_is_not_put_to_use_and_all_end_with_their_owner() -> None:
    spares = Spares(1, (0.0, 0.0))
    assert not spares.pids, "nothing runs yet that could die"
    first = spares.start(refused())
    until(lambda: spares.pids)
    (waiting,) = spares.pids
    assert first.pid != waiting
    os.kill(waiting, signal.SIGKILL)
    os.waitid(os.P_PID, waiting, os.WEXITED | os.WNOWAIT)
    other = spares.start(refused())
    assert other.pid != waiting
    until(lambda: spares.pids and waiting not in spares.pids)
    (another,) = spares.pids
    until(lambda: title(another) == "spare")
    used = spares.start(refused())
    assert used.pid == another
    assert all(process.wait(PATIENCE) == 1 for process in (first, other, used))
    until(lambda: spares.pids)
    (last,) = spares.pids
    spares.close()
    assert title(last) == "", "it was killed and waited for"


def test_a_server_without_spare_processes_has_no_thread_for_them() -> None:
    spares = Spares(0)
    process = spares.start(refused())
    assert process.wait(PATIENCE) == 1
    assert not spares._thread.is_alive()
    spares.close()


def test_the_first_engine_is_a_process_that_was_started_before() -> None:
    """Also without spare processes."""
    spares = Spares(0, at_once=True)
    (early,) = spares.pids
    first = spares.start(refused())
    assert first.pid == early
    assert spares.start(refused()).wait(PATIENCE) == first.wait(PATIENCE) == 1
    assert not spares.pids
    spares.close()


def test_an_error_of_the_configuration_ends_the_first_process() -> None:
    early: list[int] = []

    def start() -> None:
        with open_spares(FrontSection(), torchless=False) as spares:
            early.extend(spares.pids)
            raise ConfigError("wrong")

    with pytest.raises(ConfigError):
        start()
    assert [title(pid) for pid in early] == [""], "killed and waited for"
    with open_spares(FrontSection(), torchless=True) as spares:
        assert not spares.pids


@pytest.mark.slow
@pytest.mark.requirement("E16")
@pytest.mark.parametrize("kind", ["head", "rank 1"])
def test_dead_processes_of_a_server_are_replaced_by_the_spare(kind: str, tmp_path: Path) -> None:
    words = ["serve", "spool-text", "--tensor-parallel-size", "2", "--device", "cpu", "--threads", "1"]
    command = [sys.executable, "-c", "from weft.cli.main import main; main()", *words, "--port", "{port}"]
    with ServerProcess(command, log_file=tmp_path / "log") as server:
        server.wait_ready(PATIENCE)
        assert server.pid is not None

        def found() -> dict[str, int]:
            titles = {process.pid: title(process.pid) for process in tree(server.pid or 0)}
            roles = {pid: role_of([f"weft: {one}"]) or one for pid, one in titles.items()}
            return {role: pid for pid, role in roles.items() if role in ("head", "rank 1", "spare")}

        until(lambda: {"head", "rank 1", "spare"} <= found().keys())
        before = found()
        os.kill(before[kind], signal.SIGKILL)
        until(lambda: found().get(kind) == before["spare"])
        server.wait_ready(2 * PATIENCE)
        after = found()
        assert {role for role in before if before[role] == after.get(role)} == {"head", "rank 1"} - {kind}
        left = [process.pid for process in tree(server.pid)]
    until(lambda: not any(title(pid) for pid in left))
