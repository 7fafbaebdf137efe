"""Messages of a request: what they may be, checked, with the kinds of their parts kept.

What a template gets of them is made in ``chat.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from weft.common.errors import InvalidRequest
from weft.text.tokenizer import check_text

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 10_000
MAX_CALLS = 512
"""Tool calls of one message."""
MAX_DEPTH = 64
"""Levels of a call's arguments."""
_NOT_BUILT = (
    "function_call",
    "audio",
    "annotations",
    "refusal",
    "tool_calls",
    "tool_call_id",
    "provider_specific_fields",
)
"""Fields clients send back with nothing in them; with a value they are refused where they have no meaning."""
_REASONING = ("reasoning_content", "reasoning")


class TextPart(msgspec.Struct, frozen=True):
    """Text of a message."""

    text: str


Part: TypeAlias = TextPart
"""A piece of a message's content; further kinds have classes of their own."""


class CallMade(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call that the assistant made, as a client sends it back."""

    id: str
    name: str
    arguments: str
    """As they came: JSON text of an object, unless the model wrote them wrongly."""

    def values(self) -> dict[str, Any] | None:
        """The arguments as an object; None where they are none."""
        if not self.arguments.strip():
            return {}
        try:
            decoded = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return decoded if isinstance(decoded, dict) and not too_deep(decoded, MAX_DEPTH) else None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation, checked."""

    role: Role
    content: tuple[Part, ...] | None = None
    """None where there is none: an assistant's with calls."""
    name: str | None = None
    reasoning: str | None = None
    """The assistant's thought."""
    calls: tuple[CallMade, ...] = ()
    tool_call_id: str | None = None
    """Whose result a tool message is."""

    def text(self) -> str:
        """The text of all parts, in lines of their own."""
        return "\n".join(part.text for part in self.content or ())


def check_messages(messages: Any) -> list[Message]:
    """Messages of a request. Raises InvalidRequest, naming what is wrong."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest("messages must be a list that is not empty", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages holds more than {MAX_MESSAGES} messages", param="messages")
    return [_check_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def too_deep(value: Any, limit: int) -> bool:
    """Whether ``value`` is nested in more than ``limit`` levels. Never recurses deeper than that."""
    if not isinstance(value, list | dict):
        return False
    if limit <= 0:
        return True
    items = value.values() if isinstance(value, dict) else value
    return any(too_deep(item, limit - 1) for item in items)


def _check_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object with role and content", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    fields: dict[str, Any] = {"role": role}
    for key, value in message.items():
        if key == "role":
            continue
        if value is None:
            continue
        _check_field(fields, role, key, value, where)
    if role == "tool" and "tool_call_id" not in fields:
        raise InvalidRequest(f"{where}.tool_call_id is missing", param=f"{where}.tool_call_id")
    if "content" not in fields:
        if role != "assistant":
            raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
        if not fields.get("calls"):  # an assistant that said nothing, as clients send it back
            fields["content"] = (TextPart(""),)
    return Message(**fields)


def _holds_nothing(value: Any) -> bool:
    if isinstance(value, dict):
        return all(one is None for one in value.values())
    return value in ([], "")


def _check_field(fields: dict[str, Any], role: Role, key: Any, value: Any, where: str) -> None:
    """Takes one field of a message that has a value."""
    if key == "content":
        if value == [] and role == "assistant":
            value = ""
        fields["content"] = _content(value, f"{where}.content")
    elif key == "name" and isinstance(value, str):
        check_text(value, f"{where}.name")
        fields["name"] = value
    elif key == "tool_calls" and role == "assistant":
        fields["calls"] = _check_calls(value, f"{where}.tool_calls")
    elif key == "tool_call_id" and role == "tool" and isinstance(value, str):
        check_text(value, f"{where}.tool_call_id")
        fields["tool_call_id"] = value
    elif key in _REASONING and role == "assistant" and isinstance(value, str):
        check_text(value, f"{where}.{key}")
        if value:
            fields["reasoning"] = value
    elif key == "refusal" and role == "assistant" and isinstance(value, str):
        check_text(value, f"{where}.refusal")
        if value and "content" not in fields:
            fields["content"] = (TextPart(value),)
    elif not (key in (*_NOT_BUILT, *_REASONING) and _holds_nothing(value)):
        shown = key if isinstance(key, str) and re.fullmatch(r"\w{1,40}", key) else "a field"
        raise InvalidRequest(
            f"{where}.{shown} is not supported in a message of the role {role}", param=f"{where}.{shown}"
        )


def _check_calls(calls: Any, where: str) -> tuple[CallMade, ...]:
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise InvalidRequest(f"{where} must be a list of at most {MAX_CALLS} calls", param=where)
    return tuple(_check_call(call, f"{where}[{number}]") for number, call in enumerate(calls))


def _check_call(call: Any, where: str) -> CallMade:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or call.get("type", "function") != "function":
        raise InvalidRequest(f'{where} must be an object of type "function"', param=where)
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{where}.function must be an object", param=f"{where}.function")
    ident = call.get("id")
    if not isinstance(ident, str) or not ident:
        raise InvalidRequest(f"{where}.id must be a string", param=f"{where}.id")
    check_text(ident, f"{where}.id")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}.function.name must be a string", param=f"{where}.function.name")
    check_text(name, f"{where}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if arguments is None:
        arguments = ""
    if not isinstance(arguments, str):
        raise InvalidRequest(
            f"{where}.function.arguments must be JSON text", param=f"{where}.function.arguments"
        )
    check_text(arguments, f"{where}.function.arguments")
    return CallMade(id=ident, name=name, arguments=arguments)


def _content(content: Any, where: str) -> tuple[Part, ...]:
    if isinstance(content, str):
        check_text(content, where)
        return (TextPart(content),)
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{where} must be a string or a list of parts", param=where)
    return tuple(_part(part, f"{where}[{number}]", where) for number, part in enumerate(content))


def _part(part: Any, where: str, content: str) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind in ("text", "refusal"):
        text = part.get(kind) if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f'{where} must be a part of the form {{"type": "text", "text": ...}}', param=content
            )
        check_text(text, content)
        return TextPart(text)
    shown = kind if isinstance(kind, str) and re.fullmatch(r"\w{1,40}", kind) else "that type"
    raise InvalidRequest(
        f"{where}: parts of type {shown} are not supported, only text; this model takes no other input",
        param=content,
    )
