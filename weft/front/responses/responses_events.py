"""Answers of the Responses API and events of its streams. UNSET fields are left out, None becomes null."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: Any = []
    """A list; raw JSON if not empty."""


class ReasoningText(msgspec.Struct, kw_only=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class SummaryText(msgspec.Struct, kw_only=True):
    type: Literal["summary_text"] = "summary_text"
    text: str


class OutputMessage(msgspec.Struct, kw_only=True):
    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "in_progress"
    content: list[OutputText] = []


class ReasoningOutput(msgspec.Struct, kw_only=True):
    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] | UnsetType = UNSET
    encrypted_content: str | UnsetType | None = UNSET


class FunctionCallOutput(msgspec.Struct, kw_only=True):
    """A function call of the model."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""
    status: ItemStatus = "in_progress"


class CustomCallOutput(msgspec.Struct, kw_only=True):
    """A call of a custom tool by the model."""

    type: Literal["custom_tool_call"] = "custom_tool_call"
    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""
    status: ItemStatus = "in_progress"


Output = OutputMessage | ReasoningOutput | FunctionCallOutput | CustomCallOutput


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int
    """Input tokens computed now, and in full cache blocks afterwards."""


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int
    """Tokens of the reasoning text."""


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseAnswer(msgspec.Struct, kw_only=True):
    """A response. The fields from ``instructions`` on repeat the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    model: str
    output: list[OutputMessage | ReasoningOutput | FunctionCallOutput | CustomCallOutput | Any] = []
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    background: bool = False
    service_tier: str = "default"
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: str
    user: str | None


class Event(msgspec.Struct, kw_only=True):
    """An event of a stream, named by ``type``."""

    type: str
    sequence_number: int = 0


class ResponseLifecycle(Event, kw_only=True):
    """response.created, in_progress, completed, incomplete and failed."""

    response: Any


class ItemEvent(Event, kw_only=True):
    """response.output_item.added and done."""

    output_index: int
    item: Any


class PartEvent(Event, kw_only=True):
    """response.content_part.added and done."""

    item_id: str
    output_index: int
    content_index: int = 0
    part: Any


class SummaryPartEvent(Event, kw_only=True):
    """response.reasoning_summary_part.added and done."""

    item_id: str
    output_index: int
    summary_index: int = 0
    part: Any


class PieceEvent(Event, kw_only=True):
    """Every event with a name that ends in ``delta``."""

    item_id: str
    output_index: int
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    delta: str
    logprobs: Any = UNSET


class DoneEvent(Event, kw_only=True):
    """The joined pieces of all delta events."""

    item_id: str
    output_index: int
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: Any = UNSET


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItems(msgspec.Struct, kw_only=True):
    """A page of a response's input."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct, kw_only=True):
    """Tokens of a request's prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
