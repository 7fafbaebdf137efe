"""Requests become Submits: everything resolved, nothing wrong gets through."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.common.errors import ContextLength, InvalidRequest
from weft.text.submit import IdMint, ModelLimits, SeedMint, build_submits, minted_seed, submits_of
from weft.text.tokenizer import Tokenizer
from weft.types.media_item import MediaItem
from weft.types.messages import Submit, decode_to_engine, encode, ids_from_bytes
from weft.types.sampling import SamplingParams, TokenParams

LIMITS = ModelLimits(vocab_size=340, max_model_len=32, end_ids=(0, 2, 9999))


@pytest.fixture
def tokenizer(all_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return all_tokenizers["byte_level"]


def build(
    tokenizer: Tokenizer, prompt: list[int], limits: ModelLimits = LIMITS, **params: Any
) -> list[Submit]:
    return build_submits(prompt, SamplingParams(**params), limits, tokenizer, ids=IdMint(), seed=11)


def test_choices_share_request_seed_and_prompt(tokenizer: Tokenizer) -> None:
    made = build(tokenizer, [5, 6, 7], n=3, prompt_logprobs=2, logprobs=1, temperature=1)
    assert [submit.choice for submit in made] == [0, 1, 2]
    assert len({submit.sequence for submit in made}) == 3
    assert len({(submit.request, submit.seed, submit.prompt_ids) for submit in made}) == 1
    assert [submit.params.prompt_logprobs for submit in made] == [2, -1, -1]
    assert ids_from_bytes(made[0].prompt_ids).tolist() == [5, 6, 7]
    for submit in made:
        assert decode_to_engine(encode(submit)) == submit


@pytest.mark.requirement("F33")
def test_images_have_keys_of_their_own_with_each_salt() -> None:
    """Only requests with equal salts share the results of an image."""
    media = tuple(
        MediaItem(key=bytes([name] * 16), start=name, count=1, grid=(1, 1, 1), pixels=b"abc")
        for name in (1, 2)
    )
    keys = {}
    for salt in ("", "one", "two"):
        made = submits_of(b"", TokenParams(), 2, ids=IdMint(), seed=0, salt=salt, media=media)
        again = submits_of(b"", TokenParams(), 1, ids=IdMint(), seed=0, salt=salt, media=media)
        assert made[0].media == made[1].media == again[0].media
        assert [(item.start, item.pixels) for item in made[0].media] == [(1, b"abc"), (2, b"abc")]
        keys[salt] = [item.key for item in made[0].media]
    assert keys[""] == [item.key for item in media]
    every = [key for each in keys.values() for key in each]
    assert len(set(every)) == 6
    assert {len(key) for key in every} == {16}


def test_defaults_are_resolved(tokenizer: Tokenizer) -> None:
    params = build(tokenizer, [5] * 10)[0].params
    assert params.max_tokens == 22
    assert params.stop_ids == (0, 2)
    assert (params.logprobs, params.prompt_logprobs, params.allowed, params.bad) == (-1, -1, None, ())
    assert build(tokenizer, [5], ignore_eos=True, stop_token_ids=[7, 3])[0].params.stop_ids == (3, 7)
    assert build(tokenizer, [5], top_k=-1)[0].params.top_k == 0
    assert build(tokenizer, [5], logit_bias={9: 1, 3: -2})[0].params.logit_bias == ((3, -2.0), (9, 1.0))


@pytest.mark.parametrize(
    ("seed", "expected"), [(5, 5), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1), (-(2**63), 2**63), (None, 11)]
)
def test_seeds_are_taken_modulo(tokenizer: Tokenizer, seed: int | None, expected: int) -> None:
    assert build(tokenizer, [5], seed=seed)[0].seed == expected


def test_minted_seeds_are_a_function_of_seed_and_number() -> None:
    one, same, other, free = SeedMint(3), SeedMint(3), SeedMint(4), SeedMint(None)
    first = [one.mint() for _ in range(50)]
    assert first == [same.mint() for _ in range(50)] == [minted_seed(3, number) for number in range(50)]
    assert len({*first, *[other.mint() for _ in range(50)], *[free.mint() for _ in range(50)]}) == 150
    assert all(0 <= seed < 2**64 for seed in first)


@pytest.mark.requirement("F26")
def test_ids_are_not_reused_while_live() -> None:
    ids = IdMint()
    made = [ids.mint() for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(0 <= number < 2**64 for number in made)
    ids.release(made[0])
    ids.release(made[0])


@pytest.mark.requirement("F12")
@pytest.mark.parametrize("prompt", [[], [-1], [340], [True], [1.0], ["1"], [5, None]])
def test_prompts_must_hold_ids_of_the_model(tokenizer: Tokenizer, prompt: list[Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(tokenizer, prompt)
    assert caught.value.param == "prompt"


@pytest.mark.requirement("F14")
@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"logit_bias": {340: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [3, 340]}, "allowed_token_ids"),
        ({"stop_token_ids": [340]}, "stop_token_ids"),
        ({"min_tokens": 32}, "min_tokens"),
        ({"bad_words": ["\ud800"]}, "bad_words"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "min_tokens"),
    ],
)
def test_what_the_model_cannot_do_is_named(tokenizer: Tokenizer, params: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(tokenizer, [5], **params)
    assert caught.value.param == param


@pytest.mark.requirement("F14")
def test_bad_words_outside_the_models_vocabulary(tokenizer: Tokenizer) -> None:
    small = ModelLimits(vocab_size=10, max_model_len=32, end_ids=())
    with pytest.raises(InvalidRequest) as caught:
        build(tokenizer, [5], small, bad_words=["quick"])
    assert caught.value.param == "bad_words"


def test_bad_words_are_meant_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    bad = build(tokenizer, [5], bad_words=["the", "<|im_end|>"])[0].params.bad
    assert tuple(tokenizer.encode("the")) in bad
    assert tuple(tokenizer.encode(" the")) in bad
    assert all(2 not in word for word in bad)
    token = tokenizer.encode(" the")[0]
    with pytest.raises(InvalidRequest, match="bad_words"):
        build(tokenizer, [5], bad_words=[" the"], allowed_token_ids=[token])


@pytest.mark.requirement("F11")
def test_context_errors_say_the_numbers(tokenizer: Tokenizer) -> None:
    with pytest.raises(ContextLength, match=r"32 tokens.*has 32") as caught:
        build(tokenizer, [5] * 32)
    assert caught.value.param == "prompt"
    with pytest.raises(ContextLength, match=r"32 tokens.*40.*30.*10"):
        build(tokenizer, [5] * 30, max_tokens=10)
    assert build(tokenizer, [5] * 30, max_tokens=2)[0].params.max_tokens == 2
    assert build(tokenizer, [5] * 31)[0].params.max_tokens == 1


def test_values_of_python_callers() -> None:
    """Callers in Python give numbers and arrays of numpy, and None for lists, as for vLLM."""
    made = SamplingParams(
        stop=None,  # type: ignore[arg-type]
        bad_words=None,  # type: ignore[arg-type]
        stop_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
        allowed_token_ids=(np.int64(3),),  # type: ignore[arg-type]
        max_tokens=np.int32(7),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        ignore_eos=np.bool_(True),  # type: ignore[arg-type]
        logit_bias={np.int64(5): np.float32(1)},  # type: ignore[dict-item]
    )
    assert made == SamplingParams(
        stop_token_ids=(1, 2),
        allowed_token_ids=(3,),
        max_tokens=7,
        temperature=0.5,
        ignore_eos=True,
        logit_bias={5: 1.0},
    )
    assert type(made.max_tokens) is int
    assert made.allowed_token_ids is not None
    assert {type(made.stop_token_ids[0]), type(made.allowed_token_ids[0])} == {int}
    with pytest.raises(InvalidRequest, match="force_routed_experts must be an integer array"):
        SamplingParams(force_routed_experts=5)  # type: ignore[arg-type]
