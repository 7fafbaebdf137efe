"""NIXL itself: reads from a process that works, stands still, or is killed during a read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.disagg.transport.reading_target import BYTES
from tests.disagg.transport.rig import WITHOUT_NIXL
from tests.support.slowness import deadline
from weft.common.env import child_environment
from weft.disagg.protocol.arrivals import Copied, Incoming
from weft.disagg.transport.base import PENDING
from weft.disagg.transport.peer_links import ByteSource
from weft.disagg.transport.read_engine import NixlEngine
from weft.disagg.transport.read_writes import SLOTS, ReadPeer, ReadWrites
from weft.types.transfer import TransferKey

pytestmark = pytest.mark.skipif(WITHOUT_NIXL, reason="needs NIXL: pip install weft[nixl]")
ROOT = Path(__file__).parents[3]


class Target:
    """Another process with memory, and the reads of this process."""

    def __init__(self) -> None:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.disagg.transport.reading_target", "target"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=child_environment(PYTHONPATH=os.pathsep.join(filter(None, paths))),
        )
        self.engine = NixlEngine("reader")
        self.taken: list[Any] = []
        self.broke: list[str] = []
        self.reads = ReadWrites(self.engine, self._take, self.broke.append)
        assert self.process.stdout is not None
        metadata, address = self.process.stdout.readline().split()
        self.address = int(address)
        assert self.engine.add(bytes.fromhex(metadata.decode())) == "target"

    def begin(self, number: int) -> Any:
        rows = np.array([(self.address + at, at, 65536) for at in range(0, BYTES, 65536)], np.int64)
        content = ByteSource((), ((0, rows),), np.zeros(len(rows), np.uint64), 0)
        write = Incoming(TransferKey(number, 0, 1), "link", number, (), 0, content)
        return self.reads.begin(write, ReadPeer("target", "DRAM", 0))

    def progress(self, enough: Callable[[list[Copied]], object], seconds: float = 20.0) -> list[Copied]:
        """Poll until ``enough``. Return the writes that have ended."""
        ended, end = list[Copied](), time.monotonic() + deadline(seconds)
        while not enough(ended):
            assert time.monotonic() < end
            ended += self.reads.progress()
            time.sleep(0.001)
        return ended

    def whole(self, number: int) -> None:
        """Read all of the memory once."""
        if self.begin(number) is PENDING:
            (ended,) = self.progress(len)
            assert ended.error is None
        assert self.taken.pop() == [7]

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def _take(self, write: Incoming) -> None:
        self.taken.append(sorted({int(memory[:BYTES].unique()) for memory in write.content.memory}))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=deadline(10))
        if self.reads.close(5.0):
            self.engine.close()


@pytest.fixture(params=["cma", "tcp"])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    monkeypatch.setenv("UCX_TLS", "tcp" if request.param == "tcp" else "cma,posix,sysv,tcp")
    one = Target()
    yield one
    one.close()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """Over TCP the target takes part in a read, so a stopped target holds the read."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    one = Target()
    yield one
    one.signal(signal.SIGCONT)
    one.close()


def test_a_read_brings_the_bytes(target: Target) -> None:
    for number in range(3):
        target.whole(number)
    assert target.reads.free == SLOTS
    target.engine.remove("target")
    target.engine.remove("target")


@pytest.mark.requirement("E8")
def test_a_killed_target_is_a_lost_peer(target: Target) -> None:
    target.whole(0)
    target.signal(signal.SIGKILL)
    target.process.wait(deadline(10))
    error = target.begin(1)
    if error is PENDING:
        (ended,) = target.progress(len)
        error = ended.error
    assert error is not None
    assert target.broke
    target.progress(lambda ended: target.reads.free == SLOTS)


@pytest.fixture
def stopped(over_tcp: Target) -> Target:
    """Return a target that is stopped during a read of transfer 1."""
    over_tcp.whole(0)
    over_tcp.signal(signal.SIGSTOP)
    time.sleep(0.1)
    assert over_tcp.begin(1) is PENDING
    over_tcp.progress(lambda ended: over_tcp.reads.free < SLOTS)
    return over_tcp


@pytest.mark.requirement("E8")
def test_a_stopped_target_holds_its_read_and_the_landing_memory(stopped: Target) -> None:
    target = stopped
    target.reads.cancel(TransferKey(1, 0, 1))
    (ended,) = target.progress(len)
    assert ended.error is not None
    before = time.monotonic()
    target.progress(lambda ended: time.monotonic() > before + 0.5)
    assert not target.reads.quiet(TransferKey(1, 0, 1))
    assert target.reads.free < SLOTS
    target.signal(signal.SIGCONT)
    target.progress(lambda ended: target.reads.free == SLOTS)
    assert target.reads.quiet(TransferKey(1, 0, 1))
    assert not target.taken
    target.whole(2)


@pytest.mark.requirement("E8")
def test_a_target_that_is_killed_during_a_read_ends_the_read(stopped: Target) -> None:
    target = stopped
    target.signal(signal.SIGKILL)
    (ended,) = target.progress(len)
    assert ended.error is not None
    assert target.broke == ["target"]
    target.progress(lambda ended: target.reads.free == SLOTS)
    assert not target.taken
