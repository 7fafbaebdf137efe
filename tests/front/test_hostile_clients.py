"""Clients that send slowly, too much or never read: whatever one of them does, others are served."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from tests.support.processes import children
from tests.support.slowness import deadline
from tests.support.text_folders import write_tokenizer
from weft.common.errors import Overloaded, RequestTimeout
from weft.front.http import body
from weft.front.http.body import Bodies, read_json

ROUTE = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PATIENT = {"weft.front.http.body.STALL_TIMEOUT": 60.0}


def connect(server: Any, *, receive_buffer: int | None = None) -> socket.socket:
    raw = socket.socket()
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.settimeout(deadline(20))
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


def ended(connections: list[socket.socket]) -> list[socket.socket]:
    """Return the connections with an answer to read, and the closed connections."""
    return select.select(connections, [], [], 0)[0]


def ask_anew(server: Any) -> int:
    """The status of a small request on a connection of its own."""
    asked = {"model": "fake", "prompt": "ab", "max_tokens": 2}
    return httpx.post(server.url + "/v1/completions", json=asked, timeout=deadline(20)).status_code


@pytest.mark.requirement("F3")
def test_uploads_that_stall_take_no_place_in_the_queue(start_fake: Any) -> None:
    server = start_fake(max_num_seqs=2, max_queued_requests=2)
    with uploads(server, 10, 100, b"{"):
        # The connections are older than this request, so the server has read their bytes before the answer.
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


@pytest.mark.requirement("F3")
def test_uploads_that_stall_do_not_use_up_the_files(start_fake: Any) -> None:
    server = start_fake(files=(128, 1024), constants=PATIENT)
    with uploads(server, 300, 100, b"{") as stalled:
        assert ask_anew(server) == 200
        stalled[0].sendall(b"}" + b" " * 98)
        assert status(stalled[0]) == 400


def test_the_connection_that_waits_longest_makes_room(start_fake: Any, script: Any) -> None:
    server = start_fake(files=(128, 128), constants=PATIENT)
    with server.stream(seed=script.HANG_AFTER) as served:
        lines = served.iter_lines()
        next(lines)
        with uploads(server, 150, 100, b"{") as stalled:
            assert ask_anew(server) == 200
            server.wait(lambda: len(ended(stalled)) >= 150 - 96)
            assert stalled[0] in ended(stalled)
            stalled[-1].sendall(b"}" + b" " * 98)
            assert status(stalled[-1]) == 400
        server.wait(lambda: server.metric("front_sequences") == 1)


@pytest.mark.slow
@pytest.mark.requirement("F3")
def test_a_body_must_make_progress(start_fake: Any) -> None:
    stall = deadline(1.0)
    server = start_fake(constants={"weft.front.http.body.STALL_TIMEOUT": stall})
    with uploads(server, 2, 100, b"{") as (silent, slow):
        for _ in range(5):
            time.sleep(stall / 2)
            slow.sendall(b" ")
        assert status(silent) == 408
        slow.sendall(b" " * 94)
        assert status(slow) == 400


@pytest.mark.requirement("F3")
def test_the_memory_of_bodies_is_bounded(start_fake: Any) -> None:
    """If the memory is full, the first stalled uploads end. Small requests and moving uploads are served."""
    limit, memory = 1 << 20, 8 << 20
    server = start_fake(max_request_bytes=limit, constants={**PATIENT, "weft.front.http.body.MEMORY": memory})
    fits = memory // (limit * 3 // 4)
    with uploads(server, 40, limit, b" " * (limit * 3 // 4)) as stalled:
        server.wait(lambda: len(ended(stalled)) >= 40 - fits, 20)
        for _ in range(20):
            assert ask_anew(server) == 200
        whole = json.dumps({"model": "fake", "prompt": "ab", "max_tokens": 2}).encode().ljust(limit)
        headers = {"content-type": "application/json"}
        assert server.http.post("/v1/completions", content=whole, headers=headers).status_code == 200
        (left, *others) = [raw for raw in stalled if raw not in ended(stalled)]
        assert len(others) >= 3
        left.sendall(b" " * (limit // 4))
        assert status(left) == 400


@pytest.mark.slow
def test_small_bodies_have_memory_of_their_own(start_fake: Any) -> None:
    """Many small uploads that stall end when they are too many, longest without progress first."""
    server = start_fake(
        max_request_bytes=1 << 20, constants={**PATIENT, "weft.front.http.body.MEMORY": 4 << 20}
    )
    with uploads(server, 30, 100_000, b" " * 50_000) as stalled:
        assert status(stalled[0]) == 408
        for _ in range(20):
            assert ask_anew(server) == 200
        stalled[-1].sendall(b" " * 50_000)
        assert status(stalled[-1]) == 400


@pytest.mark.requirement("F31")
def test_memory_that_is_full_of_whole_bodies() -> None:
    """There is nobody to end: the next one is refused, and is served when one of them has been parsed."""

    async def run() -> None:
        bodies = Bodies(limit=1000, memory=400)
        async with asyncio.timeout(10) as timeout:
            with bodies.upload() as first, bodies.upload() as second:
                first.begin(timeout)
                first.grow(90)
                first.complete()
                second.begin(timeout)
                second.grow(10)
                with pytest.raises(Overloaded):
                    second.grow(1)
                assert not first.ended
            with bodies.upload() as third:
                third.begin(timeout)
                third.grow(100)

    asyncio.run(run())


def test_what_whole_bodies_refer_to_counts() -> None:
    """Together they have a bounded memory; uploads that stall make room for them."""

    async def run() -> None:
        bodies = Bodies(limit=1000, memory=400)
        async with asyncio.timeout(10) as timeout:
            with bodies.upload() as stalled, bodies.upload() as first, bodies.upload() as second:
                for upload in (stalled, first, second):
                    upload.begin(timeout)
                    upload.grow(10)
                    if upload is not stalled:
                        upload.complete()
                first.hold(80)
                assert stalled.ended
                assert bodies.small.used == 100
                with pytest.raises(Overloaded):
                    second.hold(80)
            assert bodies.small.used == 0
            with bodies.upload() as third:
                third.hold(100)

    asyncio.run(run())


def test_an_upload_that_was_ended_is_no_body() -> None:
    """Also where the rest of it came in the same moment."""

    async def test() -> None:
        bodies = Bodies(1000, memory=1600)
        chunks: asyncio.Queue[Any] = asyncio.Queue()
        scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}
        with bodies.upload() as first, bodies.upload() as second:
            reading = asyncio.create_task(read_json(Request(scope, chunks.get), first))
            await chunks.put({"type": "http.request", "body": b" " * 300, "more_body": True})
            while not bodies.small.used:
                await asyncio.sleep(0)
            chunks.put_nowait({"type": "http.request", "body": b"{}", "more_body": False})
            second.begin(asyncio.timeout(None))
            second.grow(300)
            with pytest.raises(RequestTimeout):
                await reading

    asyncio.run(test())


@pytest.mark.parametrize("rate", [1 << 4, 1 << 40])
def test_a_body_may_take_longer_the_more_of_it_came(rate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than bodies have at least: where enough came, the rest is waited for; else it is late."""
    monkeypatch.setattr(body, "BODY_TIMEOUT", 0.01)
    monkeypatch.setattr(body, "LEAST_RATE", rate)

    async def test() -> list[bytes]:
        chunks: asyncio.Queue[Any] = asyncio.Queue()
        scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}
        chunks.put_nowait({"type": "http.request", "body": b" " * 60_000, "more_body": True})
        with Bodies(100_000).upload() as upload:
            reading = asyncio.create_task(read_json(Request(scope, chunks.get), upload))
            await asyncio.sleep(0.1)
            chunks.put_nowait({"type": "http.request", "body": b"{}", "more_body": False})
            return await reading

    if rate == 1 << 4:
        assert b"".join(asyncio.run(test())).endswith(b" {}")
    else:
        with pytest.raises(RequestTimeout):
            asyncio.run(test())


def test_a_stream_that_has_begun_is_not_refused(start_fake: Any, script: Any) -> None:
    """When much text work waits, new requests get 429, and what was admitted goes on."""
    server = start_fake(max_num_seqs=64, constants={"weft.front.requests.context.TEXT_QUEUE": 1})
    asked = {"model": "fake", "prompt": "ab", "seed": script.FLOOD, "max_tokens": 300, "logprobs": 20}

    async def stream(client: httpx.AsyncClient) -> str:
        while True:
            answer = await client.post("/v1/completions", json={**asked, "stream": True})
            if answer.status_code != 429:
                return answer.text

    async def test() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=deadline(30)) as client:
            return await asyncio.gather(*(stream(client) for _ in range(8)))

    for text in asyncio.run(test()):
        assert text.endswith("data: [DONE]\n\n")
        assert '"error"' not in text


LOOPS = "{% set r = range(60000) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}"


@pytest.mark.requirement("F19")
@pytest.mark.slow
def test_a_template_that_loops_holds_up_nobody(start_scripted: Any, tmp_path: Path) -> None:
    """Chats of a model whose template does not end are refused in time, and other requests are answered
    meanwhile.
    """
    write_tokenizer(tmp_path, template=LOOPS)
    server = start_scripted([{"text": "hello", "repeat": True}], "--tokenizer", str(tmp_path))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        body = {"model": server.model, "messages": [{"role": "user", "content": "hi"}]}
        url, patience = f"{server.url}/v1/chat/completions", deadline(60)
        chats = [pool.submit(httpx.post, url, json=body, timeout=patience) for _ in range(4)]
        beside = 0
        while not all(chat.done() for chat in chats):
            assert server.complete("ab", max_tokens=5).json()["choices"][0]["text"] == "hello"
            assert server.http.get("/health").status_code == 200
            beside += 1
    for chat in chats:
        assert chat.result().status_code == 400
        assert "template" in chat.result().json()["error"]["message"]
    assert beside, "who asked meanwhile was answered meanwhile"


def test_grammars_that_take_long_hold_nobody_up(start_fake: Any) -> None:
    """Neither requests without one, nor such as have one that was compiled."""
    server = start_fake()
    quick = {"model": "fake", "prompt": "ab", "max_tokens": 2, "guided_regex": "a+"}
    assert httpx.post(server.url + "/v1/completions", json=quick, timeout=deadline(20)).status_code == 200
    with contextlib.ExitStack() as opened:
        waiting = []
        for first in "abc":  # more than there are threads
            parts = [{"type": "string", "pattern": f"{first}.*{chr(97 + n)}.*"} for n in range(26)]
            slow = json.dumps({"model": "fake", "prompt": "ab", "guided_json": {"allOf": parts}}).encode()
            waiting.append(opened.enter_context(connect(server)))
            waiting[-1].sendall(ROUTE + b"Content-Length: %d\r\n\r\n" % len(slow) + slow)
        time.sleep(0.5)
        assert ask_anew(server) == 200
        assert httpx.post(server.url + "/v1/completions", json=quick, timeout=deadline(20)).status_code == 200
        assert not ended(waiting), "they are still being compiled"
        for pid in (server.process.pid, *children(server.process.pid)):
            os.kill(pid, signal.SIGKILL)  # the server would finish the compiles before the end
