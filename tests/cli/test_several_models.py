"""``weft serve`` with several models: a folder of four, with memory for two, and two on a command line."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes import serving_process, with_role
from tests.support.servers import Running, Servers
from tests.support.slowness import deadline

pytestmark = pytest.mark.slow

ADMIN = {"Authorization": "Bearer admin-key"}
SMALL = ("--threads", "1", "--max-num-seqs", "4", "--block-size", "16", "--kv-cache-memory", "4M")
TOKENS = 48


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    with made.scope():
        yield made


def stream(server: Running, model: str, prompt: str, asked: list[int] | None = None) -> tuple[str, str]:
    """Return (text, finish reason) of a streamed completion. ``asked``: gets the process that answers, of
    several API servers."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text, reason = "", ""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=deadline(240)) as answer:
        if asked is not None:
            port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
            asked.append(serving_process(port, with_role(server.process.pid, "front")) or 0)
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert answer.status_code == 200, lines
    assert lines[-1] == "[DONE]", lines
    for line in lines[:-1]:
        event: dict[str, Any] = json.loads(line)
        assert "error" not in event, event
        for choice in event["choices"]:
            text += choice["text"]
            reason = choice["finish_reason"] or reason
    return text, reason


@pytest.mark.parametrize("fronts", [1, 2])
def test_four_models_share_memory_for_two(
    servers: Servers, checkpoint: str, tmp_path: Path, fronts: int
) -> None:
    """Clients alternate over all models with streams: no stream ends early, each model gives the same text
    after each load, and the sum of the models stays within the limit. One of two API servers is killed: only
    its own streams break."""
    names = ["a", "b", "c", "d"]
    for name in names:
        shutil.copytree(checkpoint, tmp_path / "models" / name)
    flags = ("--models-dir", str(tmp_path / "models"), "--admin-key", "admin-key", *SMALL)
    # The first start only reads the estimate of the cost.
    sizing = servers.weft(*flags, "--models-memory", "1G", "--model-timeout", "240")
    cost = sizing.http.get("/admin/models", headers=ADMIN).json()["models"][0]["size"]
    sizing.close()
    budget = 2 * cost + cost // 2
    flags += ("--models-memory", str(budget), "--model-timeout", "240", "--fronts", str(fronts))
    server = servers.weft(*flags)
    over = threading.Event()
    seen: list[tuple[int, int]] = []

    def watch() -> None:
        while not over.is_set():
            # One API server is killed meanwhile.
            with (
                contextlib.suppress(httpx.TransportError),
                httpx.Client(base_url=server.url, headers=ADMIN, timeout=deadline(30)) as client,
            ):
                models = client.get("/admin/models").json()["models"]
                used = [one["size"] for one in models if one["state"] != "unloaded"]
                seen.append((sum(used), len(with_role(server.process.pid, "head"))))
            time.sleep(0.05)

    texts: dict[str, set[str]] = {name: set() for name in names}
    failures: list[BaseException] = []
    killed: list[int] = []
    broken: list[str] = []

    def client(first: int) -> None:
        try:
            for turn in range(4):
                name = names[(first + turn) % len(names)]
                asked: list[int] = []
                try:
                    text, reason = stream(server, name, f"{name} counts: 1 2 3", asked)
                except (httpx.TransportError, AssertionError):
                    # Before its headers a request waits at an unknown API server.
                    if killed and (not asked or asked[0] in (*killed, 0)):
                        broken.append(name)
                        continue
                    raise
                assert reason == "length"
                texts[name].add(text)
        except BaseException as error:
            failures.append(error)

    watcher = threading.Thread(target=watch)
    clients = [threading.Thread(target=client, args=(first,)) for first in range(3)]
    for one in (watcher, *clients):
        one.start()
    if fronts > 1:
        while not any(texts.values()):
            time.sleep(0.05)
        killed.append(with_role(server.process.pid, "front")[1])
        os.kill(killed[0], signal.SIGKILL)
    for one in clients:
        one.join()
    over.set()
    watcher.join()
    assert not failures, failures
    assert len(broken) <= 3 * len(killed), "each client had at most one request at the killed API server"
    assert all(len(each) == 1 for each in texts.values()), texts
    assert max(used for used, _ in seen) <= budget
    assert max(used for used, _ in seen) > budget - cost, "two models were never loaded together"
    assert max(engines for _, engines in seen) <= 2
    assert server.metric("model_loads_total") >= 4


def test_two_models_on_a_command_line(servers: Servers, checkpoint: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    server = servers.weft(checkpoint, str(other), *SMALL)
    names = [card["id"] for card in server.http.get("/v1/models").json()["data"]]
    assert names == [Path(checkpoint).name, "other"]
    both = [stream(server, name, "1 2 3") for name in names]
    assert both[0] == both[1], "equal checkpoints give equal text"
    # The path on the command line is a name, too.
    assert stream(server, str(other), "1 2 3") == both[0]
    assert server.http.get("/health").json()["models"] == dict.fromkeys(names, "loaded")


def test_the_disk_tier_keeps_the_cache_over_an_unload(
    servers: Servers, checkpoint: str, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    disk = ("--kv-disk", "64M", "--kv-disk-dir", str(tmp_path / "kv"), "--kv-store", "all")
    server = servers.weft(checkpoint, str(other), *SMALL, *disk, "--admin-key", "admin-key")

    def admin(what: str) -> dict[str, Any]:
        body = {"model": "other"}
        answer = server.http.post(f"/admin/models/{what}", json=body, headers=ADMIN, timeout=deadline(120))
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def cached() -> tuple[str, int]:
        body = {"model": "other", "prompt": "once upon a time " * 20, "max_tokens": 8, "temperature": 0}
        answer = server.http.post("/v1/completions", json=body, timeout=deadline(120)).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    first = cached()
    assert first[1] == 0
    admin("unload")
    until = time.monotonic() + deadline(30)
    while server.http.get("/health").json()["models"]["other"] != "unloaded":
        assert time.monotonic() < until
        time.sleep(0.1)
    admin("load")
    again = cached()
    assert again[0] == first[0]
    assert again[1] >= 256, "the blocks on disk outlive the engine process"
