"""Checked messages and tools in the form that a chat template wants them.

Templates differ in what they do with a call's arguments: most write them with ``tojson`` or loop over them
and want an object, some append them to a string and want JSON text. Which it is, is found out by a rendering
with a probe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from weft.common.errors import InvalidRequest
from weft.text.marks import Marks
from weft.text.messages import CallMade, Message, TextPart
from weft.text.parsing.parser import Tool
from weft.text.template import ChatTemplate
from weft.text.video import VideoPart

ToolForm: TypeAlias = Literal["object", "text"]
"""What a template wants a call's arguments as."""
_PROBE = "probe7f3c"


def tool_form(template: ChatTemplate, named: Mapping[str, Any]) -> ToolForm:
    """How ``template`` wants the arguments of calls; ``named`` are variables it gets besides messages."""
    if "tool_calls" not in template.source and "arguments" not in template.source:
        return "object"
    for form in ("object", "text"):
        arguments: Any = {_PROBE: "x"} if form == "object" else json.dumps({_PROBE: "x"})
        try:
            text = template.render(_probe(template, named, arguments))
        except InvalidRequest:
            continue
        if _PROBE in text and f"{{'{_PROBE}'" not in text:
            return "object" if form == "object" else "text"
    return "object"


def _probe(template: ChatTemplate, named: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    def content(text: str) -> Any:
        return [{"type": "text", "text": text}] if template.wants_parts else text

    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": content("u")},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": content("t"), "tool_call_id": "call00000", "name": "f"},
    ]
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    return {
        **named,
        "messages": messages,
        "add_generation_prompt": True,
        "tools": [{"type": "function", "function": function}],
        "documents": None,
    }


def tool_objects(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as OpenAI writes them, which is what templates are made for."""
    made: list[dict[str, Any]] = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        if tool.parameters:
            function["parameters"] = tool.parameters
        made.append({"type": "function", "function": function})
    return made


def for_template(
    message: Message, template: ChatTemplate, form: ToolForm, marks: Marks, mark: str
) -> dict[str, Any]:
    """A message as the template gets it, with marks in all of its strings."""
    role: str = message.role
    if role == "developer" and not template.names_developer:
        role = "system"  # what the template knows the same thing as
    result: dict[str, Any] = {"role": role, "content": None}
    if message.content is not None and (template.wants_parts or message.shown):
        result["content"] = [
            {"type": "text", "text": marks.around(part.text, mark)}
            if isinstance(part, TextPart)
            else {"type": "video" if isinstance(part, VideoPart) else "image"}
            for part in message.content
        ]
    elif message.content is not None:
        result["content"] = marks.around(message.text(), mark)
    if message.name is not None:
        result["name"] = marks.around(message.name, mark)
    if message.tool_call_id is not None:
        result["tool_call_id"] = marks.around(message.tool_call_id, mark)
    if message.calls:
        result["tool_calls"] = [_call(call, form, marks, mark) for call in message.calls]
    if message.reasoning is not None:
        result.update(_reasoning(message, template, marks.around(message.reasoning, mark)))
    return result


def _call(call: CallMade, form: ToolForm, marks: Marks, mark: str) -> dict[str, Any]:
    arguments: Any = call.shown() if form == "object" else call.shown_text()
    return {
        "id": marks.around(call.id, mark),
        "type": "function",
        "function": {
            "name": marks.around(call.name, mark),
            "arguments": marks.everywhere(arguments, mark),
        },
    }


def _reasoning(message: Message, template: ChatTemplate, text: str) -> dict[str, str]:
    """A thought under the name that the template reads."""
    if "thinking" in template.source and "reasoning_content" not in template.source:
        both = message.calls and message.content is not None and message.text()
        return {} if both else {"thinking": text}  # such a template refuses both beside calls
    return {"reasoning_content": text, "reasoning": text}
