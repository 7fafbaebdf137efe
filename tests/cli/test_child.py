"""Start and end of child processes, with real processes."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tests.support.slowness import deadline
from weft.common import signals
from weft.common.folder import private_folder
from weft.config.sections.all import FrontSection
from weft.engine.server import engine_processes


def alive(pid: int) -> bool:
    """Return True if the process runs. A zombie does not run."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def until(condition: object, seconds: float = 20.0) -> bool:
    end = time.monotonic() + deadline(seconds)
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def test_a_child_dies_with_its_parent() -> None:
    grandchild = (
        "import os, sys, time\nfrom weft.cli.processes import child\n"
        "child.die_with_parent(int(sys.argv[1])); child.ignore_signals()\n"
        "print(os.getpid(), flush=True); time.sleep(300)"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {grandchild!r}, str(os.getpid())]); time.sleep(300)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert alive(pid)
    for number in signals.STOPS:
        os.kill(pid, number)
    time.sleep(0.2)
    assert alive(pid), "a head leaves signals to its parent"
    process.kill()
    process.wait()
    assert until(lambda: not alive(pid))
    process.stdout.close()


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    code = "from weft.cli.processes import child; child.die_with_parent(1 << 30); print('lives')"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=deadline(60))
    assert (made.returncode, made.stdout) == (1, "")


@pytest.mark.requirement("F47")
@pytest.mark.parametrize(("switch", "limit"), [(None, 0), ("1", 4096), ("0", 0)])
def test_core_dumps_are_off_unless_asked_for(switch: str | None, limit: int) -> None:
    code = (
        "import resource\nfrom weft.cli.processes import child\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (4096, resource.getrlimit(resource.RLIMIT_CORE)[1]))\n"
        "child.forbid_core_dumps()\nprint(resource.getrlimit(resource.RLIMIT_CORE)[0])"
    )
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    if 0 <= hard < 4096:
        pytest.skip("needs a hard limit on core dumps of 4096 bytes or more")
    environment = {key: value for key, value in os.environ.items() if key != "WEFT_CORE_DUMPS"}
    if switch is not None:
        environment["WEFT_CORE_DUMPS"] = switch
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert made.stdout == f"{limit}\n", made.stderr


def test_the_endpoints_folder_is_private_and_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = private_folder()
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [file.name for file in folder.iterdir()] == ["owner.lock"]
    finally:
        shutil.rmtree(folder)
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = private_folder()
    try:
        assert len(str(folder)) <= 90
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert not any(deep.iterdir())
    finally:
        shutil.rmtree(folder)


def test_an_engine_that_does_not_end_is_killed() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    engine = subprocess.Popen([sys.executable, "-c", code])
    assert engine_processes.close_engine(engine, 0.2) == -signal.SIGKILL
    engine = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    assert engine_processes.close_engine(engine, 30) == 7


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_child_of_a_dead_parent_prints_nothing(cut: int) -> None:
    """A parent that stops while writing the settings leaves no traceback, which would look like a defect."""
    settings = msgspec.msgpack.encode(FrontSection())
    code = "from weft.config.sections.all import FrontSection\nfrom weft.cli.processes import child\n"
    code += "print(child.read_setup(FrontSection).port)"
    command = [sys.executable, "-c", code]
    made = subprocess.run(command, input=settings[:cut], capture_output=True, timeout=60, check=False)
    assert (made.returncode, made.stdout, made.stderr) == (1, b"", b"")
    noise = subprocess.run(command, input=settings + b"more", capture_output=True, timeout=60, check=False)
    assert b"DecodeError" in noise.stderr
    whole = subprocess.run(command, input=settings, capture_output=True, timeout=60, check=False)
    assert (whole.returncode, whole.stdout) == (0, b"8000\n")


@pytest.mark.parametrize(
    ("ends", "status", "error"),
    [
        ("return 3", 3, ""),
        ("sys.exit(4)", 4, ""),
        ("sys.exit('wrong')", 1, "wrong"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
        ("sys.stderr = None; return 3", 3, ""),  # as in a process that was started with a closed descriptor
    ],
)
def test_a_process_ends_without_the_teardown_of_the_interpreter(ends: str, status: int, error: str) -> None:
    """The functions of ``atexit`` are called and the output is complete. No object is freed, and no thread is
    awaited."""
    program = (
        "import atexit, sys, threading, time\nfrom weft.cli.processes import child\n"
        "class Freed:\n    def __del__(self): print('freed')\n"
        "kept = Freed()\natexit.register(lambda: print('at the exit'))\n"
        f"def run(arguments):\n    print(arguments)\n    {ends}\n"
        "threading.Thread(target=time.sleep, args=(300,)).start()\n"
        "child.end_after(run)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "one"], capture_output=True, text=True, timeout=deadline(60)
    )
    assert (done.returncode, done.stdout) == (status, "['one']\nat the exit\n")
    assert done.stderr.strip().endswith(error) if error else not done.stderr
