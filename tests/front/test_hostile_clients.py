"""Clients that send slowly, too much or never read: whatever one of them does, others are served."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import httpx

ROUTE = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def connect(server: Any, *, receive_buffer: int | None = None) -> socket.socket:
    raw = socket.socket()
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.settimeout(20)
    raw.connect(("127.0.0.1", httpx.URL(server.url).port))
    return raw


@contextlib.contextmanager
def uploads(server: Any, count: int, length: int, data: bytes) -> Iterator[list[socket.socket]]:
    """Connections that announce a body of ``length`` bytes and send only ``data`` of it."""
    with contextlib.ExitStack() as opened:
        made = [opened.enter_context(connect(server)) for _ in range(count)]
        for raw in made:
            raw.sendall(ROUTE + b"Content-Length: %d\r\n\r\n" % length + data)
        yield made


def status(raw: socket.socket) -> int:
    """The status of the next answer on a connection."""
    return int(raw.recv(12).split()[1])


def ask_anew(server: Any) -> int:
    """The status of a small request on a connection of its own."""
    body = {"model": "fake", "prompt": "ab", "max_tokens": 2}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=20).status_code


def test_uploads_that_stall_take_no_place_in_the_queue(start_fake: Any) -> None:
    server = start_fake(max_num_seqs=2, max_queued_requests=2)
    with uploads(server, 10, 100, b"{"):
        # What these connections sent was read before this is answered: they are older.
        server.wait(lambda: server.http.get("/ready").status_code == 200)
        for _ in range(8):
            assert server.complete("ab", max_tokens=2).status_code == 200


def test_a_server_that_stops_refuses_before_it_reads_the_body(start_fake: Any, script: Any) -> None:
    server = start_fake()
    with server.stream(seed=script.HANG_AFTER):
        server.process.terminate()
        server.wait(lambda: server.http.get("/ready").status_code == 503)
        with uploads(server, 1, 100, b"{") as (raw,):
            assert status(raw) == 503
        server.process.terminate()


def test_uploads_that_stall_do_not_use_up_the_files(start_fake: Any) -> None:
    server = start_fake(files=(128, 1024))
    with uploads(server, 300, 100, b"{") as stalled:
        assert ask_anew(server) == 200
        stalled[0].sendall(b"}" + b" " * 98)
        assert status(stalled[0]) == 400


def test_the_connection_that_waits_longest_makes_room(start_fake: Any, script: Any) -> None:
    server = start_fake(files=(128, 128))
    with server.stream(seed=script.HANG_AFTER) as served:
        lines = served.iter_lines()
        next(lines)
        with uploads(server, 150, 100, b"{") as stalled:
            assert (
                httpx.post(server.url + "/v1/completions", json={"model": "fake", "prompt": "x"}).status_code
                == 200
            )
            assert status(stalled[0]) == 408
            stalled[-1].sendall(b"}" + b" " * 98)
            assert status(stalled[-1]) == 400
