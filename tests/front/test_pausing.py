"""Routes for training loops: pause, resume, and the reset of the prefix cache."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.control.fleet.driver import PATIENCE, Driver
from tests.releases.record import TinyEngine, submit
from tests.support.slowness import deadline
from weft.common.errors import DeadlineExceeded, EngineDead, Unavailable
from weft.control.fleet import fleet_events as e
from weft.control.fleet.engine_protocol import EngineProtocol
from weft.control.fleet.fleet import Fleet
from weft.front import siblings
from weft.front.lifecycle import Lifecycle, Phase
from weft.front.requests.pausing import MEET_S, PauseState, Pausing
from weft.front.siblings import Siblings
from weft.store.fixed_weights import PARTS
from weft.types import messages as m
from weft.types.handshake import EngineIdentity

ADMIN = {"authorization": "Bearer admin"}


def test_the_latest_change_wins_everywhere() -> None:
    first = PauseState()
    pause = first.next("0", "keep")
    resume = first.next("1", "")  # at the same time, on another API server
    assert resume[:2] > pause[:2] > first[:2]
    assert pause.next("0", "")[:2] > resume[:2]
    for state in (first, pause, resume):
        assert PauseState.read(state.text()) == state
    with pytest.raises(ValueError, match="unknown mode"):
        PauseState.read("1 0 sleep - - -")


def test_a_full_queue_of_a_paused_server_is_unavailable() -> None:
    lifecycle = Lifecycle(lambda: 0)
    lifecycle.move(Phase.READY)
    assert lifecycle.full().http_status == 429
    lifecycle.paused = True
    with pytest.raises(Unavailable, match="paused, and its queue is full"), lifecycle.request():
        pass


def test_a_silent_api_server_is_an_error_and_an_absent_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        names = ["0", "1", "2"]
        one, other = (Siblings(name, tmp_path, lambda: names) for name in names[:2])
        for each in (one, other):
            await each.start(lambda: b"", lambda rid: False, lambda second: b"")
        other.pause = lambda state: f"2 {state}".encode()
        assert await one.tell_pause("1 0 keep") == [b"2 1 0 keep"]
        names.remove("1")  # a busy machine may be slower than the time below
        monkeypatch.setattr(siblings, "STATE_S", 0.2)
        silent = await asyncio.start_unix_server(lambda reader, writer: None, tmp_path / "front-2")
        with pytest.raises(Unavailable, match="the API server 2 did not answer"):
            await one.tell_pause("1 0 keep")
        silent.close()
        await one.close()
        await other.close()

    asyncio.run(run())


def test_an_api_server_that_begins_to_listen_meanwhile_is_absent(tmp_path: Path) -> None:
    """API servers start at the same time. The late one asks when it listens."""

    async def run() -> None:
        names = ["0", "1", "2"]
        one, late, other = (Siblings(name, tmp_path, lambda: names) for name in names)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            await late.start(lambda: b"", lambda rid: False, lambda second: b"")
            writer.write(b"0 1 0 keep")
            writer.close()

        async with await asyncio.start_unix_server(answer, other._path("2")):
            assert await one.tell_pause("1 0 keep") == [b"0 1 0 keep"]
        await late.close()

    asyncio.run(run())


def test_an_api_server_that_ends_meanwhile_is_absent(tmp_path: Path) -> None:
    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def run() -> None:
        one = Siblings("0", tmp_path, lambda: ["0", "1"])
        async with await asyncio.start_unix_server(end, tmp_path / "front-1"):
            assert await one.tell_pause("1 0 keep") == []

    asyncio.run(run())


def test_a_question_of_a_busy_api_server_may_come_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy process may need longer than ``ANSWER_S`` between the connection and the question."""
    monkeypatch.setattr(siblings, "ANSWER_S", 0.02)

    async def run() -> None:
        other = Siblings("1", tmp_path, lambda: ["0", "1"])
        other.pause = lambda state: b"0 1 0 keep"
        await other.start(lambda: b"", lambda rid: False, lambda second: b"")
        reader, writer = await asyncio.open_unix_connection(tmp_path / "front-1")
        await asyncio.sleep(0.05)
        writer.write(b"pause 1 0 keep\n")
        assert await reader.read(-1) == b"0 1 0 keep"
        writer.close()
        await other.close()

    asyncio.run(run())


def test_a_busy_api_server_has_time_to_answer(tmp_path: Path) -> None:
    """An API server that starts asks the others, which may start at the same time on few cores."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(siblings.ANSWER_S + 0.1)
        writer.write(b"0 1 0 keep")
        writer.close()

    async def run() -> None:
        one = Siblings("0", tmp_path, lambda: ["0", "1"])
        async with await asyncio.start_unix_server(answer, tmp_path / "front-1"):
            asked = one.tell_pause("1 0 keep"), one.ask_adapters("m"), one.tell_weights("m", "{}")
            assert await asyncio.gather(*asked) == [[b"0 1 0 keep"]] * 3
        await one.close()

    asyncio.run(run())


class Links:
    """The fleet of one API server, without links."""

    def __init__(self) -> None:
        self.driver = Driver("a").up()
        self.fleet = self.driver.fleet

    def hold(self, running: bool) -> None:
        self.driver.on(e.Held(running))

    def release_held(self) -> None:
        self.driver.on(e.Released())


def api_server(name: str, folder: Path, names: list[str]) -> tuple[Pausing, Siblings, Any]:
    """Return the pause of an API server, and a front with one model."""
    siblings = Siblings(name, folder, lambda: names)
    model = SimpleNamespace(lifecycle=Lifecycle(lambda: 8), links=Links())
    front = SimpleNamespace(model=model, lifecycle=model.lifecycle, several=None, running={})
    return Pausing(front, siblings), siblings, front  # type: ignore[arg-type]


def test_all_api_servers_pause_also_one_that_starts_during_the_pause(tmp_path: Path) -> None:
    async def run() -> None:
        names = ["0", "1", "2"]
        made = [api_server(name, tmp_path, names) for name in names]
        for _, sibling, _ in made[:2]:
            await sibling.start(lambda: b"", lambda rid: False, lambda second: b"")
        first, second, late = (pausing for pausing, _, _ in made)
        drivers = [front.model.links.driver for _, _, front in made]
        drivers[1].open(1)
        waiting = asyncio.create_task(first.pause("wait", 5.0))
        await asyncio.sleep(0.06)
        assert not waiting.done()  # a sequence of the other API server runs
        assert drivers[1].open(2, request=2) is None
        drivers[1].on(e.Closed((1,)))
        await waiting
        await made[2][1].start(lambda: b"", lambda rid: False, lambda second: b"")
        await late.join()
        assert late.paused
        assert made[2][2].lifecycle.paused
        assert drivers[2].open(3) is None
        await late.resume()
        assert [one.paused for one in (first, second, late)] == [False] * 3
        assert all(entry.places for one in drivers for entry in one.fleet.entries.values())
        # A sequence that does not end in time leaves the server paused.
        with pytest.raises(DeadlineExceeded, match="requests still run"):
            await second.pause("wait", 0.0)
        assert first.paused
        resumed = asyncio.create_task(first.pause("wait", 5.0))
        await asyncio.sleep(0.03)
        await second.resume()
        with pytest.raises(Unavailable, match="was resumed before"):
            await resumed
        for _, sibling, _ in made:
            await sibling.close()

    asyncio.run(run())


def test_a_second_wake_up_reaches_an_api_server_that_was_silent(tmp_path: Path) -> None:
    async def run() -> None:
        names = ["0", "1"]
        (first, one, _), (second, other, _) = (api_server(name, tmp_path, names) for name in names)
        for each in (one, other):
            await each.start(lambda: b"", lambda rid: False, lambda second: b"")
        await first.sleep("keep", 1, 5.0)
        assert second.asleep
        tell = one.tell_pause

        async def silent(state: str) -> list[bytes]:
            raise Unavailable("the API server 1 did not answer; try again")

        one.tell_pause = silent  # type: ignore[method-assign]
        with pytest.raises(Unavailable):
            await first.wake(PARTS)
        assert second.asleep
        one.tell_pause = tell  # type: ignore[method-assign]
        await first.wake(PARTS)
        assert not second.paused
        for each in (one, other):
            await each.close()

    asyncio.run(run())


class CountingEngine(TinyEngine):
    """Reports the live sequences."""

    def stats(self) -> m.EngineStats:
        return m.EngineStats(running=len(self.live))


class Met:
    """The links of one API server that runs alone, to engines without sockets."""

    def __init__(self, name: str, engines: dict[str, EngineProtocol], servers: dict[bytes, Met]) -> None:
        self.name, self.engines, self.servers = name.encode(), engines, servers
        self.fleet = Fleet(dict.fromkeys(engines, ""), PATIENCE, front=name, joining=True, elastic=True)
        servers[self.name] = self
        self.silent = 0
        """Number of calls of ``stats`` without an answer."""

    @property
    def instances(self) -> list[Any]:
        return list(self.fleet.table.instances.values())

    def connect(self) -> None:
        for link, name in enumerate(self.engines):
            self.feed(e.Expected(name, link, identity=EngineIdentity(name=name, model="m", start=1)))
            self.feed(e.Linked(name, link))

    def feed(self, event: e.Event) -> None:
        for action in self.fleet.on(event, 1.0):
            if isinstance(action, e.Send):
                self.send(action.instance, action.message)

    def send(self, engine: str, message: m.ToEngine) -> None:
        self.deliver(engine, self.engines[engine].on(self.name, message))

    def deliver(self, engine: str, messages: list[tuple[bytes, m.ToFront]]) -> None:
        for name, message in messages:
            other = self.servers[name]
            other.feed(e.Received(engine, other.fleet.table.instances[engine].link, message))

    def open(self, sequence: int) -> None:
        self.feed(e.Opened((submit(sequence),)))

    def places(self, sequence: int) -> list[str]:
        return list(self.fleet.entries[sequence].places)

    def evict(self, sequence: int) -> None:
        """Let the engine give the sequence back."""
        (place,) = self.places(sequence)
        gone = m.TokenEvent(sequence=sequence, finish="evicted")
        self.engines[place]._engine.finish(sequence)
        self.deliver(place, self.engines[place].events([gone]))

    def hold(self, running: bool) -> None:
        self.feed(e.Held(running))

    def release_held(self) -> None:
        self.feed(e.Released())

    def share_pause(self, pause: str) -> None:
        self.feed(e.PauseShared(pause))

    async def stats(self, timeout: float) -> None:
        if self.silent:
            self.silent -= 1
            raise EngineDead("an engine did not report its counters in time")
        for one in self.instances:
            self.send(one.name, self.fleet.hello(one))


def test_api_servers_that_run_alone_wait_for_sequences_at_no_engine() -> None:
    """A begun sequence between two attempts is in no count of an engine. A silent engine is asked again."""

    async def run() -> None:
        identities = [EngineIdentity(name=name, model="m", start=1) for name in "ab"]
        engines = {one.name: EngineProtocol(CountingEngine(), 7, identity=one) for one in identities}
        servers: dict[bytes, Met] = {}
        links = [Met(name, engines, servers) for name in ("x", "y")]
        made, models = [], []
        for one in links:
            owner = SimpleNamespace(shared=True)
            model: Any = SimpleNamespace(lifecycle=Lifecycle(lambda: 8), links=one, owner=owner)
            front: Any = SimpleNamespace(model=model, lifecycle=model.lifecycle, several=None, running={})
            made.append(Pausing(front, None))
            models.append(model)
            made[-1].meet(model)
            one.connect()
        first, second = made
        links[1].open(1)
        for _ in range(2):  # the sequence then waits 0.1 s, and the time stands still
            links[1].evict(1)
        assert links[1].places(1) == []
        links[0].silent = 2
        waiting = asyncio.create_task(first.pause("wait", 5.0))
        await asyncio.sleep(4 * MEET_S)
        assert models[1].lifecycle.paused
        assert not waiting.done()
        links[1].feed(e.Closed((1,)))
        await waiting
        links[1].open(2)
        assert links[1].places(2) == []
        await second.resume()
        await asyncio.sleep(3 * MEET_S)
        assert [one.paused for one in made] == [False] * 2
        assert links[1].places(2)
        for each in made:
            each.close()

    asyncio.run(run())


def post(server: Any, path: str, **fields: Any) -> httpx.Response:
    """Send a request of the admin key over a new connection, which any API server may get."""
    with httpx.Client(base_url=server.url, timeout=deadline(30)) as client:
        return client.post(path, headers=ADMIN, **fields)


def get(server: Any, path: str) -> Any:
    with httpx.Client(base_url=server.url, timeout=deadline(30)) as client:
        return client.get(path, headers=ADMIN)


class Completion(threading.Thread):
    """A completion in a thread of its own. ``text`` grows with the stream."""

    def __init__(self, server: Any, tokens: int) -> None:
        super().__init__(daemon=True)
        self.server, self.tokens = server, tokens
        self.text, self.finish = "", ""
        self.start()

    def run(self) -> None:
        fields = {"model": "fake", "prompt": "abc", "max_tokens": self.tokens, "stream": True}
        with (
            httpx.Client(base_url=self.server.url, timeout=deadline(60)) as client,
            client.stream("POST", "/v1/completions", json=fields) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    choice = httpx.Response(200, content=line[6:]).json()["choices"][0]
                    self.text += choice["text"]
                    self.finish = choice["finish_reason"] or self.finish

    def begun(self) -> Completion:
        """Wait for the first text."""
        until = time.monotonic() + deadline(20)
        while not self.text:
            assert time.monotonic() < until
            time.sleep(0.005)
        return self

    def end(self) -> tuple[str, str]:
        self.join(deadline(30))
        assert not self.is_alive()
        return self.text, self.finish


@pytest.mark.slow
@pytest.mark.parametrize("fronts", [1, 2])
def test_a_server_pauses_in_three_ways(start_fake: Any, fronts: int) -> None:
    server = start_fake(fronts=fronts, engines=2, admin_key=["admin"], max_num_seqs=8)
    wanted = ("abc" * 100)[:300]
    # keep: no token until the resume, then the same tokens
    streams = [Completion(server, 300) for _ in range(4)]
    for one in streams:
        one.begun()
    assert post(server, "/pause?mode=keep").json() == {"status": "paused"}
    new = Completion(server, 6)
    time.sleep(0.2)
    before = [one.text for one in (*streams, new)]
    assert new.text == ""
    assert any(one.is_alive() for one in streams)
    for _ in range(4):  # any API server may answer
        assert get(server, "/is_paused").json() == {"is_paused": True}
        assert (get(server, "/ready").status_code, get(server, "/ready").json()["status"]) == (503, "paused")
        assert get(server, "/health").status_code == 200
    time.sleep(0.3)
    assert [one.text for one in (*streams, new)] == before
    assert post(server, "/resume").json() == {"status": "resumed"}
    assert [one.end() for one in streams] == [(wanted, "length")] * 4
    assert new.end() == ("abcabc", "length")
    # wait: the answer comes after the last token of a begun request
    stream = Completion(server, 300).begun()
    assert post(server, "/pause?mode=wait&clear_cache=false").status_code == 200
    assert stream.end() == (wanted, "length")
    new = Completion(server, 6)
    # abort: requests that wait end, too
    time.sleep(0.2)
    assert post(server, "/pause").status_code == 200
    assert new.end() == ("", "abort")
    assert post(server, "/resume").status_code == 200
    stream = Completion(server, 300).begun()
    assert post(server, "/pause?mode=abort").status_code == 200
    assert stream.end()[1] == "abort"
    later = Completion(server, 6)
    answer = post(server, "/reset_prefix_cache", json={"disk": True})
    assert answer.json() == {"status": "reset", "blocks": 6}
    assert post(server, "/reset_prefix_cache").json()["blocks"] == 6
    for path, status in (("/pause?mode=sleep", 400), ("/pause?now=1", 400), ("/pause?clear_cache=2", 400)):
        assert post(server, path).status_code == status
    assert httpx.post(server.url + "/pause").status_code in (401, 403)
    assert later.text == ""
    assert post(server, "/resume").status_code == 200
    assert later.end() == ("abcabc", "length")
    assert get(server, "/ready").json()["status"] == "ready"
