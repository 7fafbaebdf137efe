"""Requests as clients may write them: strict types, every field known, each error naming its parameter.

A field that is absent and one that is null mean the same. What Weft does not do yet is refused with 400 by
name, unless its value asks for nothing (``NEUTRAL``); what would change an answer is never accepted and
ignored. Labels (``user`` and the like) are checked and have no effect. Field names and meanings follow
OpenAI's API reference; the fields beyond it (``top_k``, ``min_p``, ``stop_token_ids`` ...) have the names
other servers use for them.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from weft.common.errors import InvalidRequest
from weft.types.sampling import MAX_N, MAX_TOP_LOGPROBS, SamplingParams

MAX_PROMPTS = 256
"""Prompts of one completions request."""
MAX_SEQUENCES = 1024
"""Prompts times ``n`` of one request."""
MAX_METADATA = 16
MAX_NAME = 512
"""Characters of a model name, a user, a metadata key or value."""
DEFAULT_COMPLETION_TOKENS = 16

#: OpenAI's and other servers' parameters that Weft knows of and does not do.
# fmt: off
UNSUPPORTED = frozenset((
    "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "response_format", "audio",
    "modalities", "prediction", "reasoning_effort", "service_tier", "store", "verbosity",
    "web_search_options", "moderation", "suffix", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "guided_decoding_backend", "structured_outputs", "grammar", "json_schema", "regex",
    "ebnf", "use_beam_search", "length_penalty", "early_stopping", "chat_template", "documents",
    "mm_processor_kwargs", "priority", "cache_salt", "kv_transfer_params", "truncate_prompt_tokens",
    "thinking_token_budget", "vllm_xargs", "logits_processors", "spaces_between_special_tokens",
    "return_tokens_as_token_ids", "lora_path", "typical_p", "mirostat_mode", "no_repeat_ngram_size",
    "cache_prompt",
))
# fmt: on


def _is(*neutral: Any) -> Callable[[Any], bool]:
    """Whether a value is one of ``neutral``. JSON's true is not 1, though Python's is."""
    return lambda value: any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral
    )


#: Values that ask for nothing, so that they are dropped, as if absent: a field's default in the API that it
#: comes from (OpenAI's, vLLM's, llama.cpp's), where that is also what Weft does. Not here: fields whose
#: default depends on the model (``reasoning_effort``), and values that ask for more than Weft does.
NEUTRAL: dict[str, Callable[[Any], bool]] = {
    # Without tools, which are refused unless empty, there is nothing to choose from.
    "tools": _is([]),
    "tool_choice": _is("none", "auto"),
    "parallel_tool_calls": _is(True, False),
    "functions": _is([]),
    "function_call": _is("none", "auto"),
    "response_format": _is({"type": "text"}),
    "modalities": _is(["text"]),
    "service_tier": _is("auto", "default"),
    "store": _is(False),
    "verbosity": _is("medium"),
    "metadata": _is({}),
    "user": _is(""),
    "safety_identifier": _is(""),
    "prompt_cache_key": _is(""),
    "prompt_cache_retention": _is(""),
    "suffix": _is(""),
    "echo": _is(False),
    "logprobs": _is(False),
    "top_logprobs": _is(0),
    "use_beam_search": _is(False),
    "length_penalty": _is(1),
    "early_stopping": _is(False),
    "documents": _is([]),
    "mm_processor_kwargs": _is({}),
    "logits_processors": _is([]),
    "spaces_between_special_tokens": _is(True),
    "return_tokens_as_token_ids": _is(False),
    "priority": _is(0),
    "cache_salt": _is(""),
    "vllm_xargs": _is({}),
    "typical_p": _is(1),
    "mirostat_mode": _is(0),
    "no_repeat_ngram_size": _is(0),
    "cache_prompt": _is(True),
    "grammar": _is(""),
}


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Only false is accepted, which asks for nothing."""
    continuous_usage_stats: bool | None = None
    """Only false is accepted, likewise."""

    def check(self) -> None:
        for name in ("include_obfuscation", "continuous_usage_stats"):
            if getattr(self, name):
                raise InvalidRequest(
                    f"stream_options.{name} is not supported by this server",
                    param="stream_options",
                    code="unsupported_parameter",
                )


class _Generate(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters that both kinds of completion share."""

    model: str
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
    """Only the value of ``n`` is accepted, which asks for nothing."""
    user: str | None = None
    """The caller's own label of its user. Nothing in Weft depends on it, nor on the three below."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def check(self) -> None:
        """What types alone can't say. Raises InvalidRequest."""
        _short("model", self.model)
        for label in ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"):
            if (text := getattr(self, label)) is not None:
                _short(label, text)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest("best_of is not supported, unless it equals n", param="best_of")
        if self.stream_options is not None:
            self.stream_options.check()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs can't be streamed; set stream to false", param="prompt_logprobs"
            )

    @property
    def usage_in_stream(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _sampling(self, **more: Any) -> SamplingParams:
        """SamplingParams of the fields that were given. Raises InvalidRequest, naming the parameter."""
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = _bias(self.logit_bias)
        return SamplingParams(**{**given, **more})


# fmt: off
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "allowed_token_ids", "bad_words", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "seed", "n", "prompt_logprobs", "skip_special_tokens", "max_tokens",
)
# fmt: on


class ChatRequest(_Generate, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Whether the answer goes on from the last message, the assistant's."""
    metadata: dict[str, str] | None = None
    """Labels for stored completions; Weft stores none."""

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        if self.top_logprobs is not None:
            _between("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
            if not self.logprobs:
                raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.max_completion_tokens is not None:
            _between("max_completion_tokens", self.max_completion_tokens, 1, 1 << 31)
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise InvalidRequest(
                    "max_tokens and max_completion_tokens differ; send one", param="max_tokens"
                )
        _check_metadata(self.metadata)

    def sampling(self) -> SamplingParams:
        more: dict[str, Any] = {}
        if self.max_completion_tokens is not None:
            more["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            more["logprobs"] = self.top_logprobs or 0
        return self._sampling(**more)


class CompletionRequest(_Generate, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    """A text, token ids, a list of texts or a list of lists of token ids."""
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def prompt_only(self) -> bool:
        """Whether the prompt is asked for, with its logprobs, and no output."""
        return self.max_tokens == 0

    def check(self) -> None:
        super().check()
        if self.prompt_only and not self.echo:
            raise InvalidRequest("max_tokens must be at least 1, unless echo is true", param="max_tokens")
        if self.prompt_only and self.min_tokens:
            raise InvalidRequest("min_tokens must not be greater than max_tokens", param="min_tokens")
        if self.logprobs is not None:
            _between("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs is not None and self.echo:
            raise InvalidRequest(
                "echo with logprobs gives those of the prompt; drop prompt_logprobs", param="prompt_logprobs"
            )
        prompts = self.prompts()
        if self.n is not None:
            _between("n", self.n, 1, MAX_N)
        if len(prompts) * (self.n or 1) > MAX_SEQUENCES:
            raise InvalidRequest(f"prompts times n must be at most {MAX_SEQUENCES}", param="n")

    def prompts(self) -> list[str] | list[list[int]]:
        """Every prompt, as text or as token ids. Raises InvalidRequest."""
        if isinstance(self.prompt, str):
            return [_prompt_text(self.prompt)]
        items = self.prompt
        if not items:
            raise InvalidRequest("prompt must not be empty", param="prompt")
        if type(items[0]) is int:
            return [_prompt_ids(items)]
        if len(items) > MAX_PROMPTS:
            raise InvalidRequest(f"prompt must hold at most {MAX_PROMPTS} prompts", param="prompt")
        if isinstance(items[0], str):
            return [_prompt_text(item) for item in items]
        return [_prompt_ids(item) for item in items]

    def sampling(self) -> SamplingParams:
        more: dict[str, Any] = {}
        if self.logprobs is not None:
            more["logprobs"] = self.logprobs
            if self.echo:
                more["prompt_logprobs"] = self.logprobs
        if self.prompt_only:
            more["max_tokens"] = 1  # the engine makes at least one, which is not shown: prompt_only.py
        return self._sampling(**more)


R = TypeVar("R", ChatRequest, CompletionRequest)


def parse(body: bytes, cls: type[R]) -> R:
    """The request in ``body``. Raises InvalidRequest (400) for anything that is not exactly one."""
    try:
        data = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None
    except (msgspec.MsgspecError, ValueError):
        raise InvalidRequest("the body is not valid JSON", code="invalid_json") from None
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    fields = _fields(cls)
    values: dict[str, Any] = {}
    for name, value in data.items():
        if value is None or (name in NEUTRAL and NEUTRAL[name](value)):
            continue
        if name not in fields:
            raise _refused(name)
        values[name] = _convert(name, value, fields[name])
    for field in msgspec.structs.fields(cls):
        if field.required and field.name not in values:
            raise InvalidRequest(
                f"{field.name} is required", param=field.name, code="missing_required_parameter"
            )
    request = cls(**values)
    request.check()
    return request


@functools.cache
def _fields(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _refused(name: str) -> InvalidRequest:
    if name in UNSUPPORTED:
        return InvalidRequest(
            f"{name} is not supported by this server", param=name, code="unsupported_parameter"
        )
    shown = printable(name, 64)
    return InvalidRequest(f"unknown parameter: {shown}", param=shown, code="unknown_parameter")


def _convert(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{name}: {_reason(error)}", param=name) from None
    except RecursionError:
        raise InvalidRequest(f"{name} is nested too deeply", param=name) from None


def _reason(error: msgspec.ValidationError) -> str:
    text = printable(str(error).replace("`", ""), 200)
    return text[:1].lower() + text[1:]


def printable(text: str, limit: int) -> str:
    """``text`` cut and without control characters, for showing a client its own words."""
    return "".join(c if c.isprintable() else "?" for c in text[:limit])


def _short(name: str, text: str) -> None:
    if not 1 <= len(text) <= MAX_NAME:
        raise InvalidRequest(f"{name} must have 1 to {MAX_NAME} characters", param=name)


def _between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}", param=name)


def _bias(bias: dict[str, float]) -> dict[int, float]:
    """``logit_bias`` by token id. JSON has string keys only."""
    if any(not (key.isascii() and key.isdigit() and len(key) <= 10) for key in bias):
        raise InvalidRequest("logit_bias must have token ids as keys", param="logit_bias")
    return {int(key): value for key, value in bias.items()}


def _check_metadata(metadata: dict[str, str] | None) -> None:
    items = [text for pair in (metadata or {}).items() for text in pair]
    if len(items) > 2 * MAX_METADATA or any(len(text) > MAX_NAME for text in items):
        raise InvalidRequest(
            f"metadata must hold at most {MAX_METADATA} pairs of at most {MAX_NAME} characters",
            param="metadata",
        )


def _prompt_text(text: Any) -> str:
    if not isinstance(text, str) or not text:
        raise InvalidRequest(
            "prompt must be a text that is not empty, token ids, or a list of either", param="prompt"
        )
    return text


def _prompt_ids(ids: Any) -> list[int]:
    """Token ids of one prompt; that they are in the vocabulary is checked on submission."""
    if not isinstance(ids, list) or not ids or any(type(i) is not int or not 0 <= i < 1 << 31 for i in ids):
        raise InvalidRequest(
            "prompt must hold token ids: integers from 0 to the vocabulary's size", param="prompt"
        )
    return ids
