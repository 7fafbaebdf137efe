"""A whole server with LoRA adapters gives the tokens of ``LLM``, in one group and in groups with roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.loras import make_adapter
from tests.support.servers import Servers
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
