"""A sender in a separate process that works, is killed, or stops and continues."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.disagg.transport.rig import Pair, kinds
from tests.support.slowness import deadline
from weft.common.env import child_environment
from weft.types import transfer as r
from weft.types.transfer import Outcome, TransferKey

ROOT = Path(__file__).parents[3]
KEY = TransferKey(7, 0, 1)
AGAIN = KEY._replace(attempt=1)


class Sender:
    def __init__(self, kind: str, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.disagg.transport.sending_process", kind, str(folder)]
        pipe = subprocess.PIPE
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]  # NIXL may be on the path alone
        environment = child_environment(PYTHONPATH=os.pathsep.join(filter(None, paths)))
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT, env=environment)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, seconds: float = 60.0) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], deadline(seconds))
        assert ready, "the sender says nothing"
        return self.process.stdout.readline().decode().strip()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(deadline(10))
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("t")


KINDS = [
    *kinds("shm", "staged tcp", "nixl", "nixl over tcp", "staged nixl"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("tcp", "staged shm")),
]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(kind: str, folder: Path) -> Iterator[Pair]:
    one = Pair(kind, folder, kinds=("full", "state"), senders=False)
    yield one
    one.close()


@pytest.fixture
def sender(kind: str, folder: Path) -> Iterator[Sender]:
    one = Sender(kind, folder)
    yield one
    one.close()


def begin(pair: Pair, sender: Sender, key: TransferKey) -> None:
    pair.expect(key)
    sender.say(r.encode(pair.bound(key)).hex())
    assert sender.hear() == "half"


def wait_for_half(pair: Pair, key: TransferKey) -> None:
    transfer = pair.receivers[0].transfer.arrivals._transfers[key]
    until = time.monotonic() + deadline(20)
    while transfer.coverage.received_bytes < transfer.coverage.nbytes // 2:
        assert time.monotonic() < until
        time.sleep(0.01)


def regions(pair: Pair) -> list[np.ndarray]:
    return [region.copy() for region in pair.receiver.regions[0]]


def equal(pair: Pair, expected: list[np.ndarray]) -> bool:
    pairs = zip(expected, pair.receiver.regions[0], strict=True)
    return all(np.array_equal(want, have) for want, have in pairs)


def stop(pair: Pair, key: TransferKey) -> None:
    pair.receivers[0].transfer.stop(key)
    pair.receivers[0].wait_stopped(key)


def test_between_processes(pair: Pair, sender: Sender) -> None:
    expected = pair.expected()[0]
    begin(pair, sender, KEY)
    sender.say("")
    assert pair.receivers[0].wait(KEY).outcome is Outcome.done
    assert sender.hear() == "done"
    assert equal(pair, expected)


@pytest.mark.requirement("E8")
def test_a_sender_that_is_killed_leaves_no_writer(
    pair: Pair, sender: Sender, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    begin(pair, sender, KEY)
    wait_for_half(pair, KEY)
    sender.signal(signal.SIGKILL)
    sender.process.wait(deadline(10))
    stop(pair, KEY)
    for region in pair.receiver.regions[0]:
        region[:] = 170  # reused by another transfer
    before = regions(pair)
    time.sleep(0.2)
    assert equal(pair, before)
    expected = pair.expected()[0]
    other = Sender(kind, tmp_path_factory.mktemp("t"))
    begin(pair, other, AGAIN)
    other.say("")
    assert pair.receivers[0].wait(AGAIN).outcome is Outcome.done
    assert equal(pair, expected)
    other.close()


@pytest.mark.requirement("E8", "E15")
def test_a_sender_that_stood_still_writes_nothing_when_it_goes_on(pair: Pair, sender: Sender) -> None:
    begin(pair, sender, KEY)
    wait_for_half(pair, KEY)
    sender.signal(signal.SIGSTOP)
    sender.say("")  # the rest of the transfer, after it continues
    stop(pair, KEY)
    for region in pair.receiver.regions[0]:
        region[:] = 170
    before = regions(pair)
    sender.signal(signal.SIGCONT)
    assert sender.hear() == "failed"
    assert equal(pair, before)
    expected = pair.expected()[0]
    begin(pair, sender, AGAIN)
    sender.say("")
    assert pair.receivers[0].wait(AGAIN).outcome is Outcome.done
    assert equal(pair, expected)
