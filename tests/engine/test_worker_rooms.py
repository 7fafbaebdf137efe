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

from tests.runner.rooms_rig import KEY, Side, config_of
from tests.support.slowness import deadline
from weft.common.errors import EngineDead
from weft.disagg.protocol.events import RankStopped
from weft.disagg.transport import worker as transfers
from weft.disagg.transport.reports import RoomReports
from weft.disagg.transport.worker import RankTransfer
from weft.engine.disagg import rank_rooms
from weft.engine.ranks import worker as module
from weft.engine.ranks.worker import Worker
from weft.parallel.control import ZmqHead, ZmqRank
from weft.parallel.mesh import Mesh
from weft.types import frames as f
from weft.types import plan as p
from weft.types.rooms import Outcome, RoomKey

PROMPT = list(range(40, 61))
END = len(PROMPT)
SECONDS = deadline(20.0)


class Head:
    """The engine's end of a worker, and the worker, in a separate thread."""

    def __init__(self, folder: Path, side: Side) -> None:
        self.channel = ZmqHead(f"ipc://{folder}/{secrets.token_hex(3)}")
        self.worker = Worker(1, side.runner, Mesh(), ZmqRank(self.channel.address, 1), incarnation="first")
        self.peer = b""
        self.thread = threading.Thread(target=self.worker.run, daemon=True)
        self.thread.start()

    def take(self) -> f.ToHead:
        got = self.channel.receive(SECONDS)
        assert got is not None, "the worker says nothing"
        self.peer = got[0]
        return f.decode_to_head(got[1])

    def send(self, frame: f.ToRank) -> None:
        self.channel.send(self.peer, f.encode(frame))

    def end(self) -> None:
        self.send(f.Shutdown())
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Head, Side]]]:
    """Yield a factory of workers with an engine. A worker sleeps for an hour unless a frame or report
    wakes it."""
    torch.set_num_threads(1)
    monkeypatch.setattr(module, "_IDLE", 3600.0)
    made: list[tuple[Head, Side]] = []

    def one(role: Any) -> tuple[Head, Side]:
        side = Side(config_of(tmp_path, "llama", 8, role), len(made))
        made.append((Head(tmp_path, side), side))
        return made[-1]

    yield one
    for head, _ in made:
        if head.thread.is_alive():
            head.end()
        head.worker.close()
        head.channel.close()


def test_rooms_are_begun_expected_reported_and_stopped(start: Callable[..., tuple[Head, Side]]) -> None:
    sending, sender = start("prefill")
    receiving, receiver = start("decode")
    for head, side in ((sending, sender), (receiving, receiver)):
        assert head.take() == f.Ready(rank=1, endpoint=side.runner.endpoint)
    tables = receiver.tables_for(END)
    bound, offer = receiver.bound(tables), sender.offer(END)
    receiving.send(f.ExpectRoom(offer=offer, bound=bound))
    sending.send(f.Form(epoch=0, store=""))
    assert sending.take() == f.Formed(rank=1, epoch=0)
    ops = sender.enter(0, PROMPT, END, 0, sender.tables_for(END))
    plan = p.StepPlan(step=0, ops=(*ops, sender.export(0, 0, END)), prefill=row())
    digest = sending.worker._digest.__class__(sender.runner.kv.num_slots, len(sender.runner.kv.pools))
    sending.send(f.StepFrame(step=0, epoch=0, plan=plan, digest=digest.take(plan)))
    sending.send(f.PushRoom(offer=offer, bound=bound, blocks=sender.blocks(sender.tables[0]), num_cached=0))
    for head, count in ((sending, 3), (receiving, 2)):
        told = [head.take() for _ in range(count)]
        rooms = [word for word in told if isinstance(word, f.RoomReport)]
        assert [word.outcome for word in rooms] == [Outcome.pending, Outcome.done]
        assert all(isinstance(word, f.Outcome) for word in told if word not in rooms), told
    for head in (sending, receiving):
        head.send(f.StopRoom(key=KEY))
        assert head.take() == f.RoomStopped(rank=1, key=KEY)


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


def test_a_room_that_fails_on_a_rank_is_told(start: Callable[..., tuple[Head, Side]]) -> None:
    head, side = start("decode")
    head.take()
    bound = side.bound([[4, 4, 5]])
    head.send(f.ExpectRoom(offer=side.offer(END), bound=bound))
    told = head.take()
    assert isinstance(told, f.RoomReport)
    assert told.outcome is Outcome.failed
    assert told.error is not None
    assert "named twice" in told.error.message


def test_a_socket_lies_in_the_folder_of_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of the folder removes the socket of a killed rank."""
    config = config_of(tmp_path, "llama", 8, "decode")
    with tempfile.TemporaryDirectory(prefix="w") as domain:
        monkeypatch.setattr(rank_rooms, "private_folder", lambda: pytest.fail("another folder was made"))
        side = Side(msgspec.structs.replace(config, domain=domain), 0)
        assert side.runner.endpoint is not None
        path = Path(side.runner.endpoint.address)
        assert path.is_socket()
        assert path.parent == Path(domain)
        side.runner.close()
        assert Path(domain).is_dir()
    monkeypatch.undo()
    alone = Side(config, 1)
    assert alone.runner.endpoint is not None
    folder = Path(alone.runner.endpoint.address).parent
    alone.runner.close()
    assert not folder.exists()


def test_a_rank_without_transfers_refuses_rooms(start: Callable[..., tuple[Head, Side]]) -> None:
    head, _ = start("unified")
    assert head.take() == f.Ready(rank=1)
    head.send(f.Form(epoch=0, store=""))
    head.take()
    head.send(f.StopRoom(key=KEY))
    told = head.take()
    assert isinstance(told, f.Failed)
    assert "without KV transfers" in told.error.message


def test_with_another_head_all_rooms_stop_and_nothing_is_told_of_them(
    start: Callable[..., tuple[Head, Side]], tmp_path: Path
) -> None:
    head, side = start("decode")
    head.take()
    head.send(f.ExpectRoom(offer=side.offer(END), bound=side.bound(side.tables_for(END))))
    arrivals = side.runner.transfer.arrivals  # type: ignore[union-attr]
    until = time.monotonic() + SECONDS
    while not len(arrivals):
        assert time.monotonic() < until
        time.sleep(0.001)
    head.end()
    other = ZmqHead(f"ipc://{tmp_path}/other")
    head.worker.stopped = False
    head.worker.join(ZmqRank(other.address, 1), "second")
    head.thread = threading.Thread(target=head.worker.run, daemon=True)
    head.thread.start()
    head.channel.close()
    head.channel = other
    assert isinstance(head.take(), f.Loaded)
    assert head.take() == f.Ready(rank=1, endpoint=side.runner.endpoint)
    while len(arrivals):
        assert time.monotonic() < until
        time.sleep(0.001)
    late = RoomKey(8, 0, 1)
    head.send(f.StopRoom(key=late))
    assert head.take() == f.RoomStopped(rank=1, key=late), "and nothing of the room before"


def test_the_next_head_hears_of_caches_that_no_transfer_touches_any_more(
    start: Callable[..., tuple[Head, Side]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy in progress ends first. If the copy does not end in time, the rank ends."""
    head, side = start("decode")
    head.take()
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
    head.end()
    other = ZmqHead(f"ipc://{tmp_path}/other")
    head.channel.close()
    head.channel = other
    head.worker.stopped = False
    joining = threading.Thread(target=head.worker.join, args=(ZmqRank(other.address, 1), "second"))
    joining.start()
    assert other.receive(0.5) is None
    assert joining.is_alive()
    go_on.set()
    assert isinstance(head.take(), f.Loaded)
    joining.join(SECONDS)
    go_on.clear()
    assert copying.wait(SECONDS)
    monkeypatch.setattr(transfers, "_END_S", 0.1)
    with pytest.raises(EngineDead, match="does not stop"):
        head.worker.join(ZmqRank(other.address, 1), "third")
    monkeypatch.undo()
    go_on.set()


def test_reports_wake_whoever_polls_and_come_in_order() -> None:
    import select

    reports = RoomReports()

    def empty() -> bool:
        return not select.select([reports.descriptor], [], [], 0)[0]

    said = [RankStopped(RoomKey(number, 0, 1), 0) for number in range(3)]
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
