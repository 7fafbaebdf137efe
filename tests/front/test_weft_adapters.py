"""A whole server with LoRA adapters gives the tokens of ``LLM``, in one group and in groups with roles."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.checkpoints import make_checkpoint
from tests.support.loras import make_adapter
from tests.support.servers import Servers
from tests.support.slowness import deadline
from tests.support.text_folders import IMAGE_TEMPLATE, write_small_tokenizer
from weft import LLM
from weft.types.sampling import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.real_processes]
PROMPT = [5 + 3 * place % 60 for place in range(23)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "dtype": "float64",
    "device": "cpu",
    "block_size": 4,
    "kv_cache_memory": "16M",
    "max_num_seqs": 8,
    "max_model_len": 128,
    "max_loras": 2,
}


@pytest.mark.parametrize("groups", [(), ("--data-parallel-size", "2"), ("--prefill", "1", "--decode", "1")])
def test_tokens_of_adapters_over_http(servers: Servers, tmp_path: Path, groups: tuple[str, ...]) -> None:
    base = Path(make_checkpoint(tmp_path, "llama"))
    write_small_tokenizer(base, {}, IMAGE_TEMPLATE)
    names = ("sql", "chat")
    folders = {name: make_adapter(tmp_path / name, base, seed=seed) for seed, name in enumerate(names)}
    prompt = {"prompt_token_ids": PROMPT}
    with LLM(model=str(base), lora_modules=folders, **SETTINGS) as llm:
        due = {
            name: list(llm.generate([prompt], GREEDY, lora=lora)[0].outputs[0].token_ids)
            for name, lora in (("base", None), ("sql", "sql"), ("base:chat", "chat"))
        }
    assert len({str(tokens) for tokens in due.values()}) == 3, "the adapters change nothing"
    flags = [part for name, value in SETTINGS.items() for part in ("--" + name.replace("_", "-"), str(value))]
    server = servers.weft(
        *("--model", str(base), "--served-model-name", "base", "--threads", "1", *flags, *groups),
        *("--lora-modules", f"sql={folders['sql']}", "--allow-lora-updates"),
    )
    body = {"lora_name": "chat", "lora_path": str(folders["chat"])}
    answer = server.http.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 200, answer.text
    asked = {
        "prompt": PROMPT,
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    for _ in range(2):  # the second time from the prefix cache
        for model, tokens in due.items():
            answer = server.http.post("/v1/completions", json={**asked, "model": model})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == tokens, model


def test_api_servers_of_several_models_share_the_adapters(servers: Servers, tmp_path: Path) -> None:
    """An adapter that one of two API servers loads is served, listed and unloaded by both."""
    base = Path(make_checkpoint(tmp_path, "llama"))
    write_small_tokenizer(base, {}, IMAGE_TEMPLATE)
    folder = make_adapter(tmp_path / "sql", base, seed=1)
    settings: dict[str, Any] = {name.replace("_", "-"): value for name, value in SETTINGS.items()}
    del settings["max-loras"]
    takes = {"model": str(base), "max-loras": 2, "allow-lora-updates": True}
    models = {"other": {"model": str(base), "load": "demand"}, "takes": takes}
    file = tmp_path / "topology.yaml"
    front = {"port": 0, "fronts": 2}
    file.write_text(yaml.safe_dump({"front": front, "threads": 1, **settings, "models": models}))
    program = "from weft.cli.main import main; main()"
    server = servers.start([sys.executable, "-c", program, "up", str(file)], 180.0, HF_HUB_OFFLINE="1")

    def everywhere(route: str, body: dict[str, Any] | None = None) -> list[Any]:
        """Return answers over 12 connections, which reach both API servers almost surely."""
        return [
            httpx.request("POST" if body else "GET", server.url + route, json=body, timeout=deadline(60))
            for _ in range(12)
        ]

    body = {"lora_name": "sql", "lora_path": str(folder)}
    assert (
        httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=deadline(60)).status_code == 200
    )
    for answer in everywhere("/v1/models"):
        assert [card["id"] for card in answer.json()["data"]] == ["other", "takes", "sql"]
    asked = {
        "prompt": PROMPT,
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    texts = {}
    for model in ("takes", "other", "sql"):
        answers = everywhere("/v1/completions", {**asked, "model": model})
        assert [answer.status_code for answer in answers] == [200] * 12, answers[0].text
        texts[model] = {str(answer.json()["choices"][0]["token_ids"]) for answer in answers}
    assert texts["takes"] == texts["other"] != texts["sql"]
    assert all(len(each) == 1 for each in texts.values())
    gone = httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "sql"}, timeout=deadline(60))
    assert gone.status_code == 200
    assert {one.status_code for one in everywhere("/v1/completions", {**asked, "model": "sql"})} == {404}
