"""Sampling parameters: the user's settings, and the reduced form for the engine process and the runner.

``SamplingParams`` has the user's settings, all optional, with strings. ``TokenParams`` has the same settings
in token ids, with resolved defaults. Engine processes and slots get ``TokenParams``.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import numpy as np

from weft.common.errors import InvalidRequest
from weft.types.routes import Routes

StopIn: TypeAlias = Literal["content", "everything"]
MAX_N = 128
MAX_TOP_LOGPROBS = 20
"""Maximum alternatives per token in JSON, and the default of ``--max-logprobs``."""
MOST_TOP_LOGPROBS = 1024
"""Maximum alternatives per token in binary form, below the whole vocabulary."""
ALL_LOGPROBS = 1 << 30
"""``TokenParams.logprobs`` for the logprobs of the whole vocabulary."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_BAD_TOKENS = 4096
"""Maximum tokens of all bad words of one request."""
MAX_BAD_WORD_TOKENS = 128
"""Maximum tokens of one bad word. Each step compares every bad word, padded to the longest, with the last
tokens of every sequence."""
MAX_ID_LIST = 1024
MAX_BIAS = 1024
SEED_MASK = (1 << 64) - 1
_LISTS = frozenset(("stop", "stop_token_ids", "bad_words", "allowed_token_ids"))
REPETITION_PENALTY_RANGE = (0.01, 100.0)
"""Allowed range. Logits are divided by the penalty, so a value near 0 would overflow."""


def signed_seed(seed: int) -> int:
    """Return the int64 with the bits of ``seed`` modulo 2^64. Tensors contain seeds in int64 form."""
    seed &= SEED_MASK
    return seed - (1 << 64) if seed >> 63 else seed


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampling settings of one request.

    Raises InvalidRequest, naming the parameter, when a value is out of range. Checks against the model
    (vocabulary, context length) are made when the request is submitted.
    """

    n: int = 1
    """Sequences to generate for the prompt."""
    temperature: float = 1.0
    """0 is greedy. A value below 1e-5 counts as 0."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 or -1 disables the limit."""
    top_p: float = 1.0
    """Sample among the shortest prefix of tokens, by probability, with at least the given mass; 0 leaves the
    likeliest token."""
    min_p: float = 0.0
    """Drop tokens less likely than the given share of the likeliest token's probability."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Divides the logits of tokens seen before: within ``REPETITION_PENALTY_RANGE``."""
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    """If set, only the listed tokens can be sampled."""
    bad_words: tuple[str, ...] = ()
    """Texts that are never generated: sampling never completes the tokens of a text."""
    max_tokens: int | None = None
    """None generates until the context is full."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_in: StopIn = "content"
    """Scope of stop strings in outputs with several parts: content alone, or also reasoning, calls and
    markup. Any other output is content as a whole."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    """Any int64 or uint64, taken modulo 2^64; None generates a seed."""
    logprobs: int | None = None
    """Number of top alternatives to report with each sampled token; 0 reports the sampled token alone, -1 the
    whole vocabulary."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    return_routed_experts: bool = False
    """Report the experts that each routed layer chose for each token: ``CompletionOutput.routed_experts``."""
    routed_experts_prompt_start: int = 0
    """First prompt token with reported experts. Earlier tokens may come from the prefix cache."""
    force_routed_experts: Routes | None = None
    """Experts that replace the choice of the router for the first tokens of prompt and output; also an
    integer array [tokens, layers, experts per token]. The weights of the experts still come from the router's
    scores.
    """

    def __post_init__(self) -> None:
        """Convert lists, a single stop string and None for a list to tuples, and numpy numbers to Python
        numbers. Raises InvalidRequest."""
        # A single string is one stop string, not a sequence of characters.
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if (plain := _plain(name, value)) is not value:
                msgspec.structs.force_setattr(self, name, plain)
        if isinstance(self.force_routed_experts, np.ndarray):
            msgspec.structs.force_setattr(self, "force_routed_experts", Routes.of(self.force_routed_experts))
        _check_ranges(self)
        _check_lists(self)

    @property
    def greedy(self) -> bool:
        """True if the argmax is taken without noise."""
        return self.temperature < 1e-5


class TokenParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampling parameters of one sequence in token ids, with resolved defaults."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    bad: tuple[tuple[int, ...], ...] = ()
    """Forbidden token sequences: never completed."""
    max_tokens: int = 1
    """Maximum output tokens, emitted tokens included; at least 1."""
    min_tokens: int = 0
    """``stop_ids`` cannot be sampled while the output has fewer tokens."""
    stop_ids: tuple[int, ...] = ()
    """Sorted ids ending the sequence: end-of-turn ids (unless ignore_eos) and the ids of the request."""
    logprobs: int = -1
    """-1 for none, else the number of top alternatives with the sampled token."""
    prompt_logprobs: int = -1


def _plain(name: str, value: Any) -> Any:
    """Return the normalized value of the field ``name``; see ``__post_init__``."""
    if name in _LISTS:
        if value is None and name != "allowed_token_ids":  # None allows all tokens
            return ()
        return tuple(map(_scalar, value)) if isinstance(value, list | tuple | np.ndarray) else value
    if name == "logit_bias" and isinstance(value, dict):
        if any(isinstance(one, np.generic) for pair in value.items() for one in pair):
            return {_scalar(token): _scalar(bias) for token, bias in value.items()}
        return value
    return _scalar(value)


def _scalar(value: Any) -> Any:
    """Return a numpy number as a Python number, and any other value unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def _fail(name: str, message: str) -> None:
    raise InvalidRequest(f"{name} {message}", param=name)


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        _fail(name, "must be an integer")
    if not low <= value <= high:
        _fail(name, f"must be between {low} and {high}")


def _number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _fail(name, "must be a finite number")
    if not low <= value <= high:
        _fail(name, f"must be at least {low:g} and at most {high:g}")


def _check_ranges(p: SamplingParams) -> None:
    """Raise InvalidRequest for a number of a wrong type or out of range."""
    _integer("n", p.n, 1, MAX_N)
    _number("temperature", p.temperature, 0, 100)
    _integer("top_k", p.top_k, -1, 1 << 31)
    _number("top_p", p.top_p, 0, 1)
    _number("min_p", p.min_p, 0, 1)
    _number("frequency_penalty", p.frequency_penalty, -2, 2)
    _number("presence_penalty", p.presence_penalty, -2, 2)
    _number("repetition_penalty", p.repetition_penalty, *REPETITION_PENALTY_RANGE)
    if p.max_tokens is not None:
        _integer("max_tokens", p.max_tokens, 1, 1 << 31)
    _integer("min_tokens", p.min_tokens, 0, 1 << 31)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        _fail("min_tokens", "must not be greater than max_tokens")
    if p.seed is not None:
        _integer("seed", p.seed, -(1 << 63), SEED_MASK)
    _integer("routed_experts_prompt_start", p.routed_experts_prompt_start, 0, 1 << 31)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(p, name) is not None:
            _integer(name, getattr(p, name), -1, MOST_TOP_LOGPROBS)


def _check_lists(p: SamplingParams) -> None:
    """Raise InvalidRequest for a list of a wrong type, too long, or with invalid entries."""
    # msgspec checks no types when Python code constructs a struct, so check types here.
    for name, most in (("stop", MAX_STOP_STRINGS), ("bad_words", MAX_ID_LIST)):
        texts = getattr(p, name)
        if not isinstance(texts, tuple) or len(texts) > most:
            _fail(name, f"must be a list of at most {most} strings")
        for text in texts:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                _fail(name, f"must have strings of 1 to {MAX_STOP_CHARS} characters")
    if p.stop_in not in get_args(StopIn):
        _fail("stop_in", "must be content or everything")
    for name in ("stop_token_ids", "allowed_token_ids"):
        ids = getattr(p, name)
        if ids is None:
            continue
        if not isinstance(ids, tuple) or len(ids) > MAX_ID_LIST:
            _fail(name, f"must be a list of at most {MAX_ID_LIST} token ids")
        for token in ids:
            _integer(name, token, 0, (1 << 31) - 1)
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        _fail("allowed_token_ids", "must not be empty")
    if not isinstance(p.force_routed_experts, Routes | None):
        _fail("force_routed_experts", "must be an integer array [tokens, layers, experts per token]")
    if p.logit_bias is not None:
        if not isinstance(p.logit_bias, dict) or len(p.logit_bias) > MAX_BIAS:
            _fail("logit_bias", f"must map at most {MAX_BIAS} token ids to numbers")
        for token, bias in p.logit_bias.items():
            _integer("logit_bias", token, 0, (1 << 31) - 1)
            _number("logit_bias", bias, -100, 100)
