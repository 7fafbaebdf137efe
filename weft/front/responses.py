"""Answers in OpenAI's shapes. UNSET fields are left out of the JSON, None becomes null."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from weft.common.errors import ErrorInfo

FinishReason = Literal["stop", "length", "abort", "error"]
MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON can't write."""


class _Out(msgspec.Struct, kw_only=True):
    pass


class PromptTokensDetails(_Out):
    cached_tokens: int


class Usage(_Out):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(_Out):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(_Out):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Out):
    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(_Out):
    """One candidate at one prompt position, under its token id."""

    logprob: float
    rank: int | None
    """Counted from 1; null where it was not computed."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry a prompt token; the first, which nothing predicts, is null."""


class Message(_Out):
    role: str
    content: str
    refusal: None = None


class ChatChoice(_Out):
    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(_Out):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(_Out):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(_Out):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(_Out):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(_Out):
    """Parallel lists, one entry a token; ``text_offset`` counts characters from the start of ``text``."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(_Out):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(_Out):
    """Also the chunk of a stream: OpenAI gives both the same ``object``."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None | UnsetType = UNSET


class ModelCard(_Out):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "weft"
    max_model_len: int


class ModelList(_Out):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorBody(_Out):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(_Out):
    error: ErrorBody


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def error_response(error: ErrorInfo) -> ErrorResponse:
    """``error`` as a client sees it; ``type`` follows from the status."""
    kind = _TYPES.get(error.http_status)
    if kind is None:
        kind = "invalid_request_error" if error.http_status < 500 else "server_error"
    return ErrorResponse(error=ErrorBody(message=error.message, type=kind, param=error.param, code=error.code))


def make_usage(prompt: int, completion: int, cached: int) -> Usage:
    """Token counts of a request over all its prompts and choices."""
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


_encoder = msgspec.json.Encoder()


def to_json(value: Any) -> bytes:
    """JSON bytes of a response."""
    return _encoder.encode(value)


def event(value: Any) -> bytes:
    """``value`` as one server-sent event."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
