"""The receivers of an engine, with stand-ins for their processes: deadlines, errors, and what is left."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from weft.common.errors import InvalidRequest, Unavailable, WeftError
from weft.engine.weights import receivers
from weft.engine.weights.receiver import LINE, Progress
from weft.engine.weights.receivers import LATE_S, SETTLE_S, START_S, Receivers
from weft.store.shared_files import new_token, shared_name
from weft.types.weights import AnnouncedTensors, JoinTrainer, ReceiveWeights, TrainerGroup

GROUP = TrainerGroup(backend="gloo", address="trainer", port=1, world_size=3, seconds=10.0)
JOIN = JoinTrainer(token="token", group=GROUP, first_rank=1)
TENSORS = AnnouncedTensors(names=("a", "b"), dtypes=("float32", "int8"), shapes=((2, 3), ()))


class Process:
    """One receiver: the test writes its reports."""

    def __init__(self, link: socket.socket, pid: int) -> None:
        self.link, self.pid = link, pid
        self.returncode: int | None = None

    def say(self, **fields: Any) -> None:
        self.link.sendall(msgspec.json.encode(Progress(**fields)) + LINE)

    def die(self, status: int) -> None:
        self.returncode = status
        self.link.close()

    def wait(self, timeout: float) -> None:
        assert timeout > 0

    def kill(self) -> None:
        if self.returncode is None:
            self.die(-9)


class Rig:
    """Two receivers on a clock of the test."""

    def __init__(self) -> None:
        self.now, self.made = 0.0, list[Process]()
        self.failing = 9
        self.receivers = Receivers(2, "cpu", self._start, lambda: self.now)  # type: ignore[arg-type]

    def _start(self, setup: bytes, descriptor: int) -> Process:
        if len(self.made) == self.failing:
            raise OSError("no more processes")
        self.made.append(Process(socket.fromfd(descriptor, socket.AF_UNIX, socket.SOCK_STREAM), 70))
        return self.made[-1]

    def join(self) -> None:
        self.receivers.join(JOIN)
        for one in self.made:
            one.say(done=True)
        assert self.receivers.finished() == "token"

    def error(self, seconds: float = 0.0) -> WeftError:
        """Return the error of ``finished`` after ``seconds`` more. All receivers have ended then."""
        self.now += seconds
        with pytest.raises(WeftError) as found:
            self.receivers.finished()
        assert all(one.returncode is not None for one in self.made)
        assert self.receivers.finished() is None
        return found.value


@pytest.fixture
def told(tmp_path: Path) -> ReceiveWeights:
    return ReceiveWeights(file=str(tmp_path / shared_name(0, new_token())), tensors=TENSORS)


def test_a_file_is_received_once_all_have_the_same_bytes(told: ReceiveWeights) -> None:
    rig = Rig()
    rig.join()
    rig.receivers.receive(told)
    with pytest.raises(InvalidRequest, match="in no group"):
        rig.receivers.receive(told)
    first, second = rig.made
    assert msgspec.json.decode(first.link.recv(9999), type=ReceiveWeights) == told
    first.say(done=True, digest=5)
    assert rig.receivers.finished() is None
    second.say(tensors=1)
    second.say(done=True, digest=5)
    assert rig.receivers.finished() == told.file
    assert rig.receivers.finished() is None
    rig.receivers.receive(told)
    first.say(done=True, digest=5)
    second.say(done=True, digest=6)
    assert "received different bytes" in rig.error().message


def test_news_extend_the_deadline_and_silence_ends_all(told: ReceiveWeights) -> None:
    """A killed receiver leaves no incomplete file."""
    rig = Rig()
    rig.receivers.join(JOIN)
    rig.now += GROUP.seconds + START_S - 0.1
    assert rig.receivers.finished() is None
    assert "did not join the group within 10 s" in rig.error(0.2).message
    rig = Rig()
    rig.join()
    rig.receivers.receive(told)
    incomplete = Path(told.file).parent / f".{Path(told.file).name}.70"
    incomplete.write_bytes(b"x")
    for _ in range(3):
        rig.now += GROUP.seconds + LATE_S - 0.1
        rig.made[1].say(tensors=1)
        assert rig.receivers.finished() is None
    error = rig.error(GROUP.seconds + LATE_S)
    assert isinstance(error, Unavailable)
    assert "did not send the next tensor" in error.message
    assert not incomplete.exists()


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ({"error": InvalidRequest("other bytes").info()}, "other bytes"),
        ({"status": -6}, "more bytes than announced"),
        ({"status": -9}, "receiver 2 of the weights ended: -9"),
    ],
)
def test_the_error_that_explains_most_is_answered(
    told: ReceiveWeights, second: dict[str, Any], why: str
) -> None:
    """The first receiver only sees a lost peer, and is heard first."""
    rig = Rig()
    rig.join()
    rig.receivers.receive(told)
    rig.made[0].say(error=Unavailable("the trainer has ended").info())
    assert rig.receivers.finished() is None  # waits for the other
    rig.now += SETTLE_S / 2
    if "status" in second:
        rig.made[1].die(second["status"])
    else:
        rig.made[1].say(**second)
    assert why in rig.error().message


def test_a_receiver_that_reports_nothing_holds_up_no_error(told: ReceiveWeights) -> None:
    rig = Rig()
    rig.join()
    rig.receivers.receive(told)
    rig.made[0].say(error=Unavailable("the trainer has ended").info())
    assert rig.receivers.finished() is None
    assert "the trainer has ended" in rig.error(SETTLE_S + 0.1).message


def test_no_receiver_runs_after_a_start_that_fails() -> None:
    rig = Rig()
    rig.failing = 1
    with pytest.raises(OSError, match="no more processes"):
        rig.receivers.join(JOIN)
    assert rig.made[0].returncode is not None
    rig.now += 2 * START_S + GROUP.seconds
    assert rig.receivers.finished() is None  # one failure has one answer


@pytest.mark.parametrize(
    ("shared", "memory", "packed", "why"),
    [
        (24, 1 << 40, False, "25 bytes, and /dev/shm has 24 left"),
        (25, 25 + 2 * 24 - 1, False, "25 bytes of memory and 48 bytes for buffers"),
        (25, 25 + 2 * 2 * 25 - 1, True, "25 bytes of memory and 100 bytes for buffers"),
        (25, 25 + 2 * 24, False, ""),
        (25, None, True, ""),
    ],
)
def test_weights_larger_than_memory_are_refused(
    told: ReceiveWeights,
    monkeypatch: pytest.MonkeyPatch,
    shared: int,
    memory: int | None,
    packed: bool,
    why: str,
) -> None:
    """Before anything is received: the file, and a buffer of each receiver."""
    room = SimpleNamespace(f_bavail=shared, f_frsize=1)
    monkeypatch.setattr(receivers.os, "statvfs", lambda folder: room)
    monkeypatch.setattr(receivers, "available_memory", lambda: memory)
    told = msgspec.structs.replace(told, tensors=msgspec.structs.replace(TENSORS, packed=packed))
    rig = Rig()
    rig.join()
    if not why:
        rig.receivers.receive(told)
        return
    with pytest.raises(InvalidRequest, match=why):
        rig.receivers.receive(told)
    assert all(one.returncode is not None for one in rig.made)
