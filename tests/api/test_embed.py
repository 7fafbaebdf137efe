"""``LLM.embed`` on a real engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft import LLM, SamplingParams
from weft.common.errors import ContextLength, InvalidRequest

TEXTS = ["Tom has 3 pens.", {"prompt": "Ann buys"}, {"prompt_token_ids": [40, 50, 60]}]


def test_vectors_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    made = llm.embed(TEXTS, use_tqdm=False)
    alone = [llm.embed(text, use_tqdm=False)[0] for text in TEXTS]
    for one, other in zip(made, alone, strict=True):
        np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-6)
        assert one.embedding.dtype == np.float32
        assert float((one.embedding**2).sum()) == pytest.approx(1.0, abs=1e-5)
        assert one.error is None
    assert made[0].prompt == "Tom has 3 pens."
    assert made[0].prompt_token_ids == llm.tokenizer.encode("Tom has 3 pens.")
    assert made[2].prompt is None
    assert not np.allclose(made[0].embedding, made[1].embedding)
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0)


def test_a_mean_is_that_of_the_last_ones_of_all_prefixes(llm: LLM) -> None:
    """Attention is causal: the state at a position equals the last state of the prefix."""
    ids = list(range(40, 60))
    prefixes = [{"prompt_token_ids": ids[:end]} for end in range(1, len(ids) + 1)]
    last = llm.embed(prefixes, normalize=False, use_tqdm=False)
    (mean,) = llm.embed(prefixes[-1:], pooling="mean", normalize=False, use_tqdm=False)
    expected = np.mean([one.embedding for one in last], axis=0)
    np.testing.assert_allclose(mean.embedding, expected, rtol=1e-4, atol=1e-5)
    assert mean.num_cached_tokens == 0


def test_long_prompts_and_what_cannot_be(llm: LLM) -> None:
    most = llm.config.kv.max_model_len
    (whole,) = llm.embed({"prompt_token_ids": [7] * most}, use_tqdm=False)
    assert whole.embedding.shape == (llm.config.spec.hidden,)
    with pytest.raises(ContextLength, match=f"context is {most} tokens, but the prompt has {most + 1}"):
        llm.embed({"prompt_token_ids": [7] * (most + 1)}, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="pooling must be"):
        llm.embed("a", pooling="max", use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="prompt 1"):
        llm.embed(["a", {"prompt_token_ids": []}], use_tqdm=False)
    assert llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_states_that_are_not_finite_fail_their_prompt_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft.runner.pooling import Pooled, Pooler

    take = Pooler.take

    def broken(self: Pooler, *arguments: object) -> Pooled | None:
        made = take(self, *arguments)  # type: ignore[arg-type]
        if made is not None:
            made.values[-1, 3] = torch.nan
        return made

    monkeypatch.setattr(Pooler, "take", broken)
    good, bad = llm.embed(["one prompt", "another"], use_tqdm=False)
    assert good.error is None
    assert bad.error is not None
    assert bad.error.code == "non_finite_logits"
    assert not len(bad.embedding)
