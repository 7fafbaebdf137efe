"""Common parameters of both kinds of completion. Names and meanings follow OpenAI's API reference. Fields
beyond OpenAI's (``top_k``, ``min_p``, ``guided_json`` ...) have the names used by other servers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.conversation import AnswerOptions, OutputConstraint, Sharing
from weft.front.protocol.fields import HINTS, INSTEAD, NEUTRAL, UNSUPPORTED
from weft.front.protocol.parse import between, short
from weft.front.protocol.response_formats import Constrained, constraint_of
from weft.types.sampling import MAX_TOP_LOGPROBS, SamplingParams

MAX_PRIORITY = 1 << 31
_SALT = re.compile(r"[A-Za-z0-9._~+/=\-]{1,256}")


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Extra contents of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Only false is accepted, which has no effect."""
    continuous_usage_stats: bool | None = None
    """True to include the usage so far in every chunk."""

    def check(self) -> None:
        """Raise InvalidRequest for obfuscation."""
        if self.include_obfuscation:
            raise InvalidRequest(
                "stream_options.include_obfuscation is not supported by this server",
                param="stream_options",
                code="unsupported_parameter",
            )


class Generate(Constrained, frozen=True, kw_only=True):
    """Parameters common to both kinds of completion."""

    neutral: ClassVar[Mapping[str, Callable[[Any], bool]]] = NEUTRAL
    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED
    instead: ClassVar[Mapping[str, str]] = INSTEAD
    hints: ClassVar[Mapping[str, Any]] = HINTS
    prompt_logprobs_range: ClassVar[tuple[int, int]] = (0, MAX_TOP_LOGPROBS)

    model: str | None = None
    """Model name; default: the server's model."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    best_of: int | None = None
    """Only the value of ``n`` is accepted, which has no effect."""
    user: str | None = None
    """Label of the caller's user, without effect, like the labels below; but ``prompt_cache_key`` names the
    session."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    priority: int | None = None
    """Lower values go first."""
    cache_salt: str | None = None
    """Prefixes are shared only among requests of the same salt."""

    def check(self) -> None:
        """Raise InvalidRequest for parameters that are out of range, unsupported or exclude each other."""
        if self.model is not None:
            short("model", self.model)
        for label in ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"):
            if (text := getattr(self, label)) is not None:
                short(label, text)
        # `best_of` equal to `n` means no selection among choices.
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest("best_of is not supported, unless it equals n", param="best_of")
        if self.stream_options is not None:
            self.stream_options.check()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        if self.prompt_logprobs is not None:
            between("prompt_logprobs", self.prompt_logprobs, *self.prompt_logprobs_range)
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs"
            )
        self.sharing()

    def constraint(self) -> OutputConstraint | None:
        """Return the required form of the answer; None without a form. Raises InvalidRequest."""
        return constraint_of(self)

    def sharing(self) -> Sharing:
        """Return the sharing settings. Raises InvalidRequest."""
        return sharing_of(self.priority, self.cache_salt, self.prompt_cache_key or "")

    @property
    def usage_in_stream(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_in_chunks(self) -> bool:
        """True if every chunk of a stream includes the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def sampling_with(self, **more: Any) -> SamplingParams:
        """Return the SamplingParams of all given fields. Raises InvalidRequest, naming the parameter."""
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = _bias_of(self.logit_bias)
        return SamplingParams(**{**given, **more})


def sharing_of(priority: int | None, salt: str | None, session: str = "") -> Sharing:
    """Return the sharing settings. Raises InvalidRequest for an invalid priority or salt."""
    if priority is not None:
        between("priority", priority, -MAX_PRIORITY, MAX_PRIORITY - 1)
    if salt is not None and not _SALT.fullmatch(salt):
        raise InvalidRequest(
            "cache_salt must have 1 to 256 of the characters A-Z a-z 0-9 . _ ~ + / = -", param="cache_salt"
        )
    return Sharing(priority=priority or 0, salt=salt or "", session=session)


# fmt: off
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "allowed_token_ids", "bad_words", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "seed", "n", "prompt_logprobs", "skip_special_tokens", "max_tokens",
)
# fmt: on


def _bias_of(bias: dict[str, float]) -> dict[int, float]:
    """Return ``logit_bias`` by token id. JSON has only string keys. Raises InvalidRequest."""
    if any(not (key.isascii() and key.isdigit() and len(key) <= 10) for key in bias):
        raise InvalidRequest("logit_bias must have token ids as keys", param="logit_bias")
    return {int(key): value for key, value in bias.items()}


def form_of(
    asked: Generate,
    params: SamplingParams,
    *,
    echo: bool = False,
    prompt_only: bool = False,
    include_reasoning: bool = True,
) -> AnswerOptions:
    """Return the form of the answer. ``params``: sampling parameters of ``asked``, with logprobs in one
    form for both routes."""
    return AnswerOptions(
        model=asked.model or "",
        stream=bool(asked.stream),
        usage_in_stream=asked.usage_in_stream,
        usage_in_chunks=asked.usage_in_chunks,
        return_token_ids=bool(asked.return_token_ids),
        skip_special_tokens=asked.skip_special_tokens is not False,
        top=params.logprobs,
        prompt_logprobs=asked.prompt_logprobs is not None,
        echo=echo,
        prompt_only=prompt_only,
        include_reasoning=include_reasoning,
    )
