"""The bundled vision model on unseen lines: a broken vision path loses accuracy."""

from __future__ import annotations

from typing import Any

import pytest

from weft import LLM, SamplingParams
from weft.cli.evaluate.image_answers import chats_of, from_reference
from weft.cli.evaluate.text_answers import from_engine
from weft.config.flags import from_keywords
from weft.eval.ocr_mini import is_right, messages, ocr_test_set


def settings(dtype: str, **more: Any) -> dict[str, Any]:
    return {"model": "spool-vision", "dtype": dtype, "device": "cpu", **more}


def exact(texts: list[str]) -> int:
    return sum(map(is_right, texts, ocr_test_set(len(texts))))


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 2])
def test_lines_are_read(drafts: int) -> None:
    """500 lines, greedy: at least 95% exact, with and without drafts, of which most are accepted."""
    more: dict[str, Any] = {}
    if drafts:
        more = {"speculative_method": "mtp", "num_speculative_tokens": drafts, "speculative_adaptive": False}
    counted: dict[str, list[int]] = {}
    config = from_keywords(settings("float32", **more))
    _, texts = from_engine(config, chats_of(ocr_test_set()), 64, 16, counted)
    assert exact(texts) >= 475
    if drafts:
        assert counted["accepted"][0] > 0.9 * counted["proposed"][0]


@pytest.mark.slow
def test_twenty_lines_read_by_the_reference() -> None:
    """Text by text, in float64."""
    lines = ocr_test_set(20)
    _, theirs = from_reference(from_keywords(settings("float64")), lines, 16)
    with LLM(**settings("float64", max_num_seqs=8, long_prefill_token_threshold=8)) as llm:
        params = SamplingParams(temperature=0, max_tokens=16)
        outputs = llm.chat([messages(line) for line in lines], params, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == theirs
    assert exact(theirs) >= 19
