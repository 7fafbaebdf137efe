"""LoRA adapters over HTTP: names, routes, all engine processes, restarts."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.servers import Running
from tests.support.slowness import deadline
from weft.config.adapters import read_adapter

Start = Callable[..., Running]


def adapter(folder: Path, seed: int = 0, rank: int = 2) -> Path:
    """Save a small adapter in ``folder``. Return ``folder``."""
    folder.mkdir()
    source = np.random.default_rng(seed)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{module}.lora_A.weight": source.standard_normal((rank, 2), np.float32),
        f"{module}.lora_B.weight": source.standard_normal((2, rank), np.float32),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("adapters")
    return {name: adapter(base / name, seed) for seed, name in enumerate(("sql", "chat", "more", "bad"))}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "adapters"


@pytest.fixture(scope="module")
def server(start_fake: Start, folders: dict[str, Path], log: Path) -> Running:
    return start_fake(
        engines=2,
        restarts=9,
        max_loras=2,
        allow_lora_updates=True,
        lora_modules=[f"sql={folders['sql']}"],
        adapter_log=str(log),
        vllm_metrics=True,
    )


def sent(log: Path) -> str:
    """Return the adapter of the last sequence at an engine."""
    return log.read_text(encoding="utf-8").split("\n")[-2]


def chat(server: Running, model: str, words: str = "hello", **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": words}]
    body = {"model": model, "messages": messages, "max_tokens": 3, **fields}
    return server.http.post("/v1/chat/completions", json=body)


def load(server: Running, name: str, path: Path | str, **fields: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **fields}
    return server.http.post("/v1/load_lora_adapter", json=body)


def unload(server: Running, name: str) -> httpx.Response:
    return server.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def models(server: Running) -> dict[str, dict[str, Any]]:
    return {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}


def test_the_model_field_chooses_the_adapter(server: Running, folders: dict[str, Path], log: Path) -> None:
    digest = read_adapter(folders["sql"]).digest
    for model, due in (("sql", digest), ("fake:sql", digest), ("org/alias:sql", digest), ("fake", "")):
        answer = chat(server, model)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        assert sent(log) == due
    text = {"model": "sql", "prompt": "abc", "max_tokens": 2}
    assert server.http.post("/v1/completions", json=text).status_code == 200
    assert sent(log) == digest
    # A large body is read in another process.
    assert chat(server, "fake:sql", "hello " * 20_000).json()["error"]["code"] == "context_length_exceeded"
    for model in ("other", "sql:fake", "fake:other", "fake:fake:sql"):
        answer = chat(server, model)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_adapters_are_listed(server: Running, folders: dict[str, Path]) -> None:
    card = models(server)["sql"]
    assert (card["parent"], card["root"]) == ("fake", str(folders["sql"]))
    assert card["max_model_len"] == models(server)["fake"]["max_model_len"]
    assert "parent" not in models(server)["fake"]
    assert server.http.get("/v1/models/sql").json() == card
    assert server.http.get("/v1/models/fake:sql").json() == card


def test_load_and_unload(server: Running, folders: dict[str, Path], log: Path) -> None:
    assert chat(server, "chat").status_code == 404
    answer = load(server, "chat", folders["chat"])
    assert answer.status_code == 200, answer.text
    assert list(models(server))[-1] == "chat"
    assert chat(server, "chat").status_code == 200
    assert sent(log) == read_adapter(folders["chat"]).digest
    again = load(server, "chat", folders["more"])
    assert again.status_code == 400
    assert "load_inplace" in again.json()["error"]["message"]
    assert load(server, "chat", folders["more"], load_inplace=True, pinned=True).status_code == 200
    assert chat(server, "chat").status_code == 200
    assert sent(log) == read_adapter(folders["more"]).digest
    assert unload(server, "chat").status_code == 200
    assert chat(server, "chat").status_code == 404
    gone = unload(server, "chat")
    assert gone.status_code == 404
    assert "loaded are: sql" in gone.json()["error"]["message"]


def test_adapters_that_are_refused(server: Running, folders: dict[str, Path], tmp_path: Path) -> None:
    before = list(models(server))
    large = adapter(tmp_path / "large", rank=32)
    cases = [
        ("bad", folders["bad"], "module model.x does not fit the model"),
        ("none", tmp_path / "none", "adapter_config.json can't be read"),
        ("large", large, "--max-lora-rank"),
        ("fake", folders["more"], "stands for the model"),
        ("fake:x", folders["more"], "stands for the model"),
        ("", folders["more"], "printable characters"),
        ("rel", "adapters/more", "absolute path"),
    ]
    for name, path, words in cases:
        answer = load(server, name, path)
        assert answer.status_code == 400, (name, answer.text)
        assert words in answer.json()["error"]["message"]
    # A refused replacement leaves the adapter as before.
    assert load(server, "sql", tmp_path / "none", load_inplace=True).status_code == 400
    assert list(models(server)) == before
    assert chat(server, "sql").status_code == 200


def test_engines_that_start_again_get_the_adapters(
    server: Running, script: Any, folders: dict[str, Path], log: Path
) -> None:
    assert load(server, "late", folders["more"]).status_code == 200
    made = server.complete("xyz", model="late", seed=script.DIE_ONCE, max_tokens=20).json()
    assert len(made["choices"][0]["text"]) == 20
    assert sent(log) == read_adapter(folders["more"]).digest
    until = time.monotonic() + deadline(30)
    while server.http.get("/health").json()["status"] != "alive":
        assert time.monotonic() < until
        time.sleep(0.05)
    for _ in range(4):  # at both engines
        assert chat(server, "late").status_code == 200
    assert unload(server, "late").status_code == 200


def test_running_and_waiting_requests_are_counted(server: Running, script: Any) -> None:
    body = {"model": "fake:sql", "prompt": "abcdef", "max_tokens": 9, "stream": True}
    body["seed"] = script.HANG_AFTER
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()  # without a reference the stream would close
        next(lines)
        page = server.http.get("/metrics").text
        assert 'weft:lora_requests{adapter="sql",model_name="fake",state="running"} 1.0' in page
        assert 'weft:lora_requests{adapter="sql",model_name="fake",state="waiting"} 0.0' in page
        (line,) = [one for one in page.splitlines() if one.startswith("vllm:lora_requests_info{")]
        assert 'max_lora="2"' in line
        assert 'running_lora_adapters="sql"' in line
        assert 'waiting_lora_adapters=""' in line
        assert float(line.split()[-1]) > 1e9


def test_a_replacement_is_found_after_the_load(
    server: Running, folders: dict[str, Path], tmp_path: Path
) -> None:
    assert load(server, "slow", folders["chat"]).status_code == 200
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(load, server, "slow", folders["more"], load_inplace=True)
        time.sleep(0.1)
        assert not asked.done()
        assert chat(server, "slow").status_code == 200
        assert asked.result().status_code == 200
    # A copy of the folder is the same content: nothing is loaded, and requests go on.
    copy = shutil.copytree(folders["more"], tmp_path / "copy")
    assert load(server, "copy", copy).status_code == 200
    for name in ("slow", "copy") * 3:
        assert chat(server, name).status_code == 200
        assert "missing_groups" not in models(server)[name]
    for name in ("slow", "copy"):
        assert unload(server, name).status_code == 200


def test_requests_wait_for_an_adapter_of_a_folder(start_fake: Start, tmp_path: Path) -> None:
    for seed, name in enumerate(("slow", "sql")):
        adapter(tmp_path / name, seed)
    server = start_fake(max_loras=2, lora_dir=str(tmp_path), max_cpu_loras=1)
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda _: chat(server, "slow").status_code, range(3)))
    assert answers == [200] * 3
    for name in ("sql", "slow", "sql"):
        assert chat(server, name).status_code == 200
        assert list(models(server))[2:] == [name]


def test_updates_need_the_flag_and_the_admin_key(start_fake: Start, folders: dict[str, Path]) -> None:
    closed = start_fake(max_loras=2, lora_modules=[f"sql={folders['sql']}"])
    for answer in (load(closed, "chat", folders["chat"]), unload(closed, "sql")):
        assert answer.status_code == 403
        assert "--allow-lora-updates" in answer.json()["error"]["message"]
    assert chat(closed, "sql").status_code == 200


def test_a_server_without_places_knows_no_adapters(start_fake: Start, folders: dict[str, Path]) -> None:
    plain = start_fake(allow_lora_updates=True, api_key=["one"], admin_key=["two"])
    body = {"lora_name": "sql", "lora_path": str(folders["sql"])}
    for key, status, words in (("one", 401, "admin key"), ("two", 400, "--max-loras")):
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{plain.url}/v1/load_lora_adapter", json=body, headers=headers)
        assert answer.status_code == status, answer.text
        assert words in answer.json()["error"]["message"]


def test_several_api_servers_share_the_adapters(start_fake: Start, folders: dict[str, Path]) -> None:
    server = start_fake(fronts=2, max_loras=2, allow_lora_updates=True)
    assert load(server, "chat", folders["chat"]).status_code == 200
    # New connections reach both API servers.
    for _ in range(12):
        with httpx.Client(base_url=server.url) as client:
            body = {"model": "chat", "prompt": "abc", "max_tokens": 2}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
    assert unload(server, "chat").status_code == 200
    for _ in range(12):
        with httpx.Client(base_url=server.url) as client:
            assert client.post("/v1/completions", json=body).status_code == 404


def test_adapters_of_a_folder_are_loaded_at_first_use(start_fake: Start, tmp_path: Path, log: Path) -> None:
    for seed, name in enumerate(("sql", "bad", "fake")):
        adapter(tmp_path / name, seed)
    (tmp_path / "empty").mkdir()
    server = start_fake(max_loras=2, lora_dir=str(tmp_path), adapter_log=str(log))
    assert list(models(server)) == ["fake", "org/alias"]
    for model in ("fake:sql", "sql"):
        answer = chat(server, model)
        assert answer.status_code == 200, answer.text
        assert sent(log) == read_adapter(tmp_path / "sql").digest
    assert list(models(server)) == ["fake", "org/alias", "sql"]
    assert chat(server, "fake").status_code == 200
    assert sent(log) == ""
    refused = chat(server, "bad")
    assert refused.status_code == 400
    assert "does not fit the model" in refused.json()["error"]["message"]
    for name in ("empty", "other", "../sql", "sql/"):
        assert chat(server, name).status_code == 404
    assert server.http.get("/v1/models/bad").status_code == 404
    adapter(tmp_path / "later", 7)
    server.wait(lambda: chat(server, "later").status_code == 200, 10)
