"""Content blocks and tools in requests of the Messages API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.parse import convert, printable
from weft.text.echoes import arguments_text


class _Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    cache_control: dict[str, Any] | None = None


class TextBlock(_Block, frozen=True, kw_only=True):
    text: str
    citations: list[dict[str, Any]] | None = None
    """Citations of an earlier answer; not shown to the model."""


class TextSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="text"):
    data: str
    media_type: Literal["text/plain"] = "text/plain"


class ContentSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="content"):
    content: str | list[dict[str, Any]]
    """A text, or blocks of text and images."""


class DocumentBlock(_Block, frozen=True, kw_only=True):
    """A plain text, or blocks of text and images, with a title."""

    source: TextSource | ContentSource
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | None = None

    @property
    def heads(self) -> tuple[str | None, ...]:
        """Texts shown to the model before the content."""
        return self.title, self.context

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """The content: a text or blocks."""
        return self.source.data if isinstance(self.source, TextSource) else self.source.content


class SearchResultBlock(_Block, frozen=True, kw_only=True):
    """A result of a search that the client ran."""

    source: str
    """A URL or another name of the place."""
    title: str
    content: list[dict[str, Any]]
    """Blocks of text."""
    citations: dict[str, Any] | None = None

    @property
    def heads(self) -> tuple[str | None, ...]:
        """Texts shown to the model before the content."""
        return self.title, self.source


class Base64Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="base64"):
    data: str
    media_type: str = ""
    """No effect: the bytes decide the format. Clients write ``image/jpg``, for example."""

    @property
    def url(self) -> str:
        return f"data:;base64,{self.data}"


class UrlSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="url"):
    url: str


class ImageBlock(_Block, frozen=True, kw_only=True):
    source: Base64Source | UrlSource


class ToolUseBlock(_Block, frozen=True, kw_only=True):
    id: str
    name: str
    input: Any = None
    """An object. Any other value comes from a call that was cut off."""
    caller: dict[str, Any] | None = None
    toolset_name: str | None = None


class ToolResultBlock(_Block, frozen=True, kw_only=True):
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    toolset_name: str | None = None


class ServerResultBlock(_Block, frozen=True, kw_only=True):
    """The result of a tool that another server ran."""

    tool_use_id: str
    content: Any = None
    is_error: bool | None = None

    @property
    def text(self) -> str:
        """Text shown to the model: the text of text blocks, or JSON without encrypted fields."""
        content = self.content
        if isinstance(content, list):
            texts = [_text_of(block) for block in content]
            if None not in texts:
                return "\n".join(text for text in texts if text)
            return arguments_text([_readable(block) for block in content])
        return arguments_text(_readable(content))


def _text_of(block: Any) -> str | None:
    """Return the text of a text block; None for any other block."""
    text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
    return text if isinstance(text, str) else None


def _readable(content: Any) -> Any:
    """Return ``content`` without null and encrypted fields."""
    if not isinstance(content, dict):
        return content
    return {
        name: value
        for name, value in content.items()
        if value is not None and not name.startswith("encrypted_")
    }


class ThinkingBlock(_Block, frozen=True, kw_only=True):
    thinking: str
    signature: str = ""


class RedactedBlock(_Block, frozen=True, kw_only=True):
    """Reasoning readable only by its maker. Not shown to the model."""

    data: str


Shown = TextBlock | DocumentBlock | SearchResultBlock | ImageBlock
"""Blocks of a user or of a result."""
Block = Shown | ToolUseBlock | ToolResultBlock | ServerResultBlock | ThinkingBlock | RedactedBlock

_TEXTS: dict[str, type[Any]] = {"text": TextBlock}
_SOURCE: dict[str, type[Any]] = {**_TEXTS, "image": ImageBlock}
_RESULT: dict[str, type[Any]] = {**_SOURCE, "document": DocumentBlock, "search_result": SearchResultBlock}
_USER: dict[str, type[Any]] = {**_RESULT, "tool_result": ToolResultBlock}
_SERVER_RESULTS = (
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_result",
)
_ASSISTANT: dict[str, type[Any]] = {
    **_TEXTS,
    "tool_use": ToolUseBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedBlock,
    # The conversation may have begun at another server, with tools that the server ran.
    "server_tool_use": ToolUseBlock,
    "mcp_tool_use": ToolUseBlock,
    **dict.fromkeys(_SERVER_RESULTS, ServerResultBlock),
}
Place = Literal["system", "user", "assistant", "result", "source", "text"]
_BLOCK_TYPES: dict[Place, dict[str, type[Any]]] = {
    "system": _TEXTS,
    "user": _USER,
    "assistant": _ASSISTANT,
    "result": _RESULT,
    "source": _SOURCE,
    "text": _TEXTS,
}


def blocks(content: Any, place: Place, where: str) -> list[Any]:
    """Return the blocks of a content, which may be a plain text. ``place`` selects the allowed types.

    Raises InvalidRequest, naming ``where``.
    """
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)]
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of content blocks", param=where)
    block_types = _BLOCK_TYPES[place]
    echoed = place == "assistant"
    return [_block(block, block_types, echoed, f"{where}[{number}]") for number, block in enumerate(content)]


def _block(block: Any, block_types: dict[str, type[Any]], echoed: bool, where: str) -> Any:
    """Return one block. ``echoed``: the block belongs to an answer sent back by the client, of this or
    another server. Unknown fields of such a block are no instructions, and are dropped. Raises
    InvalidRequest, naming ``where``."""
    block_type = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block_type, str):
        raise InvalidRequest(f"{where} must be an object with a type", param=where)
    if block_type not in block_types:
        raise InvalidRequest(
            f"{where}: blocks of type {printable(block_type, 40)} are not supported here; supported types: "
            + ", ".join(block_types),
            param=where,
            code="unsupported_parameter",
        )
    source = block.get("source") if block_type == "document" else None
    if isinstance(source, dict) and source.get("type") in ("base64", "url", "file"):
        raise InvalidRequest(
            f"{where}: this server reads no PDF files; send the document as text, with source.type text or "
            "content",
            param=where,
            code="unsupported_parameter",
        )
    if echoed:
        known = {field.name for field in msgspec.structs.fields(block_types[block_type])}
        block = {name: value for name, value in block.items() if name in known}
    return convert(where, block, block_types[block_type])


class ToolBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool run by the client."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    """Examples, shown to the model with the description."""
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    """No effect: arguments are always streamed as they arrive."""
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None


def tool(value: Any, where: str) -> ToolBlock:
    """Return a tool. Raises InvalidRequest, naming ``where``, for a tool that the server cannot offer."""
    tool_type = value.get("type") if isinstance(value, dict) else None
    if isinstance(tool_type, str) and tool_type != "custom":
        raise InvalidRequest(
            f"{where}: tools of type {printable(tool_type, 40)} are not supported, because this server runs "
            "no tools; describe the tool with name and input_schema, and run the tool in the client",
            param=where,
            code="unsupported_parameter",
        )
    made: ToolBlock = convert(where, value, ToolBlock)
    return made
