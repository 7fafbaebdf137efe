"""If two processes share memory: a fact found by a connection."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slowness import deadline
from weft.engine.disagg.reach import reaches

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "s"))
        sock.listen(1)
        yield sock


def test_a_live_listener_is_reached(listener: socket.socket) -> None:
    path = listener.getsockname()
    assert reaches(path)
    assert reaches(path), "the first probe waits in the queue"
    assert reaches(path), "the queue is full"


def test_the_socket_of_a_dead_process_is_not(listener: socket.socket) -> None:
    path = listener.getsockname()
    listener.close()
    assert Path(path).exists()
    assert not reaches(path)


@pytest.mark.parametrize("path", ["", "relative", "/nowhere", "/" + "x" * 200, "/a\0b", "/etc/passwd"])
def test_other_paths_are_not(path: str) -> None:
    assert not reaches(path)


def test_a_listener_of_another_user_is_not(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        pytest.skip("everything of root counts as one's own")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert not reaches(listener.getsockname())


def test_a_container_with_an_equal_path_is_not(listener: socket.socket) -> None:
    """A process sees another folder at the same path, as a container or another host does."""
    path = listener.getsockname()
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    probe = f"from weft.engine.disagg.reach import reaches; print(reaches({path!r}))"
    command = f'mount -t tmpfs none "{Path(path).parent}" && exec "{sys.executable}" -c "$0"'

    def answer(*words: str) -> str:
        made = subprocess.run(
            [*words], capture_output=True, text=True, cwd=ROOT, timeout=deadline(60), check=False
        )
        if made.returncode:
            pytest.skip(f"this machine makes no mount namespaces: {made.stderr}")
        return made.stdout.strip()

    assert answer(sys.executable, "-c", probe) == "True"
    assert answer("unshare", "-m", "sh", "-c", command, probe) == "False"
