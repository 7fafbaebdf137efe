"""The bundled models give equal tokens under every engine mode with ``--deterministic``.

Their accuracy is therefore equal too. 24 problems run by default, all 500 under ``-m grid``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.support.slow import mostly_slow
from weft import LLM, SamplingParams
from weft.eval.gsm_mini import score, test_set

MAX_TOKENS = 128
PLAIN: dict[str, Any] = {"steps_in_flight": 1, "enable_prefix_caching": False, "step_policy": "exclusive"}
#: Name of a variant -> its settings.
WAYS: dict[str, dict[str, Any]] = {
    "chunks of 16": {"long_prefill_token_threshold": 16},
    "chunks of 256, mixed": {"long_prefill_token_threshold": 256, "step_policy": "mixed"},
    "two steps in flight": {"steps_in_flight": 2, "step_policy": "mixed"},
    "prefix hits": {"enable_prefix_caching": True, "step_policy": "mixed", "block_size": 16},
    "preemption": {"kv_cache_memory": "tight", "step_policy": "mixed", "block_size": 16},
    "n-gram drafts": {
        "speculative_method": "ngram",
        "num_speculative_tokens": 3,
        "speculative_adaptive": False,
    },
    "1 draft of its own": {
        "speculative_method": "mtp",
        "num_speculative_tokens": 1,
        "speculative_adaptive": False,
    },
    "3 drafts of its own, everything": {
        "speculative_method": "mtp",
        "num_speculative_tokens": 3,
        "speculative_adaptive": False,
        "long_prefill_token_threshold": 16,
        "steps_in_flight": 2,
        "enable_prefix_caching": True,
        "block_size": 16,
        "step_policy": "mixed",
    },
}
TIGHT = {"spool-text": "2M", "spool-mla": "1M"}
"""Model -> a cache size at which sixteen sequences preempt each other."""
CASES = [
    (model, way) for model in sorted(TIGHT) for way in WAYS if model == "spool-mla" or "of its own" not in way
]
FEW = [("spool-mla", "3 drafts of its own, everything"), ("spool-text", "n-gram drafts")]
FEW += [("spool-text", "two steps in flight"), ("spool-text", "preemption")]


def answers(model: str, count: int, settings: dict[str, Any]) -> tuple[list[list[int]], list[str], Any]:
    """(token ids and text of each answer, counters)."""
    if settings.get("kv_cache_memory") == "tight":
        settings = {**settings, "kv_cache_memory": TIGHT[model], "max_model_len": 512}
    with LLM(model, dtype="float32", deterministic=True, max_num_seqs=16, **settings) as llm:
        asked = [[{"role": "user", "content": problem.question}] for problem in test_set(count)]
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        if settings["enable_prefix_caching"]:
            llm.chat(asked[: count // 2], SamplingParams(max_tokens=1), use_tqdm=False)
        outputs = llm.chat(asked, params, use_tqdm=False)
        assert llm._core is not None
        stats = llm._core.stats()
    return [list(o.outputs[0].token_ids) for o in outputs], [o.outputs[0].text for o in outputs], stats


@cache
def plain(model: str, count: int) -> tuple[list[list[int]], int]:
    """(token ids, problems solved) with nothing special."""
    tokens, texts, _ = answers(model, count, PLAIN)
    return tokens, score(texts, test_set(count))


def check(model: str, way: str, count: int) -> None:
    tokens, texts, stats = answers(model, count, {**PLAIN, **WAYS[way]})
    expected, solved = plain(model, count)
    assert tokens == expected
    assert score(texts, test_set(count)) == solved > 0.9 * count
    if "mixed" in way or "everything" in way:
        assert stats.mixed_steps > 0
    if "prefix" in way or "everything" in way:
        assert stats.prefix_hits > 0
    if "preemption" in way:
        assert stats.preemptions > 0
    if "draft" in way:
        assert sum(stats.drafts_accepted) > 0


@mostly_slow(("model", "way"), CASES, FEW[:1])
def test_twenty_four_problems(model: str, way: str) -> None:
    check(model, way, 24)


@pytest.mark.grid
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("model", "way"), CASES)
def test_five_hundred_problems(model: str, way: str) -> None:
    check(model, way, 500)
