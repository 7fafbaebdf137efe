"""Speculation through ``LLM``: equal outputs, and statistics of drafts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from weft import LLM, SamplingParams
from weft.common.errors import ConfigError
from weft.text.choice import Choice
from weft.text.tokenizer import Tokenizer
from weft.types.messages import TokenEvent

PROMPTS = ["Tom has 3 pens and 3 pens and 3 pens", "7 + 5 = 12, 7 + 5 = 12, 7 + 5 ="]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.6, seed=3, max_tokens=40, n=2, logprobs=1, stop=("e", "0")),
]


@pytest.fixture(scope="module")
def drafting(settings: dict[str, Any]) -> Iterator[LLM]:
    with LLM(
        **settings,
        speculative_method="ngram",
        num_speculative_tokens=3,
        ngram_min_length=1,
        speculative_adaptive=False,
    ) as made:
        yield made


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
def test_outputs_do_not_depend_on_it(llm: LLM, drafting: LLM, params: SamplingParams) -> None:
    off = llm.generate(PROMPTS, params, use_tqdm=False)
    on = drafting.generate(PROMPTS, params, use_tqdm=False)
    for one, other in zip(off, on, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert (a.text, a.token_ids, a.finish_reason, a.stop_reason) == (
                b.text,
                b.token_ids,
                b.finish_reason,
                b.stop_reason,
            )
            assert a.num_accepted_drafts == a.num_rejected_drafts == 0
            if a.logprobs is not None:
                assert b.logprobs is not None
                assert [list(p) for p in a.logprobs] == [list(p) for p in b.logprobs]  # ids


def test_counts_of_accepted_and_rejected_drafts(drafting: LLM, caplog: pytest.LogCaptureFixture) -> None:
    made = drafting.generate(PROMPTS, PARAMS[0], use_tqdm=False)
    outputs = [request.outputs[0] for request in made]
    assert sum(output.num_accepted_drafts for output in outputs) > 0
    assert sum(output.num_rejected_drafts for output in outputs) > 0
    assert all(output.num_accepted_drafts < len(output.token_ids) for output in outputs)
    stats = drafting._core.stats()  # type: ignore[union-attr]
    assert len(stats.drafts) == len(stats.drafts_accepted) == 3
    assert list(stats.drafts) == sorted(stats.drafts, reverse=True)
    assert all(a <= d for a, d in zip(stats.drafts_accepted, stats.drafts, strict=True))
    report = drafting._core.describe_speculation()  # type: ignore[union-attr]
    assert report is not None
    assert report.startswith(f"drafts: {sum(stats.drafts_accepted)} of {sum(stats.drafts)} accepted")


def test_the_end_of_an_engine_is_logged(settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), LLM(**settings, speculative_method="ngram") as made:
        made.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)
    assert any("drafts:" in record.message for record in caplog.records)


def test_drafts_behind_a_stop_string_are_not_accepted(llm: LLM) -> None:
    tokenizer: Tokenizer = llm.tokenizer
    ids = tokenizer.encode("one stop two")
    choice = Choice(tokenizer, SamplingParams(stop=("stop",)), sequence=1)
    choice.on_event(TokenEvent(sequence=1, token_ids=tuple(ids), accepted=len(ids) - 1, rejected=1))
    assert choice.finish_reason == "stop"
    assert choice.accepted == min(len(choice.token_ids), len(ids) - 1)
    assert choice.accepted + choice.rejected == len(ids)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"speculative_method": "mtp"}, "--speculative-method mtp"),
        (
            {"speculative_method": "ngram", "ngram_min_length": 5, "ngram_max_length": 4},
            "--ngram-min-length 5",
        ),
        ({"speculative_method": "ngram", "max_num_batched_tokens": 30}, "--num-speculative-tokens 3"),
        ({"speculative_method": "ngram", "num_speculative_tokens": 9}, "num_speculative_tokens must be"),
        ({"speculative_method": "guess"}, "speculative_method must be"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    settings: dict[str, Any], flags: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        LLM(**settings, **flags)
