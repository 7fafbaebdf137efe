"""The messages of a chat request: known roles, known fields, text content."""

from __future__ import annotations

from typing import Any

from weft.common.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant")
MAX_PARTS = 1024

#: Fields that clients echo from an answer of theirs. With these values they say nothing.
_EMPTY: dict[str, tuple[Any, ...]] = {
    "refusal": (None,),
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "tool_calls": (None, []),
    "reasoning_content": (None,),
    "reasoning": (None,),
    "name": (None,),
}
#: Variables of ``apply_chat_template`` itself; a request may not reach them through chat_template_kwargs.
RESERVED_KWARGS = frozenset(
    "messages conversation tools documents tokenize chat_template tokenizer add_generation_prompt "
    "continue_final_message padding truncation max_length return_tensors return_dict return_assistant_tokens_mask "
    "tokenizer_kwargs add_special_tokens".split()
)


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with role, content and, where given, name; nothing else. Raises InvalidRequest by place."""
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: dict[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(f"{place}.role is required and must be a string", param=f"{place}.role")
    if role not in ROLES:
        raise InvalidRequest(f"{place}.role must be one of {', '.join(ROLES)}", param=f"{place}.role")
    made: dict[str, Any] = {"role": role, "content": _content(message.get("content"), f"{place}.content")}
    for name, value in message.items():
        if name in ("role", "content") or value in _EMPTY.get(name, ()):
            continue
        if name != "name":
            shown = name if name in _EMPTY else "field"
            raise InvalidRequest(f"{place}: a {shown} that this server does not support", param=f"{place}.{shown}")
        if not isinstance(value, str) or not 1 <= len(value) <= 64:
            raise InvalidRequest(f"{place}.name must be a string of 1 to 64 characters", param=f"{place}.name")
        made["name"] = value
    return made


def _content(content: Any, place: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not 1 <= len(content) <= MAX_PARTS:
        raise InvalidRequest(f"{place} must be a string or a list of text parts", param=place)
    return [_part(part, f"{place}[{index}]") for index, part in enumerate(content)]


def _part(part: Any, place: str) -> dict[str, str]:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{place} must be an object with a type", param=place)
    if part["type"] != "text":
        raise InvalidRequest(f"{place}: only parts of type text are supported", param=place)
    if not isinstance(part.get("text"), str) or part.keys() != {"type", "text"}:
        raise InvalidRequest(f"{place} must hold a text and nothing else", param=place)
    return {"type": "text", "text": part["text"]}


def check_template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Variables for the template. Raises InvalidRequest for one that would change how it is applied."""
    for name in kwargs or {}:
        if name in RESERVED_KWARGS or not name.isidentifier() or name.startswith("_"):
            raise InvalidRequest(
                "chat_template_kwargs may hold variables of the template only", param="chat_template_kwargs"
            )
    return dict(kwargs or {})
