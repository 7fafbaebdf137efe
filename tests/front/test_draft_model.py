"""A draft model beside the served model, where prefill and decode are apart."""

from __future__ import annotations

from typing import Any

import pytest

FLAGS = ("--speculative-method", "draft", "--speculative-model", "spool-text", "--no-speculative-adaptive")
PROMPTS = ["Tom has 3 pens and buys", "one two three one two three", "Ann"]


@pytest.mark.slow
def test_prefill_and_decode_apart_give_the_same_tokens(start_weft: Any) -> None:
    """The draft model is the model itself, so the decode group accepts drafts from its first row on."""

    def tokens(server: Any, **body: Any) -> list[str]:
        texts = []
        for prompt in PROMPTS:
            answer = server.complete(prompt, max_tokens=24, seed=7, **body)
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["choices"][0]["text"])
        return texts

    plain = start_weft("--prefill", "1", "--decode", "1")
    expected = [tokens(plain, temperature=heat) for heat in (0, 0.8)]
    server = start_weft("--prefill", "1", "--decode", "1", *FLAGS)
    assert [tokens(server, temperature=heat) for heat in (0, 0.8)] == expected
    answer = server.complete(PROMPTS[0], max_tokens=24, temperature=0).json()
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 6
