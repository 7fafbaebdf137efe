"""Heads of requests that are too long, too slow or no HTTP, byte by byte on a socket."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from weft.front import connection


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    seconds = connection.HEAD_SECONDS
    connection.HEAD_SECONDS = 0.5
    config = uvicorn.Config(app, http=connection.Connection, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(10)
    connection.HEAD_SECONDS = seconds


@pytest.fixture
def raw(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as made:
        yield made


def read_all(raw: socket.socket) -> bytes:
    return b"".join(iter(lambda: raw.recv(1 << 16), b""))


def status(answer: bytes) -> int:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}
    return int(head.split()[1])


def test_good_requests_pass_and_connections_are_kept(raw: socket.socket) -> None:
    for _ in range(3):
        for piece in (b"GET / HT", b"TP/1.1\r\nHost: x\r\nX-A: ", b"b\r\n\r", b"\n"):
            raw.sendall(piece)
            time.sleep(0.05)
        assert raw.recv(4096).endswith(b"ok")
        time.sleep(0.3)


def test_endless_headers(raw: socket.socket) -> None:
    raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-A: ")
    with pytest.raises(OSError):  # noqa: PT012 - the server closes somewhere in the loop
        for _ in range(10_000):
            raw.sendall(b"a" * 4096)
            time.sleep(0.001)


def test_headers_over_the_limit_are_answered(raw: socket.socket) -> None:
    raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * (connection.MAX_HEAD_BYTES - 1))
    assert status(read_all(raw)) == 431


def test_slow_headers(raw: socket.socket) -> None:
    start = time.monotonic()
    raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
    assert status(read_all(raw)) == 408
    assert time.monotonic() - start < 5


def test_silence(raw: socket.socket) -> None:
    assert read_all(raw) == b""


def test_what_is_not_http(raw: socket.socket) -> None:
    raw.sendall(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
    assert status(read_all(raw)) == 400
