"""Answers in the shapes of OpenAI's API. UNSET fields are left out of the JSON, None becomes null.

Answers also show why the cached prefix of a prompt ends (``--explain-cache``).
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from weft.common.errors import ErrorInfo
from weft.text.tokenizer import Tokenizer
from weft.types.messages import CacheMiss

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
MIN_LOGPROB = -9999.0
"""Replacement for minus infinity, which JSON cannot represent."""


class ShownMiss(msgspec.Struct, kw_only=True):
    """Reason for the end of a prompt's cached part."""

    reason: str
    """"none": nothing more could be cached. "differs": an earlier sequence continues with other tokens.
    "evicted", "state" (no snapshot of a recurrent state), "salt", "computing" (right now), "new",
    "disabled". With a KV disk tier also "slower", "loading", "corrupt", "gone", "off"."""
    position: int
    """Number of prompt tokens found; with "differs", the number of equal tokens."""
    ours: str | UnsetType = UNSET
    """With "differs": the prompt's text after the equal part."""
    theirs: str | UnsetType = UNSET
    """With "differs": the earlier sequence's text after the equal part."""


class PromptTokensDetails(msgspec.Struct, kw_only=True, omit_defaults=True):
    cached_tokens: int
    cache_miss: ShownMiss | None = None
    """Explanation for the first prompt, if requested."""


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int | UnsetType = UNSET
    """Tokens of the reasoning text, of all choices of a chat. Set if there is reasoning."""
    accepted_prediction_tokens: int | UnsetType = UNSET
    """Drafted tokens in the output. Set if the server speculates."""
    rejected_prediction_tokens: int | UnsetType = UNSET
    """Drafted tokens not in the output; ``completion_tokens`` does not include these tokens."""


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Set if one of its fields is set."""


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, kw_only=True):
    """One candidate at one prompt position; the key is the token id."""

    logprob: float
    rank: int | None
    """Rank, counted from 1; null if not computed."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry per prompt token. The first entry is null, because no earlier token predicts the first token."""


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str
    """JSON text, if the call is complete."""


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | None
    """Null if the message has only calls."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """Copy of ``reasoning_content``; clients read either field."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    token_ids: list[int] | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    """Version of the weights at the last token, in a server with new weights."""
    weight_versions: list[tuple[int, str]] | UnsetType = UNSET
    """(position among the output tokens, version) of the first token, and of each change."""


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """Part of a call. The first part has all fields except the arguments; later parts have pieces of the
    arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class Delta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    """Version of the weights at the last token, in a server with new weights."""
    weight_versions: list[tuple[int, str]] | UnsetType = UNSET
    """(position among the output tokens, version) of the first token, and of each change."""


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Parallel lists with one entry per token. ``text_offset`` counts characters from the start of
    ``text``."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    """Version of the weights at the last token, in a server with new weights."""
    weight_versions: list[tuple[int, str]] | UnsetType = UNSET
    """(position among the output tokens, version) of the first token, and of each change."""


class Completion(msgspec.Struct, kw_only=True):
    """Completion, or a chunk of a stream: OpenAI gives both the same ``object``."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Embedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Vector of length 1. With ``encoding_format`` base64: the bytes of little-endian float32 numbers."""


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class ModelCard(msgspec.Struct, kw_only=True):
    """A model, with the fields of OpenAI's and of Anthropic's API: clients of both read one answer."""

    id: str
    object: Literal["model"] = "model"
    created: int
    type: Literal["model"] = "model"
    display_name: str = ""
    """Anthropic's field: the id."""
    created_at: str = ""
    """Anthropic's form of ``created``: RFC 3339, in UTC."""
    lifecycle: Literal["active"] = "active"
    owned_by: str = "weft"
    max_model_len: int
    input_modalities: tuple[str, ...] = ("text",)
    """``text``, and ``image`` if the model takes images."""
    parent: str | UnsetType = UNSET
    """Name of the model of a LoRA adapter."""
    root: str | UnsetType = UNSET
    """Folder of a LoRA adapter."""
    missing_groups: int | UnsetType = UNSET
    """Number of groups that have not loaded a LoRA adapter; absent if none."""
    status: str | UnsetType = UNSET
    """In a server of several models: unloaded, loading, loaded or draining."""
    implementation: str = "weft"
    """Source of the modeling code: ``weft`` or ``transformers``."""
    about: str | UnsetType = UNSET
    """Abilities of a bundled model."""
    example: str | UnsetType = UNSET
    """Example message for a bundled model."""
    examples: tuple[str, ...] | UnsetType = UNSET
    """Messages that a bundled model answers correctly."""
    example_image: str | UnsetType = UNSET
    """Data URL of the image for ``examples``."""

    def __post_init__(self) -> None:
        """Fill the fields that repeat others in another form."""
        self.display_name = self.id
        moment = datetime.datetime.fromtimestamp(self.created, datetime.UTC)
        self.created_at = moment.strftime("%Y-%m-%dT%H:%M:%SZ")


class ModelList(msgspec.Struct, kw_only=True):
    """All models on one page."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: Literal[False] = False
    first_id: str | None = None
    last_id: str | None = None

    def __post_init__(self) -> None:
        """Fill the ids of the page."""
        if self.data:
            self.first_id, self.last_id = self.data[0].id, self.data[-1].id


class ErrorBody(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(msgspec.Struct, kw_only=True):
    error: ErrorBody


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def error_response(error: ErrorInfo) -> ErrorResponse:
    """Return ``error`` in the shape for clients. ``type`` follows from the HTTP status."""
    error_type = _TYPES.get(error.http_status)
    if error_type is None:
        error_type = "invalid_request_error" if error.http_status < 500 else "server_error"
    return ErrorResponse(
        error=ErrorBody(message=error.message, type=error_type, param=error.param, code=error.code)
    )


def make_usage(
    prompt: int,
    completion: int,
    cached: int,
    drafts: tuple[int, int] | None = None,
    miss: ShownMiss | None = None,
) -> Usage:
    """Return the token counts of a request over all prompts and choices. ``drafts``: (accepted, rejected)."""
    details: CompletionTokensDetails | UnsetType = UNSET
    if drafts is not None:
        details = CompletionTokensDetails(
            accepted_prediction_tokens=drafts[0], rejected_prediction_tokens=drafts[1]
        )
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached, cache_miss=miss),
        completion_tokens_details=details,
    )


_encoder = msgspec.json.Encoder()


def to_json(value: Any) -> bytes:
    """Return the JSON bytes of a response."""
    return _encoder.encode(value)


def with_choices(answer: msgspec.Struct, choices: Iterable[Any]) -> Iterator[bytes]:
    """Yield the JSON of ``answer``, which must have an empty list of choices, with ``choices`` in its
    place: one piece per choice. ``choices`` is read one item at a time."""
    before, after = to_json(answer).split(NO_CHOICES, 1)
    yield before + NO_CHOICES[:-1]
    for number, choice in enumerate(choices):
        yield (b"," if number else b"") + to_json(choice)
    yield NO_CHOICES[-1:] + after


NO_CHOICES = b'"choices":[]'
"""The bytes occur in no text of an answer: quotation marks in a JSON string are escaped."""


EXPLAIN_HEADER = "x-weft-explain-cache"
TOKENS_SHOWN = 32
"""Tokens shown_miss of either side of a difference."""


def explains(mode: str, headers: Mapping[str, str]) -> bool:
    """Return True if the answer to a request with ``headers`` includes the reason. ``mode``: value of
    ``--explain-cache``; "all" explains every request, "asked" requests with the header ``EXPLAIN_HEADER``."""
    asked = headers.get(EXPLAIN_HEADER, "").strip().lower() in ("1", "true", "yes")
    return mode == "all" or (mode == "asked" and asked)


def shown_miss(miss: CacheMiss | None, prompt: bytes, tokenizer: Tokenizer) -> ShownMiss | None:
    """Return ``miss`` of ``prompt`` (int32 ids) for an answer; None for no miss. For reason "differs" the
    result has up to ``TOKENS_SHOWN`` tokens of text of both sides."""
    if miss is None:
        return None
    if miss.reason != "differs":
        return ShownMiss(reason=miss.reason, position=miss.position)
    ours, theirs = np.frombuffer(prompt, "<i4"), np.frombuffer(miss.theirs, "<i4")
    return ShownMiss(
        reason=miss.reason,
        position=miss.position,
        ours=tokenizer.decode(ours[miss.position : miss.position + TOKENS_SHOWN].tolist()),
        theirs=tokenizer.decode(theirs[:TOKENS_SHOWN].tolist()),
    )
