"""Bodies of requests of the Responses API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.chat_request import check_metadata
from weft.front.protocol.fields import ServiceTier, asks_no_stream_options, is_one_of
from weft.front.protocol.parse import Body, between, short
from weft.types.sampling import MAX_TOP_LOGPROBS, StopIn

MAX_LABEL = 4096
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_INCLUDES = frozenset(
    (
        LOGPROBS,
        ENCRYPTED,
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    )
)
"""All names except the first two belong to tools that this server never uses, so there is nothing to
include."""
UNSUPPORTED = frozenset(
    (
        "access_programs",
        "background",
        "context_management",
        "conversation",
        "image",
        "max_tool_calls",
        "moderation",
        "prompt",
        "truncation",
    )
)


class _ResponsesStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Reasoning(_ResponsesStruct, frozen=True, kw_only=True):
    """Reasoning effort, and the form of shown reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Any value shows the reasoning itself as its summary."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Older name of ``summary``."""
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    """No effect: the chat template decides which earlier reasoning the model sees."""
    mode: Literal["standard"] | None = None

    @property
    def summarizes(self) -> bool:
        """True if a summary is requested."""
        return (self.summary or self.generate_summary) is not None


class PlainFormat(_ResponsesStruct, frozen=True, kw_only=True, tag="text", tag_field="type"):
    """Any text."""


class ObjectFormat(
    _ResponsesStruct, frozen=True, kw_only=True, omit_defaults=True, tag="json_object", tag_field="type"
):
    """Any JSON object, or JSON valid under ``schema``."""

    schema: dict[str, Any] | None = None


class NamedFormat(_ResponsesStruct, frozen=True, kw_only=True, tag="json_schema", tag_field="type"):
    """JSON valid under a schema."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    """False: the schema loses the keywords that a grammar cannot enforce. Otherwise such a schema is
    refused."""


class TextConfig(_ResponsesStruct, frozen=True, kw_only=True):
    """Required form of the answer's text."""

    format: PlainFormat | ObjectFormat | NamedFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """No effect: a hint that no chat template knows."""


class ChosenFunction(_ResponsesStruct, frozen=True, kw_only=True):
    """A tool of the request."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class ChooseFunction(_ResponsesStruct, frozen=True, kw_only=True, tag="function", tag_field="type"):
    """Choice of one function, to be called."""

    name: str


class ChooseCustom(_ResponsesStruct, frozen=True, kw_only=True, tag="custom", tag_field="type"):
    """Choice of one custom tool, to be called."""

    name: str


class ChooseAllowed(_ResponsesStruct, frozen=True, kw_only=True, tag="allowed_tools", tag_field="type"):
    """Call some of the tools; with ``required``, at least one."""

    mode: Literal["auto", "required"]
    tools: list[ChosenFunction]


ResponseToolChoice = Literal["none", "auto", "required"] | ChooseFunction | ChooseCustom | ChooseAllowed


class ResponseStreamOptions(_ResponsesStruct, frozen=True, kw_only=True):
    """Extra contents of a stream."""

    include_obfuscation: Literal[False] | None = None


class TokensRequest(Body, frozen=True, kw_only=True):
    """POST /v1/responses/input_tokens, and the parameters common to both routes."""

    neutral: ClassVar[Mapping[str, Callable[[Any], bool]]] = {
        "tools": is_one_of([]),
        "background": is_one_of(False),
        # With "auto", too, a prompt beyond the context is refused.
        "truncation": is_one_of("disabled", "auto"),
        "context_management": is_one_of([]),
        "service_tier": is_one_of("auto", "default"),
        "text": is_one_of({}),
        "reasoning": is_one_of({}),
        "include": is_one_of([]),
        "metadata": is_one_of({}),
        "prompt_cache_options": is_one_of({}),
        "previous_response_id": is_one_of(""),
        "stream_options": asks_no_stream_options,
    }
    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED

    model: str | None = None
    """Model name; default: the server's model."""
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None

    def check(self) -> None:
        """Raise InvalidRequest for a label that is too long, and without input or a previous response."""
        if self.model is not None:
            short("model", self.model)
        if not self.input and self.previous_response_id is None:
            raise InvalidRequest(
                "input must be a non-empty string or list of items, unless previous_response_id is set",
                param="input",
            )


class ResponsesRequest(TokensRequest, frozen=True, kw_only=True):
    """POST /v1/responses."""

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_in: StopIn | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    """Label without effect, like the labels below; but ``prompt_cache_key`` names the session."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    service_tier: ServiceTier | None = None
    """No effect: all tiers are served alike, and the answer reports ``default``."""

    def check(self) -> None:
        """Raise InvalidRequest for parameters out of range, unsupported, or without a needed parameter."""
        super().check()
        # Only the length of labels is bounded.
        for label in ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"):
            if len(getattr(self, label) or "") > MAX_LABEL:
                raise InvalidRequest(f"{label} must have at most {MAX_LABEL} characters", param=label)
        check_metadata(self.metadata)
        if self.max_output_tokens is not None:
            between("max_output_tokens", self.max_output_tokens, 1, 1 << 31)
        if self.top_logprobs is not None:
            between("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        for name in self.include or ():
            if name not in _INCLUDES:
                raise InvalidRequest(
                    "include may contain only " + ", ".join(sorted(_INCLUDES)), param="include"
                )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")

    def includes(self, name: str) -> bool:
        """Return True if ``include`` contains ``name``."""
        return name in (self.include or ())
