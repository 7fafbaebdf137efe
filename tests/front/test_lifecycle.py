"""Start, drain and death, seen through live requests, probes and the exit status."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.common.errors import ConfigError, Overloaded, Unavailable
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.config.sections.front_section import FrontSection
from weft.front.front_server import bind, ready_text
from weft.front.lifecycle import Lifecycle, Phase

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.requirement("F30")
@pytest.mark.parametrize("stream", [False, True])
@mostly_slow("seed", ["HANG", "HANG_AFTER"], ["HANG_AFTER"])
def test_a_client_that_leaves_frees_its_sequences(fake: Any, script: Any, seed: str, stream: bool) -> None:
    body = {"model": "fake", "prompt": "x", "seed": getattr(script, seed), "n": 2, "stream": stream}
    before = fake.metric("num_preemptions_total")
    with httpx.Client(base_url=fake.url, timeout=deadline(0.5)) as client:
        if stream and seed == "HANG_AFTER":
            with client.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body)
    took = fake.wait(lambda: fake.metric("num_preemptions_total") == before + 2)
    assert took < deadline(1)
    fake.wait(lambda: fake.metric("num_requests_running") == 0)
    assert fake.metric("front_sequences") == 0


@pytest.mark.requirement("F47")
def test_sigterm_drains(start_fake: Any, script: Any, sse: Any) -> None:
    """A running stream is finished, a new request gets 503, and the exit status is 0."""
    server = start_fake()
    with server.stream(max_tokens=400) as running:
        lines = running.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        server.wait(lambda: server.http.get("/ready").status_code == 503)
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/live").status_code == 200
        refused = server.chat()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "unavailable"
        assert refused.headers["retry-after"]
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.process.wait(deadline(10)) == 0


@pytest.mark.requirement("F47")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_draining_has_a_deadline(start_fake: Any, script: Any, sse: Any, number: int) -> None:
    server = start_fake(drain_timeout=0.3)
    with server.stream(seed=script.HANG_AFTER) as running, concurrent.futures.ThreadPoolExecutor() as pool:
        whole = pool.submit(server.chat, seed=script.HANG)
        server.wait(lambda: server.metric("front_sequences") == 2)
        server.process.send_signal(number)
        assert sse(running)[-1]["error"]["code"] == "unavailable"
        assert whole.result(deadline(5)).status_code == 503
    assert server.process.wait(deadline(10)) == 0


@pytest.mark.requirement("F47")
def test_a_second_signal_stops_now(start_fake: Any, script: Any) -> None:
    server = start_fake()
    with server.stream(seed=script.HANG_AFTER) as running:
        lines = running.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(deadline(5)) == 130


def test_a_client_that_does_not_read_cannot_stop_the_stop(start_fake: Any, script: Any) -> None:
    server = start_fake(drain_timeout=0.3, constants={"weft.front.front_server.GRACE": 0.5})
    body = {"model": "fake", "prompt": "x", "seed": script.FLOOD, "max_tokens": 490, "stream": True}
    data = json.dumps({**body, "n": 16, "logprobs": 20}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", httpx.URL(server.url).port))
        raw.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        server.wait(lambda: server.metric("time_to_first_token_seconds_count") == 1)
        assert server.stop(seconds=12) == 0


@pytest.mark.requirement("F40")
@mostly_slow("death", ["DIE", "FAILED", "STUCK"], ["DIE"])
def test_a_dead_head_ends_everything(start_fake: Any, script: Any, sse: Any, death: str) -> None:
    """Every live request gets exactly one terminal answer, health fails, and the process exits non-zero."""
    server = start_fake(engine_timeout=deadline(1.0))
    with server.stream(max_tokens=480) as other, concurrent.futures.ThreadPoolExecutor() as pool:
        lines = other.iter_lines()
        next(lines)
        whole = pool.submit(server.chat, seed=script.HANG)
        server.wait(lambda: server.metric("front_sequences") == 2)  # a later request would get 503
        dying = pool.submit(lambda: server.chat(seed=getattr(script, death)))
        assert sse(lines)[-1]["error"]["code"] == "engine_dead"
        codes = {future.result(deadline(5)).json()["error"]["code"] for future in (whole, dying)}
        assert codes == {"engine_dead"}
        assert {future.result().status_code for future in (whole, dying)} == {500}
    with contextlib.suppress(httpx.TransportError):  # the server may have ended already
        assert server.http.get("/health").status_code == 503
    assert server.process.wait(deadline(10)) == 1


def test_phases() -> None:
    life = Lifecycle(capacity=lambda: 1)
    with pytest.raises(Unavailable), life.request():
        pass
    life.move(Phase.READY)
    life.move(Phase.STARTING)
    with life.request():
        assert life.active == 1
        with pytest.raises(Overloaded), life.request():
            pass
    assert life.active == 0
    life.move(Phase.DRAINING)
    with pytest.raises(Unavailable), life.request():
        pass
    life.move(Phase.READY)
    assert life.phase is Phase.DRAINING
    life.move(Phase.DEAD)
    with pytest.raises(Unavailable), life.request():
        pass


def test_a_port_that_is_taken_is_said_plainly() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as raised:
            bind("127.0.0.1", port)
    told = f"cannot listen on port {port} (address already in use); change --host or --port"
    assert raised.value.message == told


def test_the_ready_text() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        config = resolve(from_keywords({"served_model_name": "a'b"}))
        text = ready_text(listener, config, FrontSection(), chats=True)
        with pytest.raises(Exception, match=f"port {port}"):
            bind("127.0.0.1", port)
    first, second = text.splitlines()
    assert first == f"weft is ready: http://127.0.0.1:{port} model=a'b"
    assert second.startswith(f"try: curl http://127.0.0.1:{port}/v1/chat/completions -H")


def test_the_front_never_imports_torch() -> None:
    code = "import sys, weft.front.front_server; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=deadline(60), check=False).returncode
        == 0
    )
