"""A GGUF file and its source folder give the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.support import gguf_files
from weft import LLM, SamplingParams
from weft.common.errors import ConfigError
from weft.config.hub import bundled_models, resolve_model_path

PROMPTS = ["Tom has 12 apples and buys 7 more.", "Once upon a time there was"]


def test_a_folder_with_one_model_is_that_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    gguf_files.write_model(tmp_path / "one.gguf", transformers.LlamaForCausalLM(config))
    (tmp_path / "mmproj-one.gguf").touch()
    assert resolve_model_path(str(tmp_path)) == resolve_model_path(str(tmp_path / "one.gguf"))
    (tmp_path / "two.gguf").touch()
    with pytest.raises(ConfigError, match=r"several GGUF files: name one of one\.gguf, two\.gguf"):
        resolve_model_path(str(tmp_path))
    with pytest.raises(ConfigError, match=r"there is no file .*three\.gguf"):
        resolve_model_path(str(tmp_path / "three.gguf"))


def test_tokens_are_those_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = bundled_models()["spool-text"]
    texts = gguf_files.texts_of(Path(folder), "qwen2") | {"eos_token_id": 2}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    gguf_files.write_model(tmp_path / "spool.gguf", model, kind="BF16", texts=texts)
    params = SamplingParams(temperature=0, max_tokens=24)
    with LLM(folder, max_num_seqs=2) as llm:
        expected = llm.generate(PROMPTS, params)
    ids = [one.prompt_token_ids for one in expected]
    with LLM(str(tmp_path / "spool.gguf"), max_num_seqs=2) as llm:
        found = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in ids], params)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
    assert [one.outputs[0].text for one in found] == [one.outputs[0].text for one in expected]
