"""The bundled model with an 8-bit cache solves as many problems, within one in a hundred."""

from __future__ import annotations

from typing import Any

import pytest

from weft import LLM, SamplingParams
from weft.cli.evaluate.text_answers import chat_of, from_engine
from weft.config.flags import from_keywords
from weft.eval.gsm_mini import score, test_set

MAX_TOKENS = 128


def _settings(dtype: str, kv_cache_dtype: str) -> dict[str, Any]:
    return {"model": "spool-text", "device": "cpu", "dtype": dtype, "kv_cache_dtype": kv_cache_dtype}


def _solved(count: int, dtype: str, kv_cache_dtype: str) -> int:
    problems = test_set(count)
    config = from_keywords(_settings(dtype, kv_cache_dtype))
    _, answers = from_engine(config, [chat_of(p.question) for p in problems], 64, MAX_TOKENS)
    return score(answers, problems)


def _compare(count: int, dtype: str) -> None:
    plain, ours = _solved(count, dtype, "auto"), _solved(count, dtype, "fp8")
    print(f"{dtype}: {ours} of {count} with the cache in 8 bits, {plain} without")
    assert plain >= 0.9 * count
    assert abs(ours - plain) <= max(1, count // 100)


def test_it_is_another_cache() -> None:
    """The answer is equal, but its logprobs differ."""
    found = []
    for kv_cache_dtype in ("auto", "fp8"):
        with LLM(**_settings("float32", kv_cache_dtype), max_model_len=256) as llm:
            params = SamplingParams(temperature=0, max_tokens=48, logprobs=0)
            question = [{"role": "user", "content": test_set(1)[0].question}]
            (output,) = llm.chat([question], params, use_tqdm=False)
            found.append(output.outputs[0])
    assert found[0].token_ids == found[1].token_ids
    assert found[0].logprobs != found[1].logprobs


@pytest.mark.timeout(600)
def test_fifty_problems() -> None:
    _compare(50, "bfloat16")


@pytest.mark.grid
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_five_hundred_problems(dtype: str) -> None:
    _compare(500, dtype)
