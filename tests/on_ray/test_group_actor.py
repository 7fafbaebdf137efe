"""Orders and ends of a group actor: with a small command in place of ``weft engine``, and without Ray."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.control.directory.test_leases import record
from tests.support.slowness import deadline, until

pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")

from weft.on_ray import actors

SLOW_DRAIN = """
import pathlib, signal, sys, time
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
pathlib.Path("ready").touch()
while not signals:
    time.sleep(0.01)
time.sleep(0.3)
pathlib.Path("..", "signals").open("a").write(f"{len(signals)} ")
"""
CRASH_IN_DRAIN = SLOW_DRAIN + "sys.exit(3)"
IMPORTS = """
import pathlib, time
pathlib.Path("ready").touch()
time.sleep(60)
"""


class Group(actors.GroupActor):
    """A group actor whose fleet is in this process."""

    def __init__(self, folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code, self.calls, self.wanted = code, list[str](), True
        self.starts, self.failures = 0, 0
        self.status: int | None = None
        """0 for the end for good, else the status of the process."""
        self.ended = threading.Event()
        monkeypatch.setattr(actors, "LOOK_S", 0.02)
        monkeypatch.setattr(actors, "private_folder", lambda: self._made(folder / "private"))
        monkeypatch.setattr(actors.os, "_exit", self._exited)
        super().__init__("shop", "decode0", 1)

    def _made(self, folder: Path) -> Path:
        folder.mkdir(mode=0o700)
        return folder

    def _command(self, folder: Path) -> list[str]:
        self.starts += 1
        (folder / "ready").unlink(missing_ok=True)
        return [sys.executable, "-c", self.code]

    def _call(self, method: str, *arguments: Any) -> Any:
        self.calls.append(method)
        if self.failures > 0:
            self.failures -= 1
            raise TimeoutError
        if method == "admit":
            return ("text", "secret") if self.wanted else None
        return self.wanted

    def _end(self) -> None:
        self._clean()
        self.status = 0  # the thread then ends in ``_exited``: a later end would be that of pytest

    def _exited(self, status: int) -> None:
        if self.status is None:
            self.status = status
        self.ended.set()

    def wait(self) -> int | None:
        """Wait for the end. Return the status."""
        assert self.ended.wait(deadline(20))
        return self.status


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Group]]:
    made: list[Group] = []

    def begin(code: str) -> Group:
        made.append(Group(tmp_path, code, monkeypatch))
        return made[-1]

    yield begin
    for group in made:
        if group._process is not None and group._process.poll() is None:
            os.kill(group._process.pid, 9)
        group.wait()


def ready(folder: Path) -> None:
    end = time.monotonic() + deadline(20)
    while not (folder / "private" / "ready").exists():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("code", [SLOW_DRAIN, CRASH_IN_DRAIN, IMPORTS], ids=["drain", "crash", "imports"])
def test_an_unwanted_group_ends_for_good(start: Any, tmp_path: Path, code: str) -> None:
    """Also if the command fails while it drains, or has no handler of the signal yet."""
    group = start(code)
    ready(tmp_path)
    group.wanted = False
    assert group.wait() == 0
    assert group.starts == 1
    assert not (tmp_path / "private").exists()


def test_orders_send_one_signal(start: Any, tmp_path: Path) -> None:
    """Two orders to restart within one drain are one restart, and the removal then is no second signal."""
    group = start(SLOW_DRAIN)
    ready(tmp_path)
    group.restart()
    group.restart()
    time.sleep(0.1)
    group.wanted = False
    assert group.wait() == 0
    assert group.starts == 1
    assert (tmp_path / "signals").read_text() == "1 "


def test_a_restart_starts_the_group_again(start: Any, tmp_path: Path) -> None:
    group = start(SLOW_DRAIN)
    ready(tmp_path)
    group.restart()
    end = time.monotonic() + deadline(20)
    while group.starts < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    ready(tmp_path)
    assert not group.ended.is_set()
    group.wanted = False
    assert group.wait() == 0


def test_a_failure_of_the_command_ends_the_process(start: Any, tmp_path: Path) -> None:
    assert start("raise SystemExit(2)").wait() == 1
    assert not (tmp_path / "private").exists()


def test_a_command_that_was_healthy_starts_again_in_the_same_process(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restart counts: the fleet gets another number."""
    read = "weft.control.directory.folder.FolderDirectory.read"
    monkeypatch.setattr(read, lambda _: {"decode0": record(ready=True)})
    group = start(IMPORTS)
    ready(tmp_path)
    until(lambda: group._ready)
    first, process = group._number, group._process
    assert process is not None
    process.kill()
    end = time.monotonic() + deadline(20)
    while group.starts < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert group._number != first
    assert not group.ended.is_set()
    group.wanted = False
    assert group.wait() == 0


def test_an_error_of_the_thread_ends_the_process(start: Any, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()  # so the actor cannot make its folder
    assert start(SLOW_DRAIN).wait() == 1


def test_a_fleet_that_restarts_is_asked_again(start: Any, tmp_path: Path) -> None:
    group = start(SLOW_DRAIN)
    ready(tmp_path)
    group.failures = 5
    time.sleep(0.3)
    assert not group.ended.is_set()
    group.wanted = False
    assert group.wait() == 0


def test_a_folder_that_is_cleaned_away_ends_nothing(start: Any, tmp_path: Path) -> None:
    group = start(SLOW_DRAIN)
    ready(tmp_path)
    mark = tmp_path / "private" / "directory" / "weft-directory"
    mark.unlink()
    end = time.monotonic() + deadline(20)
    while not mark.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    group.wanted = False
    assert group.wait() == 0
    assert group.starts == 1


def test_a_group_that_is_not_admitted_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "_call", lambda *_: None)
    group = Group(tmp_path, SLOW_DRAIN, monkeypatch)
    assert group.wait() == 0
    assert group.starts == 0
