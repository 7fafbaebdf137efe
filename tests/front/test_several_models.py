"""Several models behind one server, over scripted engines: names, keys, loads, unloads and waiting."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.processes import with_role
from tests.support.servers import Running, Servers
from tests.support.slowness import deadline, until
from weft.front.requests.model_files import files_of

Start = Callable[..., Running]
ADMIN = {"Authorization": "Bearer admin-key"}


def starter(servers: Servers, tmp_path_factory: pytest.TempPathFactory, fronts: int) -> Start:
    """Return a function that starts ``weft up`` with scripted models: name -> keys of its entry, and the keys
    of ``front``. Each model answers with its own name, or with the entry ``says``."""

    def begin(models: dict[str, dict[str, Any]], folder: Path | None = None, **front: Any) -> Running:
        folder = folder or tmp_path_factory.mktemp("models")
        written: dict[str, Any] = {"front": {"port": 0, "fronts": fronts, **front}, "model": "spool-text"}
        written["models"] = {}
        for name, entry in models.items():
            script = folder / f"{name}.jsonl"
            says = entry.pop("says", {"text": f"I am {name}", "repeat": True})
            script.write_text(json.dumps(says) + "\n")
            written["models"][name] = {"scripted": str(script), **entry}
        file = folder / "topology.yaml"
        file.write_text(yaml.safe_dump(written))
        file.chmod(0o600)
        program = "from weft.cli.main import main; main()"
        command = [sys.executable, "-c", program, "up", str(file)]
        return servers.start(command, 120.0, HF_HUB_OFFLINE="1", WEFT_ADMIN_KEY="admin-key")

    return begin


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def start(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Start:
    """Return a function that starts a server: see ``starter``. All tests run with one API server and with
    two."""
    return starter(servers, tmp_path_factory, request.param)


def ask(server: Running, model: str | None, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "who?"}], **fields}
    if model is not None:
        body["model"] = model
    with httpx.Client(base_url=server.url, timeout=deadline(60)) as client:
        return client.post("/v1/chat/completions", json=body)


def says(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def states(server: Running) -> dict[str, str]:
    return {one["name"]: one["state"] for one in listed(server)}


def listed(server: Running) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = server.http.get("/admin/models", headers=ADMIN).json()["models"]
    return models


@contextlib.contextmanager
def stopped(server: Running) -> Iterator[None]:
    """Stop all engines for a while: no stream ends meanwhile, on any machine."""
    engines = with_role(server.process.pid, "head")
    for pid in engines:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in engines:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def admin(server: Running, what: str, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, **fields}
    return server.http.post(f"/admin/models/{what}", json=body, headers=ADMIN)


def test_each_request_goes_to_the_model_that_it_names(start: Start) -> None:
    server = start({"a": {"aliases": ["first"]}, "b": {"load": "demand"}}, api_key=["open", "only-b:b"])
    server.http.headers["Authorization"] = "Bearer open"
    key = {"Authorization": "Bearer open"}

    def chat(model: str | None, headers: dict[str, str] = key, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "who?"}], "model": model, **fields}
        return server.http.post("/v1/chat/completions", json=body, headers=headers)

    # Probes have no key, so they tell no names of models.
    assert server.http.get("/health").json() == {"status": "alive"}
    assert states(server) == {"a": "loaded", "b": "unloaded"}
    assert says(chat("a")) == says(chat("first")) == "I am a"
    assert says(chat("b")) == "I am b"
    assert server.http.get("/ready").json() == {"status": "ready"}
    unknown = chat("c")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert unknown.json()["error"]["message"].endswith("GET /v1/models lists the models")
    missing = chat(None)
    assert missing.status_code == 400
    assert missing.json()["error"]["message"] == "model is required: this server has the models a, b"
    # A body above 64 KiB is not parsed twice; the name in front counts, and is checked again by the reader.
    assert says(chat("b", metadata={"x": "y"}, user="u" * 100)) == "I am b"
    cards = server.http.get("/v1/models").json()["data"]
    assert [(card["id"], card["status"]) for card in cards] == [("a", "loaded"), ("b", "loaded")]
    assert server.http.get("/v1/models/first").json()["id"] == "a"
    assert server.http.post("/tokenize", json={"model": "b", "prompt": "x"}).status_code == 200
    # A key that names models sees no other model, and its only model is the default.
    less = {"Authorization": "Bearer only-b"}
    assert says(chat(None, less)) == "I am b"
    assert chat("a", less).status_code == 404
    assert [card["id"] for card in server.http.get("/v1/models", headers=less).json()["data"]] == ["b"]
    # Ollama's routes
    assert [one["name"] for one in server.http.get("/api/tags").json()["models"]] == ["a", "b"]
    assert [one["name"] for one in server.http.get("/api/ps", headers=less).json()["models"]] == ["b"]
    body = {"model": "b:latest", "messages": [{"role": "user", "content": "who?"}], "stream": False}
    assert server.http.post("/api/chat", json=body).json()["message"]["content"] == "I am b"
    assert server.http.post("/api/generate", json={"model": "a"}).json()["done_reason"] == "load"
    assert "completion" in server.http.post("/api/show", json={"model": "a:latest"}).json()["capabilities"]
    assert server.http.post("/api/show", json={"model": "c"}).status_code == 404
    assert server.http.post("/api/show", json={"model": "a", "x": "y" * 20000}).status_code == 413
    # Times and names that no number and no text can have
    assert says(chat("a", keep_alive=1e308)) == "I am a"
    assert [one["name"] for one in server.http.get("/api/ps").json()["models"]] == ["a", "b"]
    raw = {**key, "content-type": "application/json"}
    for body in (
        b'{"model": "a", "keep_alive": %s}' % (b"9" * 400),
        b'{"model": "\\q", "x": "%s"}' % (b"y" * 70000),
    ):
        assert server.http.post("/v1/chat/completions", content=body, headers=raw).status_code == 400
    page = server.http.get("/metrics").text
    good = re.findall(r'weft:request_success_total{.*finished_reason="stop",.*model_name="a"} (.*)', page)
    assert sum(map(float, good)) == 3.0
    assert 'weft:model_state{model_name="b",state="loaded"} 1.0' in page
    assert page.count("# TYPE weft:http_requests_total ") == 1
    groups = server.http.get("/admin/groups", headers=ADMIN).json()["engines"]
    assert [one["model"] for one in groups] == ["a", "b"]
    restarted = server.http.post("/admin/restart", json={}, headers=ADMIN)
    assert (restarted.status_code, "name one of a, b" in restarted.text) == (400, True)
    # Operators unload, load and pin.
    assert admin(server, "unload", "b").json()["state"] in ("draining", "unloaded")
    until(lambda: states(server)["b"] == "unloaded")
    # Ollama's unload does not load the model first.
    stopped = server.http.post("/api/generate", json={"model": "b", "keep_alive": 0})
    assert (stopped.json()["done_reason"], states(server)["b"]) == ("unload", "unloaded")
    assert admin(server, "load", "b", keep_alive="5m").json()["state"] == "loaded"
    assert 290 < listed(server)[1]["expires_in"] <= 300
    assert admin(server, "pin", "b").json()["expires_in"] is None
    assert admin(server, "load", "nobody").status_code == 404
    assert server.http.post("/admin/models/load", json={"model": "a"}).status_code == 401


def test_models_share_the_memory_and_an_unload_ends_no_stream(start: Start) -> None:
    slow = {"text": "x" * 40, "delay_ms": 50, "repeat": True}
    models: dict[str, dict[str, Any]] = {name: {"memory": "1G"} for name in "abc"}
    models["a"]["says"] = slow
    server = start(models, models_memory="1G")
    assert states(server) == dict.fromkeys("abc", "unloaded")
    ends: list[str] = []

    def stream() -> None:
        with server.stream(model="a") as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: {")]
        ends.extend(json.loads(lines[-1][6:])["choices"][0]["finish_reason"] for _ in range(1))

    thread = threading.Thread(target=stream)
    thread.start()
    until(lambda: listed(server)[0]["running"] == 1)
    # An operator's unload drains: the stream goes on, and b loads behind it.
    assert admin(server, "unload", "a").json()["state"] == "draining"
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(ask, server, "b")
        until(lambda: listed(server)[1]["waiting"] == 1 or waits.done())
        assert says(waits.result()) == "I am b"
    thread.join()
    assert ends == ["stop"]
    assert states(server) == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
    assert server.metric("model_memory_bytes") == 1 << 30
    # keep_alive: 0 makes room at once.
    assert says(ask(server, "b", keep_alive=0)) == "I am b"
    assert says(ask(server, "c")) == "I am c"
    assert ask(server, "c", keep_alive="soon").status_code == 400


def test_a_model_that_does_not_load_fails_its_requests_alone(start: Start, tmp_path: Path) -> None:
    server = start({"a": {}, "b": {"load": "demand"}}, tmp_path, engine_restarts=0)
    (tmp_path / "b.jsonl").unlink()  # so that the engine cannot start
    refused = ask(server, "b")
    assert refused.status_code == 503, refused.text
    assert refused.json()["error"]["message"].startswith("the model b cannot be used now")
    assert says(ask(server, "a")) == "I am a"
    health = server.http.get("/health").json()
    assert health == {"status": "degraded", "models": {"a": "loaded", "b": "unloaded"}}
    assert "b" in listed(server)[1]["failure"]


@pytest.mark.slow
def test_a_model_whose_engine_dies_loads_again_on_demand(start: Start) -> None:
    server = start({"a": {}, "b": {}}, engine_restarts=0)
    engines = with_role(server.process.pid, "head")
    assert len(engines) == 2
    for pid in engines:
        os.kill(pid, signal.SIGKILL)
    until(lambda: set(states(server).values()) == {"unloaded"})
    refused = ask(server, "a")
    assert refused.status_code == 503
    assert server.http.get("/health").json()["status"] == "degraded"
    until(lambda: ask(server, "a").status_code == 200)
    assert says(ask(server, "b")) == "I am b"
    assert server.http.get("/health").json()["status"] == "alive"


@pytest.mark.slow
def test_a_request_waits_at_most_the_timeout_of_models(start: Start) -> None:
    slow = {"text": "x" * 100, "delay_ms": 100, "repeat": True}
    models: dict[str, dict[str, Any]] = {name: {"memory": "1G"} for name in "ab"}
    models["a"]["says"] = slow
    models["a"]["load"] = "start"
    server = start(models, models_memory="1G", model_timeout=2.0)
    with server.stream(model="a") as response:
        lines = response.iter_lines()
        next(lines)
        began = time.monotonic()
        late = ask(server, "b")
        assert time.monotonic() - began < deadline(8)
        assert late.status_code == 503
        assert "--model-timeout" in late.json()["error"]["message"]
        assert int(late.headers["retry-after"]) > 5, "the hysteresis and the load"
        assert listed(server)[0]["running"] == 1


@pytest.mark.slow
def test_the_server_ends_while_requests_wait_for_a_model(start: Start) -> None:
    slow = {"text": "x" * 60, "delay_ms": 100, "repeat": True}
    models: dict[str, dict[str, Any]] = {name: {"memory": "1G"} for name in "ab"}
    models["a"]["says"] = slow
    server = start(models, models_memory="1G")
    with server.stream(model="a") as response, ThreadPoolExecutor(1) as pool:
        lines = response.iter_lines()
        next(lines)
        waits = pool.submit(ask, server, "b")
        until(lambda: listed(server)[1]["waiting"] == 1)
        server.process.send_signal(signal.SIGTERM)
        late = waits.result()
        assert (late.status_code, "shutting down" in late.text) == (503, True)
        assert "data: [DONE]" in list(lines), "the running request ends by itself"
    assert server.process.wait(deadline(20)) == 0


@pytest.mark.slow
def test_a_pause_holds_all_models_also_one_that_is_loaded_meanwhile(start: Start) -> None:
    server = start({"a": {}, "b": {"load": "demand"}})
    assert says(ask(server, "a")) == "I am a"
    assert server.http.post("/pause?mode=wait", headers=ADMIN).json() == {"status": "paused"}
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, server, name) for name in "ab"]
        until(lambda: states(server)["b"] == "loaded")
        time.sleep(0.3)
        assert not any(one.done() for one in asked)
        ready = server.http.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "paused"})
        reset = server.http.post("/reset_prefix_cache", json={"model": "b"}, headers=ADMIN)
        assert reset.json() == {"status": "reset", "blocks": 0}
        assert server.http.post("/resume", headers=ADMIN).status_code == 200
        assert [says(one.result()) for one in asked] == ["I am a", "I am b"]


@pytest.mark.slow
def test_a_client_that_goes_waits_no_longer(start: Start) -> None:
    slow = {"text": "x" * 60, "delay_ms": 500, "repeat": True}
    models: dict[str, dict[str, Any]] = {name: {"memory": "1G"} for name in "ab"}
    models["a"]["says"] = slow
    server = start(models, models_memory="1G")
    with server.stream(model="a") as response:
        lines = response.iter_lines()
        next(lines)
        body = {"model": "b", "messages": [{"role": "user", "content": "who?"}]}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=1.0)
        until(lambda: listed(server)[1]["waiting"] == 0)
        assert listed(server)[0]["running"] == 1


def test_facts_of_a_model_follow_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 10)
    before = files_of(str(tmp_path))
    assert before[0] == 10
    (tmp_path / "model.safetensors").write_bytes(b"x" * 20)
    after = files_of(str(tmp_path))
    assert (after[0], after[2] != before[2]) == (20, True)


# -- batches


def line_of(name: str, model: str) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": name}]}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def begin_batch(server: Running, lines: list[dict[str, Any]]) -> str:
    """Upload lines and return the id of their batch."""
    data = "".join(json.dumps(one) + "\n" for one in lines).encode()
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", data)}}
    file = server.http.post("/v1/files", **form).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch: str = server.http.post("/v1/batches", json=asked).json()["id"]
    return batch


def batch_of(server: Running, batch: str) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get(f"/v1/batches/{batch}").json()
    return found


def answers(server: Running, batch: str) -> dict[str, str]:
    """Return custom_id -> text of the outputs of an ended batch. No line has two outputs."""
    name = batch_of(server, batch)["output_file_id"]
    found = [json.loads(one) for one in server.http.get(f"/v1/files/{name}/content").text.splitlines()]
    made = {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in found}
    assert len(made) == len(found)
    return made


@pytest.mark.slow
def test_lines_of_a_batch_load_their_models_and_yield_to_requests(start: Start, tmp_path: Path) -> None:
    slow = {"text": "one two three four", "repeat": True, "delay_ms": 60_000}
    models: dict[str, dict[str, Any]] = {
        "a": {"load": "demand", "memory": "1G"},
        "b": {"load": "demand", "memory": "1G"},
        "slow": {"load": "demand", "memory": "1G", "says": slow},
        "online": {"load": "demand", "memory": "2G"},
    }
    server = start(models, tmp_path, batch_dir=str(tmp_path / "batches"), models_memory="2.5G")
    mixed = begin_batch(server, [line_of(f"{name}{n}", name) for n in range(20) for name in ("a", "b")])
    until(lambda: batch_of(server, mixed)["status"] == "completed")
    assert answers(server, mixed) == {f"{name}{n}": f"I am {name}" for n in range(20) for name in ("a", "b")}
    assert server.metric("model_loads_total") == 2, "lines are grouped by model"
    assert server.metric("batch_lines_total") == 40
    # A line names a model that does not exist.
    wrong = begin_batch(server, [line_of("x", "nobody")])
    until(lambda: batch_of(server, wrong)["status"] == "failed")
    assert batch_of(server, wrong)["errors"]["data"][0]["code"] == "model_not_found"
    # A request needs the memory in which a line runs that takes minutes: the line stops.
    for name in ("a", "b"):
        admin(server, "unload", name)
    hangs = begin_batch(server, [line_of("hangs", "slow")])
    until(lambda: [one["running"] for one in listed(server) if one["name"] == "slow"] == [1])
    assert says(ask(server, "online")) == "I am online"
    assert states(server)["slow"] == "unloaded"
    # The line waits for a quiet model, and loads nothing meanwhile.
    assert batch_of(server, hangs)["status"] == "in_progress"
    assert server.http.post(f"/v1/batches/{hangs}/cancel").status_code == 200
    until(lambda: batch_of(server, hangs)["status"] == "cancelled")
