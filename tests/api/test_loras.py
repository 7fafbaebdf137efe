"""``LLM`` with LoRA adapters by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.loras import make_adapter, merge
from weft import LLM, SamplingParams
from weft.common.errors import ConfigError, InvalidRequest
from weft.config.hub import bundled_models
from weft.engine.server.replicas import Replicas

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = ["Tom has 3 pens.", "Ann buys 7 red balls and", "7 + 5 ="]
SETTINGS = {"dtype": "float64", "kv_cache_memory": "16M", "max_model_len": 64, "device": "cpu"}


def tokens(llm: LLM, lora: str | list[str | None] | None = None) -> list[list[int]]:
    made = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora=lora)
    return [output.outputs[0].token_ids for output in made]


def test_names_of_adapters(tmp_path: Path) -> None:
    base = Path(bundled_models()["spool-text"])
    folder = make_adapter(tmp_path / "adapter", base, rank=2, alpha=1)
    with LLM(str(merge(tmp_path / "merged", base, folder)), **SETTINGS) as merged:
        due = tokens(merged)
    with LLM("spool-text", max_loras=1, lora_modules={"pens": str(folder)}, **SETTINGS) as llm:
        plain = tokens(llm)
        assert due != plain
        assert tokens(llm, "pens") == due
        assert tokens(llm, [None, "pens", None]) == [plain[0], due[1], plain[2]]
        with pytest.raises(InvalidRequest, match="lora_modules has: pens"):
            tokens(llm, "pen")
        with pytest.raises(InvalidRequest, match="3 prompts but 1"):
            tokens(llm, ["pens"])


@pytest.mark.slow
def test_adapters_of_replicas(tmp_path: Path) -> None:
    """Every replica announces the adapters: a request with an adapter does not wait."""
    base = Path(bundled_models()["spool-text"])
    folder = make_adapter(tmp_path / "adapter", base, rank=2, alpha=1)
    lora = {"max_loras": 1, "lora_modules": {"pens": str(folder)}}
    with LLM("spool-text", **lora, **SETTINGS) as alone:
        due = tokens(alone, "pens")
    with LLM("spool-text", data_parallel_size=2, **lora, **SETTINGS) as llm:
        assert tokens(llm, "pens") == due
        core = llm._core
        assert isinstance(core, Replicas)
        assert llm.stats().generation_tokens == 3 * 10
        assert all(one.stats.generation_tokens for one in core.thread.links.instances)


def test_modules_need_places_and_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="requires --max-loras"):
        LLM("spool-text", lora_modules={"a": str(tmp_path)}, **SETTINGS)
    with pytest.raises(ConfigError, match=r"adapter_config.json can't be read"):
        LLM("spool-text", max_loras=1, lora_modules={"a": str(tmp_path)}, **SETTINGS)
