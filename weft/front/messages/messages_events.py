"""Answers of the Messages API and events of its streams. UNSET fields are left out, None becomes null."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "model_context_window_exceeded"
]


class OpenTextBlock(msgspec.Struct, kw_only=True):
    type: Literal["text"] = "text"
    text: str
    citations: tuple[()] = ()
    """Always empty, and never null: Vercel's AI SDK refuses null, and Anthropic's schema a missing field."""


class OpenThinkingBlock(msgspec.Struct, kw_only=True):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class Direct(msgspec.Struct, frozen=True, kw_only=True):
    """Caller of the tool: the model itself."""

    type: Literal["direct"] = "direct"


class OpenToolUseBlock(msgspec.Struct, kw_only=True):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: Any
    """An object."""
    caller: Direct = Direct()


ContentBlock = OpenTextBlock | OpenThinkingBlock | OpenToolUseBlock


class ThinkingTokens(msgspec.Struct, kw_only=True):
    thinking_tokens: int
    """Tokens of the reasoning text."""


class CacheCreation(msgspec.Struct, kw_only=True):
    """Newly cached tokens. Blocks stay while there is room, without a fixed lifetime."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int = 0


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts. Prompt length: ``input_tokens + cache_read_input_tokens +
    cache_creation_input_tokens``."""

    input_tokens: int
    """Prompt tokens computed now, and not in a full cache block afterwards."""
    cache_creation_input_tokens: int
    """Prompt tokens computed now, and in full cache blocks afterwards."""
    cache_read_input_tokens: int
    """Prompt tokens found in the cache."""
    output_tokens: int
    cache_creation: CacheCreation
    output_tokens_details: ThinkingTokens
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"
    inference_geo: None = None


class DeltaUsage(msgspec.Struct, kw_only=True):
    """Usage of the whole message."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    server_tool_use: None = None


class MessageAnswer(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OpenTextBlock | OpenThinkingBlock | OpenToolUseBlock | Any]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None
    usage: MessageUsage


class MessageStart(msgspec.Struct, kw_only=True):
    type: Literal["message_start"] = "message_start"
    message: MessageAnswer


class BlockStart(msgspec.Struct, kw_only=True):
    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: OpenTextBlock | OpenThinkingBlock | OpenToolUseBlock | Any


class BlockDelta(msgspec.Struct, kw_only=True):
    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: Any


class BlockStop(msgspec.Struct, kw_only=True):
    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class BlockText(msgspec.Struct, kw_only=True):
    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingPiece(msgspec.Struct, kw_only=True):
    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class SignaturePiece(msgspec.Struct, kw_only=True):
    type: Literal["signature_delta"] = "signature_delta"
    signature: str


class InputPiece(msgspec.Struct, kw_only=True):
    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


class Ending(msgspec.Struct, kw_only=True):
    stop_reason: StopReason | None
    """Null for an aborted message."""
    stop_sequence: str | None
    stop_details: None = None
    container: None = None


class MessageDelta(msgspec.Struct, kw_only=True):
    type: Literal["message_delta"] = "message_delta"
    delta: Ending
    usage: DeltaUsage


class MessageStop(msgspec.Struct, kw_only=True):
    type: Literal["message_stop"] = "message_stop"


class MessagesErrorDetail(msgspec.Struct, kw_only=True):
    type: str
    message: str
    param: str | UnsetType | None = UNSET


class MessagesError(msgspec.Struct, kw_only=True):
    """Body of an error answer, and last event of a failed stream."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail


class TokenCount(msgspec.Struct, kw_only=True):
    """Tokens of a request's prompt."""

    input_tokens: int
