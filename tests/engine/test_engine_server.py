"""The loop of the engine process over real sockets: answers, dropped messages, faults."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from tests.e0.rig import make_engine, submit
from tests.support.checkpoints import make_checkpoint
from tests.support.slowness import deadline
from weft.common.shared_bytes import SharedBytes
from weft.control.links.link import Address
from weft.control.links.shutdown import shut_down
from weft.engine.core import EngineCore
from weft.engine.server.engine_server import EngineServer
from weft.engine.server.listener import Listener
from weft.scheduler import Scheduler
from weft.types import messages as m
from weft.types.media_item import MediaItem
from weft.types.sampling import TokenParams

DEADLINE = deadline(20.0)


class Front:
    """A front's side of the socket."""

    def __init__(self, endpoint: str, hello: bool = True) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.heartbeats: list[m.Heartbeat] = []
        if hello:
            self.send(m.Hello(versions=(m.OLDEST, m.VERSION), front=secrets.token_hex(4)))
            assert isinstance(self.receive(), m.Welcome)

    def send(self, message: m.ToEngine) -> None:
        self.socket.send(m.encode(message))

    def receive(self) -> m.ToFront:
        """The next message that is not a heartbeat; heartbeats are kept."""
        until = time.monotonic() + DEADLINE
        while time.monotonic() < until:
            if self.socket.poll(100):
                message = m.decode_to_front(self.socket.recv())
                if not isinstance(message, m.Heartbeat):
                    return message
                self.heartbeats.append(message)
        raise AssertionError("the head did not answer in time")

    def events(self, sequence: int) -> list[m.TokenEvent]:
        """Events of a sequence until its terminal one."""
        got: list[m.TokenEvent] = []
        while not got or got[-1].finish is None:
            message = self.receive()
            assert isinstance(message, m.Tokens), message
            got += [event for event in message.events if event.sequence == sequence]
        return got

    def stats_when(self, wanted: Callable[[m.EngineStats], bool]) -> m.EngineStats:
        """Waits for a heartbeat whose stats are as wanted."""
        until = time.monotonic() + DEADLINE
        while time.monotonic() < until:
            if self.socket.poll(100):
                message = m.decode_to_front(self.socket.recv())
                if isinstance(message, m.Heartbeat) and wanted(message.stats):
                    return message.stats
        raise AssertionError("no such heartbeat")

    def close(self) -> None:
        self.socket.close()
        self._context.term()


class Served:
    """A head in a thread, and its fronts."""

    def __init__(self, core: EngineCore, endpoint: str, wait_ms: Callable[[], int] | None = None) -> None:
        self.core = core
        self.endpoint = endpoint
        self.error: BaseException | None = None
        self._fronts: list[Front] = []
        self.engine = EngineServer(core, endpoint, wait_ms=wait_ms)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.engine.run()
        except BaseException as error:
            self.error = error

    def front(self, **more: Any) -> Front:
        self._fronts.append(Front(self.endpoint, **more))
        return self._fronts[-1]

    def close(self) -> None:
        self.engine._protocol.stopped = True
        self.thread.join(DEADLINE)
        for front in self._fronts:
            front.close()
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("head"), "llama")


@pytest.fixture
def served(folder: Path, tmp_path: Path) -> Iterator[Served]:
    core, _ = make_engine(folder, depth=2)
    made = Served(core, f"ipc://{tmp_path}/head")
    yield made
    made.close()


def ask(sequence: int = 1, tokens: int = 8, **more: Any) -> m.Submit:
    return submit(
        sequence, [3, 1, 4, 1, 5], TokenParams(temperature=0.0, max_tokens=tokens), request=sequence, **more
    )


def test_a_submit_is_answered_to_its_end(served: Served) -> None:
    front = served.front()
    front.send(ask())
    events = front.events(1)
    assert sum(len(event.token_ids) for event in events) == 8
    assert [event.finish for event in events][-1] == "length"


def test_unequal_versions_are_refused_by_name(served: Served) -> None:
    front = served.front(hello=False)
    front.send(m.Hello(versions=(m.VERSION + 1, m.VERSION + 3), front="future"))
    answer = front.receive()
    assert isinstance(answer, m.EngineFailed)
    assert f"versions {m.OLDEST} to {m.VERSION}" in answer.error.message
    assert f"{m.VERSION + 1} to {m.VERSION + 3}" in answer.error.message


@pytest.mark.requirement("F27")
@pytest.mark.parametrize(
    "frame",
    [b"", b"\xff" * 50, b"\x80\x04cbuiltins\neval\n.", m.encode(ask())[:-9], b"\x81\xa4type\xa4Nope"],
    ids=["empty", "noise", "pickle", "truncated", "unknown tag"],
)
def test_garbage_is_dropped_and_counted(served: Served, frame: bytes) -> None:
    front = served.front()
    front.socket.send(frame)
    front.send(ask())
    assert front.events(1)[-1].finish == "length"
    assert front.stats_when(lambda stats: stats.running == 0).bad_frames == 1


def test_bytes_that_are_no_ids_fail_that_request_alone(served: Served) -> None:
    front = served.front()
    broken = m.Submit(sequence=5, request=5, seed=0, prompt_ids=b"abc", params=TokenParams())
    front.send(broken)
    front.send(ask())
    event = front.events(5)[-1]
    assert event.error is not None
    assert event.error.http_status == 400
    assert front.events(1)[-1].finish == "length"


def test_an_unregistered_api_server_is_not_served(served: Served) -> None:
    stranger, front = served.front(hello=False), served.front()
    stranger.send(ask(2))
    front.send(ask(1))
    front.events(1)
    assert front.stats_when(lambda stats: stats.bad_frames > 0).running == 0
    (refused,) = stranger.events(2)  # a forgotten API server, which did not read, gets the refusal
    assert refused.error is not None
    assert refused.error.retryable


@pytest.mark.requirement("F26")
def test_an_api_server_cannot_end_or_repeat_sequences_of_another(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = served.core.step

    def slow_step() -> list[m.TokenEvent]:
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(served.core, "step", slow_step)  # so that it is live when the other one asks
    owner, other = served.front(), served.front()
    owner.send(ask(1, tokens=60))
    owner.receive()
    other.send(m.Finish(sequence=1))
    other.send(ask(1))
    (refused,) = other.events(1)
    assert refused.error is not None
    assert (refused.error.code, refused.error.retryable) == ("unavailable", True)
    events = owner.events(1)
    assert events[-1].finish == "length"
    assert sum(len(event.token_ids) for event in events) in (58, 59)


def _drain(front: Front) -> list[m.ToFront]:
    got = []
    while front.socket.poll(0):
        got.append(m.decode_to_front(front.socket.recv()))
    return got


def test_a_later_attempt_takes_the_place_of_an_earlier_one(served: Served) -> None:
    """Its front gave the first one up, and may have told so or not; what of it is under way says so."""
    front = served.front()
    front.send(ask(1, tokens=60))
    begun = front.receive()
    assert isinstance(begun, m.Tokens)
    events = list(begun.events)
    front.send(msgspec.structs.replace(ask(1, tokens=5), attempt=2))
    front.send(msgspec.structs.replace(ask(1, tokens=60), attempt=1))  # it comes late, and is dropped
    while not events or events[-1].finish is None or events[-1].attempt < 2:
        message = front.receive()
        assert isinstance(message, m.Tokens)
        events += message.events
    assert {event.attempt for event in events} == {0, 2}
    assert all(event.finish is None for event in events if not event.attempt)
    again = [event for event in events if event.attempt == 2]
    assert (sum(len(event.token_ids) for event in again), again[-1].finish) == (5, "length")
    assert front.stats_when(lambda stats: stats.running == 0).bad_frames == 1


def test_an_api_server_that_leaves_ends_its_own_sequences(served: Served) -> None:
    leaving, staying = served.front(), served.front()
    leaving.send(ask(1, tokens=90))
    staying.send(ask(2, tokens=60))
    leaving.receive()
    leaving.send(m.Goodbye())
    assert sum(len(event.token_ids) for event in staying.events(2)) == 60
    assert staying.stats_when(lambda stats: stats.running == 0).bad_frames == 0


@pytest.mark.requirement("F30")
def test_finish_frees_at_once(served: Served) -> None:
    front = served.front()
    front.send(ask(1, tokens=90))
    front.receive()
    front.send(m.Finish(sequence=1))
    assert front.events(1)[-1].finish in ("abort", "length")
    stats = front.stats_when(lambda stats: stats.running == 0)
    assert stats.free_slots == served.core.runner.kv.num_slots


@pytest.mark.requirement("F30")
def test_a_front_that_went_away_loses_its_sequences(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    step = served.core.step

    def slow_step() -> list[m.TokenEvent]:
        time.sleep(0.05)
        return step()

    monkeypatch.setattr(served.core, "step", slow_step)
    gone, front = served.front(), served.front()
    for i in range(10, 30):
        gone.send(ask(i, tokens=90))
    gone.receive()
    gone.close()
    served._fronts.remove(gone)
    stats = front.stats_when(lambda stats: stats.generation_tokens > 0 and not stats.running + stats.waiting)
    assert stats.generation_tokens < 20 * 45
    front.send(ask())
    assert front.events(1)[-1].finish == "length"


def test_drain_finishes_what_runs_and_takes_nothing_new(served: Served) -> None:
    front = served.front()
    front.send(ask(1, tokens=80))
    front.receive()
    front.send(m.Drain())
    front.send(ask(2))
    refused = finished = None
    while finished is None or refused is None:
        message = front.receive()
        assert isinstance(message, m.Tokens)
        for event in message.events:
            refused = event if event.sequence == 2 else refused
            finished = event if event.sequence == 1 and event.finish else finished
    assert refused.error is not None
    assert refused.error.http_status == 503
    assert finished.finish == "length"
    served.thread.join(DEADLINE)
    assert not served.thread.is_alive()
    assert served.error is None


def test_shutdown_ends_the_loop(served: Served) -> None:
    front = served.front()
    front.send(m.Shutdown())
    served.thread.join(DEADLINE)
    assert not served.thread.is_alive()


def test_shutdown_ends_a_loop_that_reads_after_the_sender_has_closed(folder: Path, tmp_path: Path) -> None:
    """The answer to Hello reaches nobody, so the engine forgets the sender before the next message."""
    listener = Listener(f"ipc://{tmp_path}/head")
    process: Any = SimpleNamespace(poll=lambda: None)
    shut_down([Address(listener.address, process)])
    core, _ = make_engine(folder, depth=2)
    engine = EngineServer(core, listener)
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        thread.join(deadline(5.0))
        assert not thread.is_alive()
    finally:
        engine._protocol.stopped = True
        thread.join(DEADLINE)


def test_an_engine_failure_is_reported_once_and_ends_the_engine(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequences do not end with it: a front that kept them goes on elsewhere."""
    front = served.front()
    front.send(ask(1, tokens=90))
    front.receive()

    def fail(_plan: object) -> None:
        raise RuntimeError("device lost at 0xdeadbeef")

    monkeypatch.setattr(served.core.runner, "forward", fail)
    answer = front.receive()
    while isinstance(answer, m.Tokens):
        assert all(event.finish is None for event in answer.events)
        answer = front.receive()
    assert isinstance(answer, m.EngineFailed)
    assert answer.error.http_status == 500
    assert "0xdeadbeef" not in answer.error.message
    served.thread.join(DEADLINE)
    assert isinstance(served.error, RuntimeError)


def test_an_oversized_message_is_refused_where_it_is_made() -> None:
    huge = m.Submit(sequence=1, request=1, seed=0, prompt_ids=bytes(m.MAX_FRAME), params=TokenParams())
    with pytest.raises(Exception, match="too large"):
        m.encode(huge)
    with pytest.raises(ValueError, match="size limit"):
        m.decode_to_engine(bytes(m.MAX_FRAME + 1))


def test_a_heartbeat_reports_idleness_at_once(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        "weft.engine.server.engine_server.HEARTBEAT_S", 3600.0
    )  # none comes but those that are due to events
    core, _ = make_engine(folder, depth=2)
    served = Served(core, f"ipc://{tmp_path}/head")
    try:
        front = served.front()
        for sequence in (1, 2):
            front.send(ask(sequence, tokens=8 * sequence))
        front.events(2)
        stats = front.stats_when(lambda stats: stats.running == 0 and stats.steps > 0)
        assert (stats.waiting, stats.kv_usage) == (0, 0.0)
        front.send(ask(3, tokens=64))
        front.receive()
        front.send(m.Finish(sequence=3))  # nothing more is heard of it
        stats = front.stats_when(lambda later: later.running == 0 and later.steps > stats.steps)
        assert (stats.waiting, stats.kv_usage) == (0, 0.0)
    finally:
        served.close()


def test_heartbeats_come_while_idle_and_tell_so(served: Served) -> None:
    front, heartbeats = served.front(), list[m.Heartbeat]()
    until = time.monotonic() + DEADLINE
    while len(heartbeats) < 2 and time.monotonic() < until:
        heartbeats += [message for message in _drain(front) if isinstance(message, m.Heartbeat)]
        time.sleep(0.05)
    assert len(heartbeats) >= 2
    assert all(heartbeat.idle for heartbeat in heartbeats)


class Arrivals:
    """A source that reports that the input of a blocked sequence is there."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.sockets = [context.socket(zmq.PAIR)]
        self.sockets[0].bind("inproc://arrivals")
        self.taken = 0

    def take(self, scheduler: Scheduler) -> list[m.TokenEvent]:
        while self.sockets[0].poll(0):
            scheduler.arrived(int(self.sockets[0].recv()))
            self.taken += 1
        return []

    def serve(self, scheduler: Scheduler) -> list[m.TokenEvent]:
        return []


def test_a_source_wakes_the_loop_and_a_drain_waits_for_what_is_awaited(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop sleeps on the source's socket: what arrives is taken at once, though a sleep has no end."""
    monkeypatch.setattr("weft.engine.server.engine_server.IDLE_POLL_MS", None)
    core, _ = make_engine(folder)
    add = core.scheduler.add
    monkeypatch.setattr(core.scheduler, "add", lambda one, now: add(one, now, blocked=True))
    context: zmq.Context[Any] = zmq.Context()
    source = Arrivals(context)
    core.sources.append(source)
    served = Served(core, f"ipc://{tmp_path}/head")
    outside = context.socket(zmq.PAIR)
    outside.connect("inproc://arrivals")
    front = served.front()
    try:
        front.send(submit(1, [1, 2, 3], TokenParams(temperature=0.0, max_tokens=4), request=1))
        front.send(m.Drain())
        deadline = time.monotonic() + DEADLINE
        while core.scheduler.stats().waiting == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert core.scheduler.steps == source.taken == 0
        assert served.thread.is_alive()
        outside.send(b"1")
        assert front.events(1)[-1].finish == "length"
        assert source.taken == 1
        front.send(m.Drain())  # wakes the loop, which finds nothing left to wait for
        served.thread.join(DEADLINE)
        assert not served.thread.is_alive()
    finally:
        served.engine._stop = True
        front.send(m.Drain())  # wakes the loop, if it still sleeps
        served.close()
        for socket in (outside, *source.sockets):
            socket.close(0)
        context.term()


@pytest.mark.requirement("D6")
def test_an_image_that_is_shown_no_more_is_a_sequence_given_back(served: Served) -> None:
    """The API server has the image, and sends the sequence again. The engine goes on."""
    front = served.front()
    made = SharedBytes(48)
    made.seal()
    made.close()
    item = MediaItem(key=bytes(16), start=0, count=1, grid=(1, 2, 2), shared=made.name)
    front.send(ask(1, media=(item,), attempt=3))
    (event,) = front.events(1)
    assert (event.finish, event.attempt) == ("evicted", 3)
    assert event.error is not None
    assert event.error.code == "pixels_lost"
    front.send(ask(2))
    assert front.events(2)[-1].finish == "length"
