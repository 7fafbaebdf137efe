"""``--logprobs-mode processed_logprobs``: logprobs of the distribution that a token was sampled from."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.sampling.conftest import kept_tokens, processed
from weft.runner.sampling import sampler as module
from weft.runner.sampling.sampler import Sampler
from weft.types.plan import AllocSlot, TokenMasks
from weft.types.sampling import TokenParams

INF = float("inf")
VOCAB = 300
EVERY = [
    TokenParams(temperature=0, logprobs=5),
    TokenParams(temperature=0, logprobs=2, repetition_penalty=1.5, presence_penalty=0.5),
    TokenParams(logprobs=20),
    TokenParams(logprobs=3, temperature=2.5),
    TokenParams(logprobs=20, top_k=4),
    TokenParams(logprobs=-1, top_k=4),
    TokenParams(logprobs=20, top_p=0.6, temperature=0.8),
    TokenParams(logprobs=20, min_p=0.1),
    TokenParams(logprobs=20, top_k=9, top_p=0.9, min_p=0.05, temperature=3.0),
    TokenParams(logprobs=6, logit_bias=((3, 50.0),), temperature=1.5),
    TokenParams(logprobs=20, allowed=(9, 8, 7)),
    TokenParams(logprobs=5, bad=((2,), (1, 4)), stop_ids=(5,), min_tokens=99),
    TokenParams(logprobs=0, frequency_penalty=1.0, top_k=50),
]


def expected(
    logits: np.ndarray, params: TokenParams, history: list[int], num_prompt: int, banned: set[int]
) -> list[float]:
    """The logprobs of all tokens, one by one."""
    masked = np.array([-INF if token in banned else v for token, v in enumerate(logits)], logits.dtype)
    x = [float(v) for v in processed(masked, params, history, num_prompt, VOCAB)]
    if params.temperature >= 1e-5:
        x = [v / params.temperature for v in x]
        keep, margin = kept_tokens(x, params)
        assert margin > 1e-6, "a comparison that rounding decides: choose another seed"
        x = [v if token in keep else -INF for token, v in enumerate(x)]
    total = math.log(math.fsum(math.exp(v - max(x)) for v in x)) + max(x)
    return [v - total for v in x]


def sampler_of(params: list[TokenParams], seeds: list[int]) -> Sampler:
    made = Sampler(len(params), VOCAB, torch.device("cpu"), processed=True)
    for slot, of in enumerate(params):
        ids = np.zeros(1, np.int32)
        made.slots.alloc(
            AllocSlot(
                slot=slot,
                gen=1,
                choice=0,
                seed=seeds[slot],
                params=of,
                num_prompt=1,
                num_cached=0,
                token_ids=ids,
            )
        )
    return made


@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
def test_they_are_of_what_is_left_after_all_steps(
    make: Any, dtype: torch.dtype, masked: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.CHUNK, "cpu", chunk)
    of: SimpleNamespace = make.scene(len(EVERY), VOCAB, seed=3)
    banned: dict[int, set[int]] = {}
    masks = module.NO_MASKS
    if masked:
        entries = [0, 4, 8, 11]
        banned = {entry: set(range(entry % 3, VOCAB, 3)) for entry in entries}
        words = np.full((len(entries), -(-VOCAB // 32) * 32), True)
        for row, entry in enumerate(entries):
            words[row, sorted(banned[entry])] = False
        packed = np.packbits(words, axis=1, bitorder="little").view("<i4").ravel()
        masks = TokenMasks(entries=np.array(entries, np.int32), words=packed.astype(np.int32))
    logits = of.logits.to(dtype)
    count = len(EVERY)
    rows = make.rows(range(count), range(count), of.positions)
    made = sampler_of(EVERY, of.seeds).sample(logits, rows, of.history, of.num_prompt, masks)
    got = made.logprobs
    assert got is not None
    asking = [n for n, params in enumerate(EVERY) if params.logprobs >= 0]
    assert got.entries.tolist() == asking
    assert not got.error.any()
    for at, entry in enumerate(asking):
        params = EVERY[entry]
        history = of.history[entry, : of.positions[entry]].tolist()
        num_prompt = int(of.num_prompt[entry])
        each = expected(logits[entry].numpy(), params, history, num_prompt, banned.get(entry, set()))
        token = int(made.tokens[entry])
        order = sorted(range(VOCAB), key=lambda t: (-each[t], t))
        ids = [token, *(t for t in order[: params.logprobs] if each[t] > -INF)]
        ids += [-1] * (21 - len(ids))
        assert got.ids[at].tolist() == ids, params
        values = [-INF if t < 0 else each[t] for t in ids]
        assert got.values[at].tolist() == pytest.approx(values, abs=1e-4)
        assert int(got.rank[at]) == 1 + order.index(token)


def test_those_of_prompts_are_raw(make: Any) -> None:
    of: SimpleNamespace = make.scene(1, VOCAB)
    params = [TokenParams(temperature=3.0, top_k=2, logprobs=1, prompt_logprobs=2)]
    rows = make.rows([0], [0], [9], [(0, 0, 5)])
    made = sampler_of(params, of.seeds).sample(of.logits, rows, of.history, of.num_prompt)
    assert made.prompt_logprobs is not None
    raw = of.logits[0].log_softmax(-1)
    ids = made.prompt_logprobs.ids[0]
    assert made.prompt_logprobs.values[0].tolist() == pytest.approx(raw[ids].tolist(), abs=1e-5)
