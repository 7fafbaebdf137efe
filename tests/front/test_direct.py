"""Streams whose tokens go to the connection at once: slow clients, kept connections, errors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import re
import socket
import weakref
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from tests.support.slowness import deadline
from weft.control.links.flow import Flow
from weft.front import connection
from weft.front.http import answers, streaming
from weft.front.http.direct import DIRECT, DirectWriter
from weft.front.http.streaming import EventStream
from weft.front.openai.completions import CompletionShape
from weft.front.protocol.conversation import AnswerOptions
from weft.front.requests.generation import Generation
from weft.front.requests.serving import _events, _shown
from weft.text.choice import Choice, TextDelta
from weft.text.pieces import DecoderForm, TextPiece
from weft.types.messages import TokenEvent
from weft.types.sampling import SamplingParams

ASK = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
END = b"0\r\n\r\n"


class Words:
    """A tokenizer: token 7 is the text "7 " and 200 dots."""

    form = DecoderForm("level")

    def piece(self, token: int) -> TextPiece:
        text = f"{token} " + "." * 200
        return TextPiece(text.encode(), text.encode(), text=text)

    def is_special(self, token: int) -> bool:
        return False


class Made(Generation):
    """A generation of one choice whose events the test pushes."""

    def __init__(self) -> None:
        tokenizer: Any = Words()
        front: Any = SimpleNamespace(text=SimpleNamespace(tokenizer=tokenizer), running={}, pauses=[])
        front.model = SimpleNamespace(weights=SimpleNamespace(shown=False))
        self.outcomes: list[str] = []
        times: Any = SimpleNamespace(named=lambda name: None, failed=self.outcomes.append)
        super().__init__(front, times=times, deadline=0.0, seed=0)
        self.job = cast(Any, SimpleNamespace(asked=AnswerOptions(model="m", stream=True), prompts=[]))
        self.choices = [Choice(tokenizer, SamplingParams(), sequence=1)]
        self._by_sequence = {1: self.choices[0]}
        self._flow = Flow([1])

    def push(self, *tokens: int, finish: Any = None) -> None:
        self.flow.push([TokenEvent(sequence=1, token_ids=tokens, finish=finish)])

    def usage(self) -> answers.Usage:
        return answers.make_usage(1, 1, 0)

    def succeeded(self) -> None:
        self.outcomes.append("")


class Pauser:
    """Counts the calls of ``pause`` and ``resume``."""

    def __init__(self) -> None:
        self.paused = self.resumed = 0

    def pause(self, flow: Flow) -> None:
        self.paused += 1

    def resume(self, flow: Flow) -> None:
        self.resumed += 1


class App:
    """Answers each request with the stream of the next generation."""

    def __init__(self, *generations: Made) -> None:
        self._left = list(generations)
        self.pauser = Pauser()
        self.writers: list[weakref.ref[DirectWriter]] = []
        self.running = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        generation = self._left.pop(0)
        direct = scope[DIRECT]
        self.writers.append(weakref.ref(direct))
        self.running += 1
        shape = CompletionShape(generation)
        events = _events(generation.front, receive, generation, shape, [], generation._times, direct)
        until = asyncio.get_running_loop().time() + deadline(30)
        answer = EventStream(events, until, contextlib.ExitStack(), generation.flow, self.pauser)
        await answer(scope, receive, send)

    def direct(self) -> DirectWriter:
        """Return the writer of the last request, which must be open."""
        made = self.writers[-1]()
        assert made is not None
        return made

    async def started(self, number: int) -> None:
        while self.running < number:
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(app: App) -> AsyncIterator[socket.socket]:
    """Serve ``app`` in the running loop, and yield a connected socket with small buffers."""
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
    config.load()
    all_of_them = connection.Connections()
    make = functools.partial(
        connection.Connection,
        config=config,
        server_state=ServerState(),
        app_state={},
        connections=all_of_them,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(make, sock=listener)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, listener.getsockname())
        yield client
    server.close()


async def read(client: socket.socket, end: bytes, size: int = 1 << 16) -> bytes:
    """Read until ``end``, at most ``size`` bytes at once."""
    loop, got = asyncio.get_running_loop(), b""
    while not got.endswith(end):
        more = await loop.sock_recv(client, size)
        assert more, got[-200:]
        got += more
    return got


def numbers(answer: bytes) -> list[int]:
    """Return the tokens of an answer in chunks."""
    body, rest = b"", answer.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    chunks = [json.loads(data) for data in re.findall(rb"data: (\{.*\})\n\n", body)]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    return [int(number) for number in re.findall(r"\d+", text)]


def test_a_client_that_reads_slowly_gets_every_token_and_holds_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streaming, "PAUSE_AFTER", 0.02)
    unsent: list[int] = []
    write = DirectWriter.write

    def watched(self: DirectWriter, data: bytes) -> None:
        unsent.append(self._cycle.transport.get_write_buffer_size())
        write(self, data)

    monkeypatch.setattr(DirectWriter, "write", watched)
    count = 1500

    async def run() -> None:
        generation = Made()
        app = App(generation)
        async with serving(app) as client:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, ASK)
            await app.started(1)
            for token in range(count):  # the client reads nothing
                generation.push(token)
                await asyncio.sleep(0)
            assert 0 < len(unsent) < count / 2
            while not app.pauser.paused:
                await asyncio.sleep(0.005)
            slow = asyncio.create_task(read(client, END, 3000))
            # Behind the pause, the merged rest is one large write. The way is short again when the
            # connection takes bytes.
            while not app.pauser.resumed or generation.flow._taker is None or not app.direct().ready:
                await asyncio.sleep(0.005)
            before = len(unsent)
            generation.push(count)
            assert len(unsent) == before + 1
            generation.push(count + 1, finish="length")
            assert numbers(await slow) == list(range(count + 2))
        assert max(unsent) <= connection.WRITE_BUFFER
        assert app.pauser.resumed == app.pauser.paused
        assert generation.outcomes == [""]

    asyncio.run(asyncio.wait_for(run(), deadline(30)))


def test_a_kept_connection_carries_one_stream_after_another() -> None:
    """The objects of an answered request must be free at once, without the garbage collector."""

    async def run() -> None:
        made = [Made(), Made()]
        app = App(*made)
        async with serving(app) as client:
            for number, generation in enumerate(made, 1):
                await asyncio.get_running_loop().sock_sendall(client, ASK)
                await app.started(number)
                generation.push(1)
                await asyncio.sleep(0.01)
                generation.push(2)
                generation.push(3, finish="length")
                assert numbers(await read(client, END)) == [1, 2, 3]
        assert app.writers[0]() is None

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(run(), deadline(30)))
    finally:
        gc.enable()


def test_a_client_that_leaves_ends_the_stream() -> None:
    async def run() -> None:
        generation = Made()
        app = App(generation)
        async with serving(app) as client:
            await asyncio.get_running_loop().sock_sendall(client, ASK)
            await app.started(1)
            generation.push(1)
            await read(client, b"\r\n")
        while not generation.outcomes:
            generation.push(2)
            await asyncio.sleep(0.005)
        assert generation.outcomes == ["cancelled"]

    asyncio.run(asyncio.wait_for(run(), deadline(30)))


class Direct:
    """A connection that takes all events."""

    ready = True

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


def test_an_error_in_an_event_keeps_the_events_before_and_reaches_the_reader() -> None:
    """The taker runs in the callback of the engine's message, so the taker must not raise."""

    class Shape:
        def weight(self, delta: TextDelta) -> int:
            return 0

        def events(self, delta: TextDelta) -> list[bytes]:
            if delta.token_ids == (2,):
                raise RuntimeError("no event")
            return [b"event"]

    async def run() -> None:
        generation, direct = Made(), Direct()
        show = _shown(cast(Any, Shape()), cast(Any, SimpleNamespace(sent=lambda: None)), cast(Any, direct))
        reader = asyncio.create_task(generation.next(show))
        await asyncio.sleep(0)
        generation.flow.push([TokenEvent(sequence=1, token_ids=(token,)) for token in (1, 2)])
        assert await asyncio.wait_for(reader, 1) == []
        assert direct.written == [b"event"]
        assert not generation.done
        generation.push(3)  # no token may follow the gap
        with pytest.raises(RuntimeError, match="no event"):
            await generation.next(show)

    asyncio.run(run())
