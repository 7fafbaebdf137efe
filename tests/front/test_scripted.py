"""``weft serve --scripted``: recorded outputs over HTTP."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers import Running
from tests.support.slowness import deadline
from weft.common import env

Start = Callable[..., Running]


@pytest.mark.requirement("G20")
def test_outputs_are_played_streamed_and_not(start_scripted: Start, sse: Any) -> None:
    server = start_scripted(
        [
            {"match": "weather", "text": "It is sunny.", "num_cached": 5, "repeat": True},
            {"choices": [{"text": "one"}, {"text": "two"}]},
            {"text": "abcdef", "chunks": 2, "finish": "error"},
        ]
    )
    answer = server.chat("the weather?").json()
    assert answer["choices"][0]["message"]["content"] == "It is sunny."
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 5
    assert [one["text"] for one in server.complete("x", n=2).json()["choices"]] == ["one", "two"]
    with server.stream(messages=[{"role": "user", "content": "go"}]) as response:
        events = sse(response)
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in events[:-1]) == "abcdef"
    assert events[-1]["error"]["code"] == "script_error"
    refused = server.chat("go")
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "not_in_script"
    assert "which ends with" in refused.json()["error"]["message"]
    assert server.chat("weather again").status_code == 200


def test_a_request_without_room_is_sent_again_by_its_client(start_scripted: Start) -> None:
    server = start_scripted([{"error": "overloaded"}, {"error": "unavailable"}, {"text": "now"}])
    first, second, third = server.chat(), server.chat(), server.chat()
    assert (first.status_code, second.status_code, third.status_code) == (429, 503, 200)
    assert int(first.headers["retry-after"]) >= 1
    assert int(second.headers["retry-after"]) >= 1


def test_a_client_that_leaves_ends_its_sequence(start_scripted: Start) -> None:
    server = start_scripted([{"text": "a" * 1000, "delay_ms": 100, "repeat": True}])
    with server.stream() as response:
        lines = response.iter_lines()
        next(lines)
        server.wait(lambda: server.metric("num_requests_running") == 1)
    server.wait(lambda: server.metric("num_requests_running") == 0)


@pytest.mark.requirement("G20")
def test_two_fronts_play_one_script(start_scripted: Start) -> None:
    server = start_scripted([{"text": "again", "repeat": True}], "--fronts", "2")
    assert {server.chat().json()["choices"][0]["message"]["content"] for _ in range(6)} == {"again"}


def test_a_mistake_in_a_script_ends_the_server_with_its_line(tmp_path: Path) -> None:
    script = tmp_path / "bad.yaml"
    script.write_text("- text: fine\n- text: x\n  finish: later\n")
    command = [sys.executable, "-m", "weft", "serve", "--port", "0", "--scripted", str(script)]
    ended = subprocess.run(
        command, env=env.child_environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 2
    assert "weft: --scripted bad.yaml, entry 2 (line 2): Invalid enum value 'later'" in ended.stderr


@pytest.mark.slow
@pytest.mark.requirement("F47")
@pytest.mark.parametrize("fronts", ["1", "2"])
def test_sigterm_while_the_only_engine_drains_cuts_no_request_that_waits(
    start_scripted: Start, fronts: str
) -> None:
    """A planned restart waits for a long stream, and further requests wait for an engine.

    SIGTERM ends the restart. The engine then also answers the requests that wait.
    """
    server = start_scripted(
        [{"match": "long", "text": "a" * 600, "delay_ms": 100}, {"text": "short", "repeat": True}],
        *("--fronts", fronts, "--drain-timeout", str(deadline(60))),
    )
    with server.stream(messages=[{"role": "user", "content": "long"}]) as long, ThreadPoolExecutor(2) as pool:
        lines = long.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGUSR1)
        waits: Future[httpx.Response] | None = None
        until = time.monotonic() + deadline(6)
        while waits is None or waits.done():  # until the API server knows that the engine drains
            assert time.monotonic() < until
            waits = pool.submit(server.chat, "short")
            wait([waits], timeout=0.5)
        server.process.terminate()
        answer = waits.result(deadline(10))
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "short"
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.process.wait(deadline(20)) == 0
