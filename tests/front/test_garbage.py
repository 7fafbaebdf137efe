"""The objects of an answered request are free at once, without the garbage collector.

A request in a cycle of references keeps its body in memory until the collector runs. The API server collects
rarely, so bodies of megabytes would add up.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import Running
from tests.support.slowness import deadline

MESSAGES = [{"role": "user", "content": "hello"}]
NATIVE = {"options": {"num_predict": 3}}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "n": 2}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 3}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 3}),
    ("/v1/responses", {"input": [{"type": "message", **MESSAGES[0]}], "max_output_tokens": 3}),
    ("/api/chat", {"messages": MESSAGES, **NATIVE}),
    ("/api/generate", {"prompt": "hello", **NATIVE}),
    ("/inference/v1/generate", {"token_ids": [3, 4], "sampling_params": {"max_tokens": 3}}),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("garbage") / "types.json"


@pytest.fixture(scope="module")
def watched(start_fake: Any, told: Path) -> Iterator[Running]:
    return start_fake(garbage=str(told))


def collected(server: Running, told: Path) -> list[str]:
    """Return the types of the objects that only the garbage collector could free."""
    told.unlink(missing_ok=True)
    os.kill(server.process.pid, signal.SIGUSR1)
    until = time.monotonic() + deadline(10)
    while not told.exists():
        assert time.monotonic() < until, "the server did not collect in time"
        time.sleep(0.01)
    made: list[str] = json.loads(told.read_text())
    return made


def test_answered_requests_leave_no_cycle(watched: Running, told: Path) -> None:
    def ask() -> None:
        for path, body in REQUESTS:
            for stream in (False, True):
                answer = watched.http.post(path, json={"model": watched.model, "stream": stream, **body})
                assert answer.status_code == 200, (path, answer.text)

    ask()  # the first requests import modules and compile regular expressions
    collected(watched, told)
    ask()
    assert collected(watched, told) == []
