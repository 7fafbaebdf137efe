"""Checked messages and tools in the form that a chat template reads: see ``forms.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from weft.text.forms import TemplateForm, ToolForm, content_of, without_content
from weft.text.marks import Marks
from weft.text.messages import CallMade, Message, TextPart
from weft.text.parsing.parser import Tool
from weft.text.template import ChatTemplate
from weft.text.video import VideoPart


def tool_objects(tools: Sequence[Tool], form: TemplateForm) -> list[dict[str, Any]]:
    """Return tools in OpenAI's format, the usual format for templates. Missing fields are filled in if the
    template needs the fields.
    """
    made: list[dict[str, Any]] = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.name}
        if tool.description or form.describes:
            function["description"] = tool.description
        if tool.parameters:
            function["parameters"] = tool.parameters
        elif form.needs_parameters:
            function["parameters"] = {"type": "object", "properties": {}}
        made.append({"type": "function", "function": function})
    return made


def conversation_of(
    messages: Sequence[Message], template: ChatTemplate, form: TemplateForm, marks: Marks, mark: str
) -> list[dict[str, Any]]:
    """Return messages in the template's form, with marks in all strings.

    Messages may be split so that each has one call. A result gets the name of its function if the template
    needs the name.
    """
    made: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in _one_call_each(messages) if form.one_call else messages:
        # A result names only the id of the call; some templates need the function's name too.
        names.update((call.id, call.name) for call in message.calls)
        one = _for_template(message, template, form, marks, mark)
        if message.role == "tool" and form.result_names:
            one.setdefault("name", marks.around(names.get(message.tool_call_id or "", ""), mark))
        made.append(one)
    return made


def _one_call_each(messages: Sequence[Message]) -> Iterable[Message]:
    """Yield messages with at most one call each, every call directly followed by its result."""
    waiting: dict[str, Message] = {}
    for number, message in enumerate(messages):
        if len(message.calls) < 2:
            # A result already yielded behind its call is skipped here.
            if waiting.pop(message.tool_call_id or "", None) is None:
                yield message
            continue
        waiting = {}
        for result in messages[number + 1 :]:
            if result.role != "tool":
                break
            waiting.setdefault(result.tool_call_id or "", result)
        for at, call in enumerate(message.calls):
            spoken = {} if at == 0 else {"content": None, "reasoning": None}
            yield msgspec.structs.replace(message, calls=(call,), **spoken)
            if call.id in waiting:
                yield waiting[call.id]
        waiting = {call.id: waiting[call.id] for call in message.calls if call.id in waiting}


def _for_template(
    message: Message, template: ChatTemplate, form: TemplateForm, marks: Marks, mark: str
) -> dict[str, Any]:
    """Return one message as the dict for the template, in its form and with marks in all strings.

    Reasoning is left out where the template refuses reasoning beside calls.
    """
    role: str = message.role
    if role == "developer" and not template.names_developer:
        role = "system"  # the template's name for the same role
    result: dict[str, Any] = {"role": role, "content": _content(message, role, form, marks, mark)}
    if message.calls and (message.content is None or (_is_empty(message) and not form.keeps_empty)):
        result = without_content(form, result)
    if message.name is not None:
        result["name"] = marks.around(message.name, mark)
    if message.tool_call_id is not None:
        result["tool_call_id"] = marks.around(message.tool_call_id, mark)
    if message.calls:
        result["tool_calls"] = [_call(call, form.arguments, marks, mark) for call in message.calls]
    if message.reasoning is not None and not (
        form.thought_alone and message.calls and not _is_empty(message)
    ):
        thought = marks.around(message.reasoning, mark)
        result.update(dict.fromkeys(form.thoughts, thought))
    return result


def _is_empty(message: Message) -> bool:
    return not message.shown and not message.text()


def _content(message: Message, role: str, form: TemplateForm, marks: Marks, mark: str) -> Any:
    """Return the content for the template: None, a string, or a list of parts, with marks in all texts."""
    if message.content is None:
        return None
    if message.shown:
        return [
            {"type": "text", "text": marks.around(part.text, mark)}
            if isinstance(part, TextPart)
            else {"type": "video" if isinstance(part, VideoPart) else "image"}
            for part in message.content
        ]
    # Without images, the form decides between a string and a list of parts.
    texts = [part.text for part in message.content if isinstance(part, TextPart)]
    content = content_of(form, role, texts)
    return (
        marks.around(content, mark)
        if isinstance(content, str)
        else [{**part, "text": marks.around(part["text"], mark)} for part in content]
    )


def _call(call: CallMade, form: ToolForm, marks: Marks, mark: str) -> dict[str, Any]:
    """Return one call as the dict for the template, with marks in all strings."""
    arguments: Any = call.shown() if form == "object" else call.shown_text()
    return {
        "id": marks.around(call.id, mark),
        "type": "function",
        "function": {
            "name": marks.around(call.name, mark),
            "arguments": marks.everywhere(arguments, mark),
        },
    }
