"""``weft serve --kv-disk``: a conversation goes on after a restart without being computed again."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.test_serve import start
from tests.support.slowness import deadline

__all__ = ["start"]

PROMPT = [3 + i % 250 for i in range(300)]


def ask(base: str) -> tuple[list[int], float, int]:
    """Return (tokens, logprob of the last token, cached tokens) of one turn of a session."""
    with httpx.Client(base_url=base, timeout=deadline(60)) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 1}
        body |= {"ignore_eos": True, "return_token_ids": True}
        answer = client.post("/v1/completions", json=body, headers={"x-session-id": "chat"}).json()
    choice = answer["choices"][0]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"][-1], cached


def metric(base: str, name: str) -> float:
    page = httpx.get(f"{base}/metrics", timeout=deadline(30)).text
    lines = [line for line in page.splitlines() if line.startswith(f"weft:{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.slow
def test_a_restarted_server_goes_on(checkpoint: str, start: Any, tmp_path: Path) -> None:
    """SIGTERM writes the last blocks; the next server loads, and makes the same tokens and logprobs. A flush
    removes the blocks."""
    flags = ("--port", "0", "--kv-disk", "64M", "--kv-disk-dir", str(tmp_path / "kv"), "--admin-key", "admin")
    first = start(checkpoint, *flags)
    tokens, logprob, cached = ask(first.url())
    assert cached == 0
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(deadline(60)) == 0
    base = start(checkpoint, *flags).url()
    assert ask(base) == (tokens, logprob, 256)
    assert metric(base, "prompt_tokens_saved_total") == 256
    headers = {"authorization": "Bearer admin"}
    with httpx.Client(base_url=base, headers=headers, timeout=deadline(30)) as client:
        refused = client.post("/admin/cache/flush", json={})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "all")
        done = client.post("/admin/cache/flush", json={"session": "chat"})
        assert (done.status_code, done.json()["status"]) == (200, "flush requested")
    assert ask(base) == (tokens, logprob, 0)


@pytest.mark.slow
def test_a_killed_server_loses_no_conversation(checkpoint: str, start: Any, tmp_path: Path) -> None:
    """Drill: kill -9 after a turn, and kill -9 while the next turn runs. Each next server loads the blocks
    that were complete, and makes the same tokens and logprobs."""
    flags = ("--port", "0", "--kv-disk", "64M", "--kv-disk-dir", str(tmp_path / "kv"))
    first = start(checkpoint, *flags)
    base = first.url()
    tokens, logprob, _ = ask(base)
    until = time.monotonic() + deadline(30)
    while metric(base, "kv_stores_total") < len(PROMPT) // 64:
        assert time.monotonic() < until
        time.sleep(0.05)
    first.process.kill()
    assert first.process.wait(deadline(60)) == -signal.SIGKILL
    second = start(checkpoint, *flags)
    assert ask(second.url()) == (tokens, logprob, 256)
    # A turn is under way when the server is killed, and stores may be.
    body = {"prompt": PROMPT[::-1], "max_tokens": 200, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=second.url(), timeout=deadline(60)) as client,
        client.stream("POST", "/v1/completions", json=body, headers={"x-session-id": "chat"}) as answer,
    ):
        next(answer.iter_lines())
        second.process.kill()
        second.process.wait(deadline(60))
    assert ask(start(checkpoint, *flags).url()) == (tokens, logprob, 256)
