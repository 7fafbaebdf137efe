"""Requests that are too long, too slow, too many at once or not HTTP, byte by byte on a socket."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from tests.support.slowness import deadline
from weft.front import connection
from weft.front.connection import MOST_AHEAD, MOST_CONNECTIONS, Connections
from weft.front.front_server import most_connections

LARGE = 8 << 20


class App:
    """Answer "ok" to a GET, and to a POST the number of its bytes when the body is complete.

    Other paths: "/early" is answered before the body, "/large" with ``LARGE`` bytes, "/pieces" in pieces, and
    "/never" with twice as many bytes and no end.
    """

    def __init__(self, most: int = MOST_CONNECTIONS, connections: type = connection.Connection) -> None:
        http: Any = functools.partial(connections, connections=Connections(lambda: most))
        self.config = uvicorn.Config(self, http=http, ws="none", lifespan="off", log_config=None)
        self.config.timeout_keep_alive = 60  # longer than a slow reading of an answer
        self.server = uvicorn.Server(self.config)
        self.most_waiting = 0
        """The longest queue of pipelined requests on one connection."""
        self.asked, self.left = threading.Event(), threading.Event()
        """Events: "/never" was requested; its client disconnected."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        for one in self.server.server_state.connections:
            self.most_waiting = max(self.most_waiting, len(one.pipeline))  # type: ignore[union-attr]
        path = scope["path"]
        if path == "/never":
            self.asked.set()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a" * 2 * LARGE, "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
            return
        answer, more, length = b"ok", scope["method"] == "POST" and path != "/early", 0
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            more = message["more_body"]
            length += len(message["body"])
            answer = b"%d" % length
        if path == "/pieces":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for piece in (b"one ", b"", b"two"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        if path == "/large":
            answer = b"a" * LARGE
        size = b"%d" % len(answer)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", size)]})
        await send({"type": "http.response.body", "body": answer})


@contextlib.contextmanager
def serving(made: App) -> Iterator[App]:
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=made.server.run, kwargs={"sockets": [listener]})
    thread.start()
    made.config.port = listener.getsockname()[1]
    try:
        yield made
    finally:
        made.server.should_exit = True
        thread.join(deadline(10))


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    seconds = connection.HEAD_SECONDS
    connection.HEAD_SECONDS = deadline(0.5)
    with serving(App()) as made:
        yield made
    connection.HEAD_SECONDS = seconds


@pytest.fixture
def port(app: App) -> int:
    return app.config.port


@pytest.fixture
def raw(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=deadline(10)) as made:
        yield made


def ends_with(raw: socket.socket, end: bytes) -> bool:
    """Return True if the answer ends with an empty line and ``end``. Head and body may arrive separately."""
    answer = b""
    while not answer.endswith(b"\r\n\r\n" + end) and (more := raw.recv(4096)):
        answer += more
    return answer.endswith(b"\r\n\r\n" + end)


def is_ok(raw: socket.socket) -> bool:
    return ends_with(raw, b"ok")


def read_all(raw: socket.socket) -> bytes:
    return b"".join(iter(lambda: raw.recv(1 << 16), b""))


def status(answer: bytes) -> int:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}
    return int(head.split()[1])


def test_good_requests_pass_and_connections_are_kept(raw: socket.socket) -> None:
    for _ in range(3):
        for piece in (b"GET / HT", b"TP/1.1\r\nHost: localhost\r\nX-A: ", b"b\r\n\r", b"\n"):
            raw.sendall(piece)
            time.sleep(0.05)
        assert is_ok(raw)
        time.sleep(0.3)


def test_a_client_of_http_1_0_gets_no_chunks(port: int) -> None:
    for path, body in (("/pieces", b"one two"), ("/", b"ok")):
        with socket.create_connection(("127.0.0.1", port), timeout=deadline(10)) as raw:
            raw.sendall(f"GET {path} HTTP/1.0\r\nConnection: keep-alive\r\n\r\n".encode())
            head, _, found = read_all(raw).partition(b"\r\n\r\n")
        assert (found, b"chunked" in head, b"connection: close" in head) == (body, False, True)


def test_a_client_of_http_1_0_gets_one_answer(port: int) -> None:
    """HTTP/1.0 knows no 100 Continue. The connection ends after the first answer: a further request in the
    same bytes gets none, whatever its version."""
    first = b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc"
    for second in (b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=deadline(10)) as raw:
            raw.sendall(first + second)
            found = read_all(raw)
        assert found.startswith(b"HTTP/1.1 200 ")
        assert found.endswith(b"\r\n\r\n3")
        assert found.count(b"HTTP/1.1") == 1


def test_endless_headers(raw: socket.socket) -> None:
    raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: ")
    with pytest.raises(OSError):  # noqa: PT012 - the server closes somewhere in the loop
        for _ in range(10_000):
            raw.sendall(b"a" * 4096)
            time.sleep(0.001)


@pytest.mark.requirement("F3")
def test_headers_over_the_limit_are_answered(raw: socket.socket) -> None:
    raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * (connection.MAX_HEAD_BYTES - 1))
    assert status(read_all(raw)) == 431


@pytest.mark.requirement("F3")
def test_slow_headers(raw: socket.socket) -> None:
    start = time.monotonic()
    raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
    assert status(read_all(raw)) == 408
    assert time.monotonic() - start < deadline(5)


def test_silence(raw: socket.socket) -> None:
    assert read_all(raw) == b""


def test_what_is_not_http(raw: socket.socket) -> None:
    raw.sendall(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
    assert status(read_all(raw)) == 400


CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunks(length: int, size: int) -> bytes:
    data = b"%x\r\n%b\r\n" % (size, b"a" * size)
    return CHUNKED + data * (length // size) + b"0\r\n\r\n"


@pytest.mark.requirement("F3")
def test_many_headers(raw: socket.socket) -> None:
    raw.sendall(b"GET / HTTP/1.1\r\n" + b"a:\r\n" * connection.MAX_HEADERS + b"\r\n")
    assert is_ok(raw)
    raw.sendall(b"GET / HTTP/1.1\r\n" + b"a:\r\n" * (connection.MAX_HEADERS + 1) + b"\r\n")
    assert status(read_all(raw)) == 431


@pytest.mark.parametrize("size", [64, 1000, 100_000])
def test_a_body_in_chunks(raw: socket.socket, size: int) -> None:
    for _ in range(2):
        raw.sendall(chunks(2_000_000, size))
        assert ends_with(raw, b"%d" % (2_000_000 // size * size))


@pytest.mark.requirement("F3")
def test_a_body_that_is_mostly_framing(raw: socket.socket) -> None:
    raw.sendall(CHUNKED + b"1\r\na\r\n" * 14_000)
    assert status(read_all(raw)) == 400


@pytest.mark.requirement("F3")
def test_a_chunk_extension_that_does_not_end(raw: socket.socket) -> None:
    raw.sendall(CHUNKED + b"1;" + b"a" * (connection.MAX_FRAMING_BYTES + 1))
    assert status(read_all(raw)) == 400


def test_trailers_count_as_framing_and_are_dropped(raw: socket.socket) -> None:
    raw.sendall(CHUNKED + b"1\r\na\r\n0\r\nX-Trailer: b\r\n\r\n")
    assert ends_with(raw, b"1")
    raw.sendall(CHUNKED + b"0\r\n" + b"a: b\r\n" * (connection.MAX_FRAMING_BYTES // 6 + 1))
    assert status(read_all(raw)) == 400


def test_requests_sent_ahead_wait_as_bytes(app: App, raw: socket.socket) -> None:
    """All pipelined requests are answered in order, but only a few are parsed ahead."""
    count = 3000
    request = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b"
    sender = threading.Thread(
        target=lambda: raw.sendall(b"".join(request % (n % 100, b"a" * (n % 100)) for n in range(count)))
    )
    sender.start()
    answers, found = b"", []
    while len(found) < count:
        answers += raw.recv(1 << 16)
        found = re.findall(rb"\r\n\r\n(\d+?)(?=HTTP|$)", answers)
    sender.join(deadline(10))
    assert [int(body) for body in found] == [n % 100 for n in range(count)]
    assert app.most_waiting <= connection.PIECE // 18


@pytest.mark.parametrize("length", [b"-1", b"+1", b"1_0", b"9" * 40, b"1, 1", b"\xc2\xb2", b"0x1"])
def test_lengths_that_are_none(raw: socket.socket, length: bytes) -> None:
    raw.sendall(b"POST / HTTP/1.1\r\nContent-Length: " + length + b"\r\n\r\n")
    assert status(read_all(raw)) == 400


@pytest.mark.slow
def test_a_head_that_waits_behind_a_request_is_not_slow(app: App, raw: socket.socket) -> None:
    raw.sendall(b"POST / HTTP/1.1\r\nContent-Length: 1\r\n\r\n")
    time.sleep(3 * connection.HEAD_SECONDS)
    raw.sendall(b"a" + b"GET / HTTP/1.1\r\n\r\n")
    assert is_ok(raw)


def test_a_client_that_leaves_while_a_request_waits_is_noticed() -> None:
    with serving(App()) as app:
        with socket.create_connection(("127.0.0.1", app.config.port), timeout=deadline(10)) as raw:
            raw.sendall(b"GET /never HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n")
            assert app.asked.wait(deadline(10))
        assert app.left.wait(deadline(10))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (b"GET / HTTP/1.1\r\n\r\nPOST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n", b""),
        (b"POST /early HTTP/1.1\r\nContent-Length: 9\r\n\r\n1", b"23456789"),
    ],
    ids=["a body that was begun behind another request", "a body that came after its answer"],
)
def test_who_waits_for_its_client_makes_room(first: bytes, then: bytes) -> None:
    with serving(App(most=1)) as app:
        address = ("127.0.0.1", app.config.port)
        with socket.create_connection(address, timeout=deadline(10)) as raw:
            raw.sendall(first)
            assert is_ok(raw)
            raw.sendall(then)
            time.sleep(0.2)
            with socket.create_connection(address, timeout=deadline(10)) as other:
                other.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert is_ok(other)
            read_all(raw)


def test_who_makes_room_and_does_not_read_is_gone_at_once() -> None:
    with serving(App(most=1)) as app, socket.socket() as raw:
        address = ("127.0.0.1", app.config.port)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(deadline(10))
        raw.connect(address)
        raw.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        raw.recv(1)
        with socket.create_connection(address, timeout=deadline(10)) as other:
            other.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert is_ok(other)
        read = 0
        with contextlib.suppress(ConnectionError):
            read = len(read_all(raw))
        assert read < LARGE


class Unread:
    """A loop that runs down the timers of unread connections on request of the test."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.timers: list[tuple[asyncio.TimerHandle, Callable[[], None]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_later(self, seconds: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        timer = self._loop.call_later(seconds, callback, *args)
        if seconds == connection.UNREAD_SECONDS:
            self.timers.append((timer, functools.partial(callback, *args)))
        return timer

    def run_out(self) -> None:
        """Fire all timers that were not cancelled, in the loop's thread. Wait for the result."""

        def work() -> None:
            for timer, callback in self.timers:
                if not timer.cancelled():
                    timer.cancel()
                    callback()
            done.set()

        done = threading.Event()
        self._loop.call_soon_threadsafe(work)
        assert done.wait(deadline(10))


def test_how_long_a_client_does_not_read_is_counted_anew_for_each_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The timer of the first answer runs out when the client reads nothing of the second one yet."""
    monkeypatch.setattr(connection, "UNREAD_SECONDS", 3600.0)
    monkeypatch.setattr(connection, "WRITE_BUFFER", 1 << 30)
    loops: list[Unread] = []

    class Connection(connection.Connection):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.loop: Any = Unread(self.loop)
            loops.append(self.loop)

    with serving(App(connections=Connection)) as app, socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(deadline(10))
        raw.connect(("127.0.0.1", app.config.port))
        raw.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        read = len(raw.recv(1))
        until = time.monotonic() + deadline(10)
        while not loops[0].timers:
            assert time.monotonic() < until, "nobody watches whether the client reads"
            time.sleep(0.01)
        while read < LARGE:
            read += len(raw.recv(1 << 20))
        raw.sendall(b"GET /never HTTP/1.1\r\n\r\n")
        assert app.asked.wait(deadline(10))
        loops[0].run_out()
        while read < 3 * LARGE and (got := len(raw.recv(1 << 20))):
            read += got
        assert read >= 3 * LARGE


class _Quiet:
    def __init__(self) -> None:
        self.given_way = False

    def give_way(self) -> None:
        self.given_way = True


def test_who_makes_room() -> None:
    """A new connection closes the connection with the longest wait for its client, never a served
    connection.
    """
    every = Connections(lambda: 3)
    a, b, c, d, e, f = ones = [_Quiet() for _ in range(6)]
    assert all(every.opened(one) for one in (a, b, c))
    every.works(a)
    every.waits(b)
    for new, gone in ((d, {c}), (e, {c, b})):
        assert every.opened(new)
        assert {one for one in ones if one.given_way} == gone
    for one in (d, e):
        every.works(one)
    assert not every.opened(f)
    every.waits(f)  # the connection is being closed
    every.waits(a)
    assert every.opened(f)
    assert a.given_way
    every.closed(d)
    assert every.opened(b)
    assert not f.given_way


def test_the_limit_follows_the_engines() -> None:
    """After a scale-down, a new connection closes waiting ones until the lower limit holds."""
    most = 4
    every = Connections(lambda: most)
    ones = [_Quiet() for _ in range(5)]
    assert all(every.opened(one) for one in ones[:4])
    most = 2
    assert every.opened(ones[4])
    assert [one.given_way for one in ones] == [True, True, True, False, False]


def test_the_bound_on_what_is_sent_ahead() -> None:
    every = Connections()
    first, second = _Quiet(), _Quiet()
    assert every.holds(first, MOST_AHEAD)
    assert not every.holds(second, 1)
    assert every.holds(first, MOST_AHEAD - 1)
    every.closed(second)
    assert every.holds(first, MOST_AHEAD)
    every.closed(first)
    assert every.holds(second, MOST_AHEAD)


def test_the_bound_on_connections() -> None:
    assert most_connections(files=1024, requests=1000) == 768
    assert most_connections(files=1 << 16, requests=1000) == 8192
    assert most_connections(files=1 << 16, requests=10_000) == 20_000
