"""Requests of the Messages API, converted to the common form of all APIs."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.conversation import AnswerOptions, Conversation, OutputConstraint
from weft.front.protocol.messages import blocks as b
from weft.front.protocol.messages.messages_request import (
    Adaptive,
    ChooseAny,
    ChooseNone,
    ChooseTool,
    CountRequest,
    Disabled,
    Enabled,
    MessagesRequest,
)
from weft.front.protocol.parse import printable
from weft.front.protocol.tools import ToolUse
from weft.front.protocol.turns import Parts, Turns
from weft.front.sealed_reasoning import unsealed
from weft.grammar import build
from weft.text.echoes import arguments_text
from weft.text.images import ImagePart
from weft.text.parsing.parser import Tool
from weft.types.sampling import SamplingParams

ATTRIBUTION = ("x-anthropic-billing-header:",)
"""Prefixes of billing lines, which some clients put before their instructions. The lines differ between
calls."""
NAMES = {"stop": "stop_sequences"}
"""Conversation parameter -> parameter name in this API."""


class MessagesFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the request for the answer."""

    max_tokens: int = 0
    """Output limit, as requested."""
    omit_reasoning: bool = False
    """True if reasoning goes out only in signatures."""
    attribution: bool = False
    """True if an attribution line was dropped from the prompt."""


def conversation(
    asked: CountRequest, *, system_inside: bool, keep_attribution: bool
) -> tuple[Conversation, MessagesFacts]:
    """Return (request in common form, facts for the answer).

    ``system_inside``: see ``Turns``. ``keep_attribution``: keep attribution lines in the prompt. Raises
    InvalidRequest.
    """
    turns = Turns(system_inside=system_inside, join_users=True)
    system, moved = _system(asked.system, keep_attribution)
    if system:
        turns.system(system)
    for number, message in enumerate(asked.messages):
        _add(turns, message, f"messages[{number}]")
    messages = turns.messages
    continues = _continues(messages)
    # A request that only counts tokens has no sampling parameters.
    params = _sampling(asked) if isinstance(asked, MessagesRequest) else SamplingParams(max_tokens=1)
    made = Conversation(
        messages=messages,
        params=params,
        form=AnswerOptions(
            model=asked.model or "", stream=isinstance(asked, MessagesRequest) and bool(asked.stream)
        ),
        tools=_tools(asked),
        constraint=_constraint(asked),
        effort=_effort(asked),
        thinking_budget=asked.thinking.budget_tokens if isinstance(asked.thinking, Enabled) else None,
        opens=not continues,
        continues=continues,
    )
    thinking = asked.thinking
    omits = isinstance(thinking, Enabled | Adaptive) and thinking.display == "omitted"
    return made, MessagesFacts(max_tokens=params.max_tokens or 0, omit_reasoning=omits, attribution=moved)


def _sampling(asked: MessagesRequest) -> SamplingParams:
    """Return the sampling parameters; absent parameters get the defaults. Raises InvalidRequest."""
    given: dict[str, Any] = {
        "max_tokens": asked.max_tokens,
        "stop": asked.stop_sequences,
        "stop_in": asked.stop_in,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "min_p": asked.min_p,
        "repetition_penalty": asked.repetition_penalty,
    }
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _constraint(asked: CountRequest) -> OutputConstraint | None:
    if asked.form is None:
        return None
    param = "output_config" if asked.output_format is None else "output_format"
    return OutputConstraint(grammar=build.json_schema(asked.form.schema, param=param), param=param)


def _system(system: str | list[dict[str, Any]] | None, keep_attribution: bool) -> tuple[str, bool]:
    """Return (system prompt, True if an attribution line was dropped); ("", False) without a system prompt.

    Raises InvalidRequest.
    """
    if not system:
        return "", False
    texts = [block.text for block in b.blocks(system, "system", "system")]
    first, _, rest = texts[0].partition("\n")
    moved = first.startswith(ATTRIBUTION) and not keep_attribution
    if moved:
        texts[0] = rest
    return "\n\n".join(text for text in texts if text), moved


def _add(turns: Turns, message: dict[str, Any], where: str) -> None:
    """Add one message of the request to ``turns``. Raises InvalidRequest, naming ``where``."""
    role = message.get("role")
    unknown = {name for name, value in message.items() if value is not None}
    unknown -= {"role", "content", "id", "cache_control"}
    # An answer sent back by the client has all fields of its server.
    if unknown and role != "assistant":
        shown = printable(min(unknown), 40)
        raise InvalidRequest(f"{where} has an unknown field: {shown}", param=where)
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(f"{where}.role must be user, assistant or system", param=f"{where}.role")
    if "content" not in message:
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    found = b.blocks(message["content"], role, f"{where}.content")
    if role == "system":
        turns.system("\n\n".join(block.text for block in found))
    elif role == "user":
        _add_user(turns, found, f"{where}.content")
    else:
        for block in found:
            _add_assistant(turns, block)


def _add_user(turns: Turns, found: list[b.Block], where: str) -> None:
    """Add a user's blocks to ``turns``: results as messages of their own, other blocks as user messages.

    Raises InvalidRequest.
    """
    parts: Parts = []
    results = False
    for number, block in enumerate(found):
        # Results are separate messages, so text before a result ends the user's message.
        if isinstance(block, b.ToolResultBlock):
            results = True
            if parts:
                turns.user(parts)
                parts = []
            turns.result(block.tool_use_id, _result(block, f"{where}[{number}].content"))
        else:
            assert isinstance(block, b.Shown)
            parts += _shown(block, f"{where}[{number}]")
    if parts or not results:
        turns.user(parts or [{"type": "text", "text": ""}])


def _shown(block: b.Shown, where: str) -> Parts:
    """Return the content parts for a block of a user or a result. Raises InvalidRequest."""
    if isinstance(block, b.ImageBlock):
        return [ImagePart(block.source.url, where, part_type="image")]
    if isinstance(block, b.TextBlock):
        return [{"type": "text", "text": block.text}]
    if (block.citations or {}).get("enabled"):
        raise InvalidRequest(
            f"{where}: citations are not supported by this server; set citations.enabled to false",
            param=where,
            code="unsupported_parameter",
        )
    searched = isinstance(block, b.SearchResultBlock)
    nested = f"{where}.content" if searched else f"{where}.source.content"
    inner = b.blocks(block.content, "text" if searched else "source", nested)
    parts = [part for number, one in enumerate(inner) for part in _shown(one, f"{nested}[{number}]")]
    heads: Parts = [{"type": "text", "text": head} for head in block.heads if head]
    return _joined([*heads, *parts])


def _joined(parts: Parts) -> Parts:
    """Return ``parts`` with all texts joined by line ends into one part, unless there are images."""
    texts = [part["text"] for part in parts if not isinstance(part, ImagePart)]
    return parts if len(texts) < len(parts) else [{"type": "text", "text": "\n".join(filter(None, texts))}]


def _result(block: b.ToolResultBlock, where: str) -> str | Parts:
    """Return the result of a call: plain text if there are no images.

    The text of a failed call starts with "Error". Raises InvalidRequest.
    """
    found = [] if block.content is None else b.blocks(block.content, "result", where)
    parts: Parts = [part for number, one in enumerate(found) for part in _shown(one, f"{where}[{number}]")]
    texts = [part["text"] for part in parts if not isinstance(part, ImagePart)]
    if len(texts) < len(parts):
        # With images the parts stay separate; otherwise the texts are joined.
        return [{"type": "text", "text": "Error:"}, *parts] if block.is_error else parts
    return _marked("\n".join(texts), block.is_error)


def _marked(text: str, is_error: bool | None) -> str:
    """Return the text of a result. The text of a failed call starts with "Error"."""
    return f"Error: {text}" if is_error and not text.startswith("Error") else text


def _add_assistant(turns: Turns, block: b.Block) -> None:
    """Add a block of the assistant to ``turns``: text, call, result of another server's tool, or reasoning.

    Unreadable reasoning is left out.
    """
    if isinstance(block, b.TextBlock):
        turns.says(block.text)
    elif isinstance(block, b.ToolUseBlock):
        turns.calls(block.id, block.name, arguments_text(block.input))
    elif isinstance(block, b.ServerResultBlock):
        turns.result(block.tool_use_id, _marked(block.text, block.is_error))
    elif isinstance(block, b.ThinkingBlock):
        reasoning = block.thinking or unsealed(block.signature)
        if reasoning:
            turns.thinks(reasoning)


def _continues(messages: list[dict[str, Any]]) -> bool:
    """Return True if the answer continues the assistant's last message. Removes an empty last message of
    the assistant. Raises InvalidRequest for a last message with calls."""
    last = messages[-1] if messages else {"role": "user"}
    if last["role"] != "assistant":
        return False
    if last.get("tool_calls"):
        raise InvalidRequest(
            "messages: the last message calls a tool; add a user message with the tool_result block",
            param="messages",
        )
    if not last["content"]:
        messages.pop()
        return False
    return True


def _tools(asked: CountRequest) -> ToolUse:
    """Return the tools and the choice among them. Raises InvalidRequest."""
    tools = [_tool(value, f"tools[{number}]") for number, value in enumerate(asked.tools or ())]
    choice = asked.tool_choice
    parallel = choice is None or isinstance(choice, ChooseNone) or not choice.disable_parallel_tool_use
    if isinstance(choice, ChooseTool):
        return ToolUse.checked(tools, mode="required", names=[choice.name], parallel=parallel)
    if isinstance(choice, ChooseAny):
        return ToolUse.checked(tools, mode="required", parallel=parallel)
    mode: Literal["none", "auto"] = "none" if isinstance(choice, ChooseNone) else "auto"
    return ToolUse.checked(tools, mode=mode, parallel=parallel)


def _tool(value: dict[str, Any], where: str) -> Tool:
    """Return a tool in common form, with its examples in the description. Raises InvalidRequest."""
    tool = b.tool(value, where)
    about = tool.description or ""
    if tool.input_examples:
        shown = "\n".join(json.dumps(example, ensure_ascii=False) for example in tool.input_examples)
        about = f"{about}\n\nExamples of its input:\n{shown}".strip()
    return Tool(name=tool.name, description=about, parameters=tool.input_schema, strict=bool(tool.strict))


def _effort(asked: CountRequest) -> str | None:
    """Return the reasoning effort in the form of chat's ``reasoning_effort``; None leaves the decision to
    the model."""
    if isinstance(asked.thinking, Disabled):
        return "none"
    effort = None if asked.output_config is None else asked.output_config.effort
    if effort is None:
        return "medium" if isinstance(asked.thinking, Enabled) else None
    return effort
