"""Checks of a Submit against the model, before any change. A Submit may contain anything."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np

from weft.common.errors import ContextLength, InvalidRequest
from weft.config.resolved import MediaLimits
from weft.scheduler.images.media_book import check_media
from weft.types.messages import Submit
from weft.types.routes import RouteShape, check_routes
from weft.types.sampling import (
    ALL_LOGPROBS,
    MOST_TOP_LOGPROBS,
    REPETITION_PENALTY_RANGE,
    SEED_MASK,
    TokenParams,
)

MAX_SESSION = 64
_U32 = (1 << 32) - 1
_I64 = (1 << 63) - 1


def check_submit(
    submit: Submit,
    vocab_size: int,
    max_model_len: int,
    limits: MediaLimits | None = None,
    *,
    generates: bool = True,
    classifies: bool = False,
    routes: RouteShape | None = None,
) -> tuple[array[int], int]:
    """Return (prompt and emitted ids, number of prompt ids) of a valid Submit.

    ``limits``: limits of images; None if the model takes no images. ``generates``: False for a model without
    an output head. ``classifies``: True for a model with classes. ``routes``: of the model's experts.
    Raises ContextLength when no token fits after the prompt, and InvalidRequest with the name of the
    parameter for every other unsupported request.
    """
    tokens = _ids("prompt", submit.prompt_ids)
    num_prompt = len(tokens)
    if not num_prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if not generates and not submit.pooling:
        raise InvalidRequest(
            "this checkpoint has no output head (lm_head): the model makes embeddings and generates no text. "
            "Use /v1/embeddings, or LLM.embed",
            param="model",
        )
    if submit.pooling == "classify" and not classifies:
        raise InvalidRequest("this checkpoint has no classes; it makes embeddings or text", param="pooling")
    if submit.pooling and (submit.emitted_ids or submit.grammar is not None or submit.transfer is not None):
        raise InvalidRequest("an embedding has no output, no grammar and no transfer", param="pooling")
    if num_prompt > max_model_len or (num_prompt == max_model_len and not submit.pooling):
        output = "" if submit.pooling else ", output included"
        raise ContextLength(
            f"the prompt has {num_prompt} tokens; the context is {max_model_len} tokens{output}: "
            "shorten the prompt",
            param="prompt",
        )
    emitted = _ids("emitted_ids", submit.emitted_ids)
    if num_prompt + len(emitted) > max_model_len:
        raise ContextLength(
            f"the prompt has {num_prompt} tokens, the output {len(emitted)}; the context is {max_model_len}",
            param="emitted_ids",
        )
    # Range checks last: each reads all ids.
    _within("prompt", tokens, vocab_size)
    _within("emitted_ids", emitted, vocab_size)
    _integer("sequence", submit.sequence, 0, SEED_MASK)
    _integer("request", submit.request, 0, SEED_MASK)
    _integer("owner", submit.owner, 0, SEED_MASK)
    _integer("client", submit.client, 0, SEED_MASK)
    _integer("seed", submit.seed, 0, SEED_MASK)
    _integer("choice", submit.choice, 0, _U32)
    if len(submit.session) > MAX_SESSION:
        raise InvalidRequest(f"a session's name has at most {MAX_SESSION} characters", param="session")
    _integer("priority", submit.priority, -_I64, _I64)
    _check_params(submit.params, vocab_size)
    check_routes(submit.routes, submit.forced, num_prompt + len(emitted), routes, max_model_len)
    if submit.media:
        check_media(submit.media, num_prompt, limits, submit.transfer is None or submit.transfer.sends)
    return tokens + emitted, num_prompt


def _ids(name: str, data: bytes) -> array[int]:
    """Return int32 token ids. Raises InvalidRequest if ``data`` is no whole number of ids."""
    if len(data) % 4:
        raise InvalidRequest(f"{name} is not a whole number of int32 token ids", param=name)
    return array("i", data)


def _within(name: str, ids: array[int] | Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequest, with the first offending extreme, if an id is outside the vocabulary."""
    if not len(ids):
        return
    values = np.asarray(ids)  # no copy of the prompt array
    low = int(values.min())
    high = int(values.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequest(
            f"{name} has token id {wrong}; the vocabulary is 0 to {vocab_size - 1}", param=name
        )


def _integer(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}", param=name)


def _number(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{name} must be a finite number between {low:g} and {high:g}", param=name)


def _check_params(p: TokenParams, vocab_size: int) -> None:
    """Raise InvalidRequest, with the name of the parameter, for the first value outside its range."""
    # Each number has a fixed range; NaN and infinity are refused too.
    for name, low, high in (
        ("temperature", 0.0, 100.0),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("frequency_penalty", -2.0, 2.0),
        ("presence_penalty", -2.0, 2.0),
        ("repetition_penalty", *REPETITION_PENALTY_RANGE),
    ):
        _number(name, getattr(p, name), low, high)
    if p.top_p <= 0:
        raise InvalidRequest("top_p must be greater than 0", param="top_p")
    _integer("top_k", p.top_k, -1, 1 << 31)
    _integer("max_tokens", p.max_tokens, 1, _I64)
    _integer("min_tokens", p.min_tokens, 0, p.max_tokens)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(p, name) != ALL_LOGPROBS:
            _integer(name, getattr(p, name), -1, MOST_TOP_LOGPROBS)
    _within("logit_bias", [token for token, _ in p.logit_bias], vocab_size)
    for _, bias in p.logit_bias:
        _number("logit_bias", bias, -100.0, 100.0)
    if p.allowed is not None:
        if not p.allowed:
            raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")
        _within("allowed_token_ids", p.allowed, vocab_size)
    for word in p.bad:
        if not word:
            raise InvalidRequest("bad_words must not contain an empty string", param="bad_words")
        _within("bad_words", word, vocab_size)
    _within("stop_token_ids", p.stop_ids, vocab_size)
