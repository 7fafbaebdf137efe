"""A host of a group with engine processes that a test plays."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from weft.control.directory import engine_host as h
from weft.control.directory import host_server
from weft.control.directory.folder import FolderDirectory
from weft.control.directory.host_server import HostServer
from weft.control.directory.record import EngineRecord
from weft.control.links.link import Address
from weft.control.processes.table import Member

LISTEN_S = 0.3


class PlayedProcess:
    """A process that never ends."""

    pid = 0

    def poll(self) -> int | None:
        return None


class PlayedGroup:
    """One engine process, which listens from the time at which a test sets ``endpoint``."""

    def __init__(self) -> None:
        self.members = {"e": Member()}
        self.endpoint: str | None = None

    def start(self, name: str, incarnation: int) -> Address:
        return Address(lambda: self.endpoint, PlayedProcess())

    def is_suspended(self, name: str) -> bool:
        return False

    def close(self, seconds: float) -> list[int]:
        return []


class PlayedGate:
    """Other hosts that are present. Records the reports of a drain."""

    def __init__(self) -> None:
        self.reports: list[bool] = []
        self.busy = True

    def look(self) -> h.Admitted:
        return h.Admitted()

    def drain(self, idle: bool) -> bool:
        self.reports.append(idle)
        return self.busy

    def close(self) -> None:
        return None


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> PlayedGroup:
    monkeypatch.setattr(host_server, "LISTEN_S", LISTEN_S)
    return PlayedGroup()


def server_of(group: PlayedGroup, folder: Path, gate: PlayedGate | None = None) -> HostServer:
    facts = EngineRecord(name="", incarnation=0, endpoint="", model="m", fingerprint="", group="g", base="g")
    return HostServer(group, FolderDirectory(folder), facts, 30.0, 30.0, gate)


def turns(server: HostServer, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        server._turn()
        time.sleep(0.02)


def test_an_engine_that_never_listens_ends_the_group(group: PlayedGroup, tmp_path: Path) -> None:
    server = server_of(group, tmp_path)
    server._start()
    server._turn()
    assert server.phase is h.HostPhase.STARTING
    turns(server, LISTEN_S + 0.1)
    assert server.phase is h.HostPhase.ENDED
    assert server._status == 1
    server._end()


def test_a_host_that_was_stopped_during_the_start_waits_longer(
    group: PlayedGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_server, "STALL_S", LISTEN_S)
    server = server_of(group, tmp_path)
    server._start()
    server._turn()
    time.sleep(LISTEN_S + 0.1)
    server._turn()
    assert server.phase is h.HostPhase.STARTING
    turns(server, LISTEN_S + 0.1)
    assert server.phase is h.HostPhase.ENDED
    server._end()


def test_an_engine_that_listens_in_time_is_left_alone(group: PlayedGroup, tmp_path: Path) -> None:
    server = server_of(group, tmp_path)
    server._start()
    group.endpoint = f"ipc://{tmp_path}/engine"
    turns(server, 2 * LISTEN_S)
    assert server.phase is h.HostPhase.STARTING
    server._end()


def test_a_draining_host_reports_to_the_other_hosts_in_each_turn(group: PlayedGroup, tmp_path: Path) -> None:
    gate = PlayedGate()
    server = server_of(group, tmp_path, gate)
    group.endpoint = f"ipc://{tmp_path}/engine"
    server._turn()
    assert (server.phase, gate.reports) == (h.HostPhase.STARTING, [])
    server._on(h.Seen("e", False))
    server._on(h.Stop())
    server._on(h.Seen("e", False))
    server._turn()
    server._on(h.Seen("e", True))
    server._turn()
    assert gate.reports == [False, True]
    assert server._host._others_busy
    server._end()
