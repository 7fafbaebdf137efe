"""The bundled model on held-out problems, here and in transformers: a broken engine loses accuracy."""

from __future__ import annotations

from typing import Any

import pytest

from weft import LLM, SamplingParams
from weft.cli.evaluate.text_answers import chat_of, from_engine, from_reference
from weft.cli.reference import Reference
from weft.config.flags import from_keywords
from weft.eval.gsm_mini import score, test_set

MAX_TOKENS = 128


def settings(dtype: str) -> dict[str, Any]:
    return {"model": "spool-text", "dtype": dtype, "device": "cpu"}


def test_accuracy() -> None:
    """500 problems, greedy: at least 95% exact."""
    problems = test_set(500)
    questions = [problem.question for problem in problems]
    _, ours = from_engine(from_keywords(settings("float32")), [*map(chat_of, questions)], 64, MAX_TOKENS)
    assert score(ours, problems) >= 475


@pytest.mark.grid
@pytest.mark.timeout(600)
def test_accuracy_is_the_references() -> None:
    """500 problems, greedy: within one problem of transformers."""
    problems = test_set(500)
    questions = [problem.question for problem in problems]
    config = from_keywords(settings("float32"))
    _, ours = from_engine(config, [*map(chat_of, questions)], 64, MAX_TOKENS)
    _, theirs = from_reference(config, questions, 100, MAX_TOKENS)
    assert abs(score(ours, problems) - score(theirs, problems)) <= 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_problems_get_the_references_tokens_in_float64() -> None:
    questions = [problem.question for problem in test_set(20)]
    reference = Reference(from_keywords(settings("float64")))
    with LLM(**settings("float64"), max_num_seqs=16, long_prefill_token_threshold=16) as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        outputs = llm.chat([[{"role": "user", "content": q}] for q in questions], params, use_tqdm=False)
    assert len(outputs) == 20
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        assert reference.greedy(output.prompt_token_ids, len(tokens)) == tokens
