"""``logprobs_mode`` as a setting of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from weft import LLM, SamplingParams
from weft.common.errors import ConfigError

ASKED = SamplingParams(temperature=0.7, top_k=2, logprobs=5, max_tokens=6, seed=1, ignore_eos=True)


def test_raw_and_processed(settings: dict[str, Any]) -> None:
    outputs = {}
    for mode in ("raw_logprobs", "processed_logprobs"):
        with LLM(**settings, logprobs_mode=mode) as llm:
            outputs[mode] = llm.generate("Tom has", ASKED, use_tqdm=False)[0].outputs[0]
    raw, processed = outputs["raw_logprobs"], outputs["processed_logprobs"]
    assert raw.token_ids == processed.token_ids
    assert raw.logprobs is not None
    assert processed.logprobs is not None
    for position in raw.logprobs:
        assert len(position) >= 5
    for token, position in zip(processed.token_ids, processed.logprobs, strict=True):
        assert token in position
        assert len(position) == 2  # no other can be drawn


def test_another_mode_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="logprobs_mode"):
        LLM(**settings, logprobs_mode="raw_logits")
