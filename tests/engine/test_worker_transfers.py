"""Transfers in a worker: the worker executes frames of the engine and forwards reports of its transfers."""

from __future__ import annotations

import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch

from tests.runner.transfers_rig import KEY, Side, config_of
from tests.support.slowness import deadline
from weft.common.errors import EngineDead
from weft.disagg.protocol.transfer_events import RankStopped
from weft.disagg.transport import transfer_thread as transfers
from weft.disagg.transport.reports import TransferReports
from weft.disagg.transport.transfer_thread import RankTransfer
from weft.engine.disagg import rank_transfers
from weft.engine.ranks import worker as module
from weft.engine.ranks.worker import Worker
from weft.parallel.control import ZmqEngineChannel, ZmqRank
from weft.parallel.mesh import Mesh
from weft.types import frames as f
from weft.types import plan as p
from weft.types.transfer import Outcome, TransferKey

PROMPT = list(range(40, 61))
END = len(PROMPT)
SECONDS = deadline(20.0)


class Engine:
    """The engine's end of a worker, and the worker, in a separate thread."""

    def __init__(self, folder: Path, side: Side) -> None:
        self.channel = ZmqEngineChannel(f"ipc://{folder}/{secrets.token_hex(3)}")
        self.worker = Worker(1, side.runner, Mesh(), ZmqRank(self.channel.address, 1), incarnation="first")
        self.peer = b""
        self.thread = threading.Thread(target=self.worker.run, daemon=True)
        self.thread.start()

    def take(self) -> f.ToEngine:
        got = self.channel.receive(SECONDS)
        assert got is not None, "the worker says nothing"
        self.peer = got[0]
        return f.decode_to_engine(got[1])

    def send(self, frame: f.ToRank) -> None:
        self.channel.send(self.peer, f.encode(frame))

    def end(self) -> None:
        self.send(f.RankShutdown())
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Engine, Side]]]:
    """Yield a factory of workers with an engine. A worker sleeps for an hour unless a frame or report
    wakes it."""
    torch.set_num_threads(1)
    monkeypatch.setattr(module, "_IDLE", 3600.0)
    made: list[tuple[Engine, Side]] = []

    def one(role: Any) -> tuple[Engine, Side]:
        side = Side(config_of(tmp_path, "llama", 8, role), len(made))
        made.append((Engine(tmp_path, side), side))
        return made[-1]

    yield one
    for engine, _ in made:
        if engine.thread.is_alive():
            engine.end()
        engine.worker.close()
        engine.channel.close()


def test_a_worker_is_idle_when_a_wait_ends_without_a_frame(
    start: Callable[..., tuple[Engine, Side]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU threads change only then: between two frames a request may run."""
    engine, _ = start("prefill")
    engine.take()
    idle: list[bool] = []
    engine.worker._between_frames = idle.append
    monkeypatch.setattr(module, "_IDLE", 0.01)
    engine.send(f.Form(epoch=0, store=""))
    engine.take()
    end = time.monotonic() + SECONDS
    while len(idle) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert idle[:2] == [False, True]


def test_transfers_are_begun_expected_reported_and_stopped(start: Callable[..., tuple[Engine, Side]]) -> None:
    sending, sender = start("prefill")
    receiving, receiver = start("decode")
    for engine, side in ((sending, sender), (receiving, receiver)):
        assert engine.take() == f.Ready(rank=1, endpoint=side.runner.endpoint)
    tables = receiver.tables_for(END)
    bound, offer = receiver.bound(tables), sender.offer(END)
    receiving.send(f.ExpectTransfer(offer=offer, bound=bound))
    sending.send(f.Form(epoch=0, store=""))
    assert sending.take() == f.Formed(rank=1, epoch=0)
    ops = sender.enter(0, PROMPT, END, 0, sender.tables_for(END))
    plan = p.StepPlan(step=0, ops=(*ops, sender.export(0, 0, END)), prefill=row())
    digest = sending.worker._digest.__class__(sender.runner.kv.num_slots, len(sender.runner.kv.pools))
    sending.send(f.StepFrame(step=0, epoch=0, plan=plan, digest=digest.take(plan)))
    sending.send(
        f.PushTransfer(offer=offer, bound=bound, blocks=sender.blocks(sender.tables[0]), num_cached=0)
    )
    for engine, count in ((sending, 3), (receiving, 2)):
        told = [engine.take() for _ in range(count)]
        transfers = [word for word in told if isinstance(word, f.TransferReport)]
        assert [word.outcome for word in transfers] == [Outcome.pending, Outcome.done]
        assert all(isinstance(word, f.StepOutcome) for word in told if word not in transfers), told
    for engine in (sending, receiving):
        engine.send(f.StopTransfer(key=KEY))
        assert engine.take() == f.TransferStopped(rank=1, key=KEY)


def row() -> p.Segment:
    one = p.column([1])
    return p.Segment(
        slot=p.column([0]),
        gen=one,
        start=p.column([0]),
        count=p.column([END]),
        logits=one,
        sample=one,
        next_k=p.column([0]),
    )


def test_a_transfer_failed_on_a_rank_is_reported(start: Callable[..., tuple[Engine, Side]]) -> None:
    engine, side = start("decode")
    engine.take()
    bound = side.bound([[4, 4, 5]])
    engine.send(f.ExpectTransfer(offer=side.offer(END), bound=bound))
    told = engine.take()
    assert isinstance(told, f.TransferReport)
    assert told.outcome is Outcome.failed
    assert told.error is not None
    assert "named twice" in told.error.message


def test_a_socket_lies_in_the_folder_of_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of the folder removes the socket of a killed rank."""
    config = config_of(tmp_path, "llama", 8, "decode")
    with tempfile.TemporaryDirectory(prefix="w") as folder:
        monkeypatch.setattr(rank_transfers, "private_folder", lambda: pytest.fail("another folder was made"))
        side = Side(msgspec.structs.replace(config, socket_folder=folder), 0)
        assert side.runner.endpoint is not None
        path = Path(side.runner.endpoint.address)
        assert path.is_socket()
        assert path.parent == Path(folder)
        side.runner.close()
        assert Path(folder).is_dir()
    monkeypatch.undo()
    alone = Side(config, 1)
    assert alone.runner.endpoint is not None
    folder = Path(alone.runner.endpoint.address).parent
    alone.runner.close()
    assert not folder.exists()


def test_a_rank_without_transfers_refuses_transfers(start: Callable[..., tuple[Engine, Side]]) -> None:
    engine, _ = start("unified")
    assert engine.take() == f.Ready(rank=1)
    engine.send(f.Form(epoch=0, store=""))
    engine.take()
    engine.send(f.StopTransfer(key=KEY))
    told = engine.take()
    assert isinstance(told, f.RankFailed)
    assert "without KV transfers" in told.error.message


def test_another_engine_stops_all_transfers_without_reports(
    start: Callable[..., tuple[Engine, Side]], tmp_path: Path
) -> None:
    engine, side = start("decode")
    engine.take()
    engine.send(f.ExpectTransfer(offer=side.offer(END), bound=side.bound(side.tables_for(END))))
    arrivals = side.runner.transfer.arrivals  # type: ignore[union-attr]
    until = time.monotonic() + SECONDS
    while not len(arrivals):
        assert time.monotonic() < until
        time.sleep(0.001)
    engine.end()
    other = ZmqEngineChannel(f"ipc://{tmp_path}/other")
    engine.worker.stopped = False
    engine.worker.join(ZmqRank(other.address, 1), "second")
    engine.thread = threading.Thread(target=engine.worker.run, daemon=True)
    engine.thread.start()
    engine.channel.close()
    engine.channel = other
    assert isinstance(engine.take(), f.Loaded)
    assert engine.take() == f.Ready(rank=1, endpoint=side.runner.endpoint)
    while len(arrivals):
        assert time.monotonic() < until
        time.sleep(0.001)
    late = TransferKey(8, 0, 1)
    engine.send(f.StopTransfer(key=late))
    assert engine.take() == f.TransferStopped(rank=1, key=late), "and nothing of the room before"


def test_the_next_engine_learns_which_caches_are_free(
    start: Callable[..., tuple[Engine, Side]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy in progress ends first. If the copy does not end in time, the rank ends."""
    engine, side = start("decode")
    engine.take()
    transfer = cast(RankTransfer, side.runner.transfer)
    copying, go_on = threading.Event(), threading.Event()

    def copy(seconds: float) -> list[Any]:
        if not go_on.is_set():
            copying.set()
            assert go_on.wait(SECONDS)
            copying.clear()
        return []

    monkeypatch.setattr(transfer._transport, "poll", copy)
    transfer._transport.wake()
    assert copying.wait(SECONDS)
    engine.end()
    other = ZmqEngineChannel(f"ipc://{tmp_path}/other")
    engine.channel.close()
    engine.channel = other
    engine.worker.stopped = False
    joining = threading.Thread(target=engine.worker.join, args=(ZmqRank(other.address, 1), "second"))
    joining.start()
    assert other.receive(0.5) is None
    assert joining.is_alive()
    go_on.set()
    assert isinstance(engine.take(), f.Loaded)
    joining.join(SECONDS)
    go_on.clear()
    assert copying.wait(SECONDS)
    monkeypatch.setattr(transfers, "_END_S", 0.1)
    with pytest.raises(EngineDead, match="does not stop"):
        engine.worker.join(ZmqRank(other.address, 1), "third")
    monkeypatch.undo()
    go_on.set()


def test_reports_wake_whoever_polls_and_come_in_order() -> None:
    import select

    reports = TransferReports()

    def empty() -> bool:
        return not select.select([reports.descriptor], [], [], 0)[0]

    said = [RankStopped(TransferKey(number, 0, 1), 0) for number in range(3)]
    assert empty()
    assert reports.take() == []
    for one in said:
        reports.tell(one)
    assert not empty()
    assert reports.take() == said
    assert empty()
    reports.tell(said[0])
    reports.close()
    reports.tell(said[1])
    assert reports.take() == []
