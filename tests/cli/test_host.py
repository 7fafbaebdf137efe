"""The loop of a host other than the first: engines that come up, and engines that never do."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.faults.rig import config_of
from tests.support.secret import write_secret
from tests.support.slowness import deadline
from weft.cli.processes import host as module
from weft.parallel.board import Board, BoardClient
from weft.parallel.secret import derive
from weft.types import board as b

KEYS = derive(b"0123456789abcdef")
PATIENCE = deadline(20.0)
LISTEN_S = deadline(0.5)


class Sleepers:
    """Start processes that sleep forever, in place of engines."""

    def __init__(self, *_: object) -> None:
        self.incarnations: list[int] = []
        self.made: list[subprocess.Popen[bytes]] = []

    def start(self, replica: int, endpoint: str, incarnation: int) -> subprocess.Popen[bytes]:
        self.incarnations.append(incarnation)
        self.made.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return self.made[-1]


class Rig:
    """A host and its rendezvous store. ``turn`` runs one turn of the host's loop."""

    def __init__(self, folder: Path) -> None:
        secret = write_secret(folder)
        hosts = {"nnodes": 2, "rdzv": "127.0.0.1:5799", "group_secret": str(secret), "node_rank": 1}
        config = config_of(data_parallel_size=2, kv_cache_memory="8MiB", **hosts)
        self.board = Board("tcp://127.0.0.1:*", KEYS)
        self.client = BoardClient(self.board.address, KEYS)
        self.host = module._Host(config, self.client, folder, "tcp://127.0.0.1:*", "error")
        self.engines: Any = self.host._local
        self.board.post(b.answer_key(1, self.host._mark), b"")

    def want(self, incarnation: int) -> None:
        self.board.post(b.wanted_key(1), msgspec.msgpack.encode(incarnation))

    def listens(self, incarnation: int) -> None:
        said = b.Listening(incarnation=incarnation, address="tcp://127.0.0.1:1")
        self.board.post(b.engine_key(1), msgspec.msgpack.encode(said))

    def ended(self) -> b.EngineEnded | None:
        data = self.board.get(b.ended_key(1))
        return None if data is None else msgspec.msgpack.decode(data, type=b.EngineEnded)

    def turn(self) -> None:
        if self.client.look(1.0):
            self.host._follow()

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, "did not happen in time"
            self.turn()
            time.sleep(0.02)

    def close(self) -> None:
        for engine in self.engines.made:
            engine.kill()
            engine.wait()
        self.client.close()
        self.board.close()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(module, "LocalEngines", Sleepers)
    monkeypatch.setattr(module, "LISTEN_S", LISTEN_S)
    made = Rig(tmp_path)
    yield made
    made.close()


def test_an_engine_that_never_listens_is_ended_and_told_of(rig: Rig) -> None:
    """Messages of an earlier incarnation do not count for the current one."""
    rig.listens(6)
    rig.want(7)
    rig.until(lambda: rig.engines.made)
    rig.until(rig.ended)
    assert rig.ended() == b.EngineEnded(incarnation=7, status=-9)
    assert rig.engines.made[0].poll() == -9
    rig.turn()
    assert rig.engines.incarnations == [7], "it is for the front to want another incarnation"
    rig.want(8)
    rig.until(lambda: rig.engines.incarnations == [7, 8])
    assert rig.engines.made[1].poll() is None


def test_an_engine_that_listens_in_time_is_left_alone(rig: Rig) -> None:
    rig.want(7)
    rig.until(lambda: rig.engines.made)
    rig.listens(7)
    rig.turn()
    rig.board.drop(b.engine_key(1))
    late = time.monotonic() + 3 * LISTEN_S
    rig.until(lambda: time.monotonic() > late)
    assert rig.engines.made[0].poll() is None
    assert rig.ended() is None
