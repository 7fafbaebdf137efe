"""Check the messages of a request. The kinds of content parts are preserved.

``conversation.py`` converts checked messages for a template.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from weft.common.errors import InvalidRequest
from weft.text.echoes import REASONING, CallIds, CallMade, arguments_text, reasoning_of, without_reasoning
from weft.text.images import VIDEO_PARTS, ImagePart, VideoPart, as_chat, fps_of, image_part, video_part
from weft.text.tokenizer import check_text
from weft.text.videos import video_file

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 10_000
MAX_CALLS = 512
"""Maximum tool calls per message."""
_NOT_BUILT = ("function_call", "audio", "refusal", "tool_calls", "tool_call_id", "prefix", "partial")
"""Unsupported fields that clients send back empty. A value in such a field is refused."""
_REASONING = ("reasoning_content", "reasoning")
_NO_EFFECT = ("id", "cache_control")
"""Ignored fields of any message: client-side ids, and cache hints (prefix caching is automatic here)."""
# fmt: off
_ASKS = frozenset((
    "content", "name", "tool_calls", "tool_call_id", "function_call", "audio", "refusal", "prefix", "partial",
    *_REASONING,
))
# fmt: on
"""Meaningful fields of assistant messages. Other fields of assistant messages are dropped, because clients
return answers with every field of the server.
"""


class TextPart(msgspec.Struct, frozen=True):
    """Text of a message."""

    text: str


ShownPart: TypeAlias = ImagePart | VideoPart
"""An image or a video."""
Part: TypeAlias = TextPart | ShownPart
"""A piece of a message's content."""
WITH_IMAGES: tuple[Role, ...] = ("user", "tool")
"""Roles with images and videos allowed: input of the user, and results of tools."""


class Shows(NamedTuple):
    """The limits for images and videos in a conversation."""

    most: int
    """Maximum number of images and frame groups in all messages together."""
    group: int = 0
    least: int = 0
    """Frames per group (0: the model takes no videos), and minimum frames of a video (0: one group)."""
    no_videos: str = ""
    """Reason why a model of a family with videos accepts none; "" for other models."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One checked message of a conversation."""

    role: Role
    content: tuple[Part, ...] | None = None
    """None only for an assistant message with calls and without content."""
    name: str | None = None
    reasoning: str | None = None
    """The assistant's reasoning."""
    calls: tuple[CallMade, ...] = ()
    tool_call_id: str | None = None
    """For a tool message: the id of the answered call."""

    def text(self) -> str:
        """Return the text of all text parts, joined by line ends."""
        return "\n".join(part.text for part in self.content or () if isinstance(part, TextPart))

    @property
    def shown(self) -> tuple[ShownPart, ...]:
        """Images and videos, in order."""
        return tuple(part for part in self.content or () if not isinstance(part, TextPart))


def check_messages(messages: Any, shows: Shows | None = None) -> list[ChatMessage]:
    """Return the checked messages of a request. ``shows`` is None for a model without images.

    Raises InvalidRequest with the name of the invalid part.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest("messages must be a non-empty list", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages has more than {MAX_MESSAGES} messages; send fewer", param="messages")
    checked = [_check_message(message, f"messages[{at}]", shows) for at, message in enumerate(messages)]
    if any(message.tool_call_id == "" or any(not call.id for call in message.calls) for message in checked):
        checked = _with_ids(checked)
    if shows is not None:
        _check_number([part for message in checked for part in message.shown], shows)
    return checked


def _with_ids(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return ``messages`` with a non-empty id for each call and each result."""
    ids = CallIds(call.id for message in messages for call in message.calls)
    made: list[ChatMessage] = []
    for message in messages:
        if message.calls:
            if not (made and made[-1].calls):
                ids.begin()
            calls = tuple(
                msgspec.structs.replace(call, id=ids.call(call.id, call.name)) for call in message.calls
            )
            message = msgspec.structs.replace(message, calls=calls)
        elif message.tool_call_id is not None:
            ident = ids.result(message.tool_call_id, message.name)
            message = msgspec.structs.replace(message, tool_call_id=ident)
        made.append(message)
    return made


def _check_number(shown: Sequence[ShownPart], shows: Shows) -> None:
    """Raise InvalidRequest for more images than ``shows.most``.

    Each frame group of a video counts as one image.
    """
    counts = [part.groups(shows.group) if isinstance(part, VideoPart) else 1 for part in shown]
    total = sum(counts)
    if total <= shows.most:
        return
    # Report the first part beyond the limit.
    ends = itertools.accumulate(counts)
    first = next(part for part, end in zip(shown, ends, strict=True) if end > shows.most)
    frames = f" ({shows.group} frames of a video count as one)" if shows.group > 1 else ""
    raise InvalidRequest(
        f"{first.where}: the request has {total} images{frames}; the limit is {shows.most} "
        "(--limit-mm-per-prompt)",
        param=first.where,
        code="too_many_images",
    )


def _check_message(message: Any, where: str, shows: Shows | None) -> ChatMessage:
    """Return one checked message.

    Null fields are ignored. Raise InvalidRequest with the name of the invalid field.
    """
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
        _check_field(fields, role, key, value, where, shows if role in WITH_IMAGES else None)
    # These checks need all fields, in whatever order the client sent the fields.
    if role == "tool" and "tool_call_id" not in fields:
        raise InvalidRequest(f"{where}.tool_call_id is missing", param=f"{where}.tool_call_id")
    if "content" not in fields:
        if role not in ("assistant", "tool"):
            raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
        if not fields.get("calls"):  # an empty assistant message as clients send back, or an empty result
            fields["content"] = (TextPart(""),)
    return ChatMessage(**fields)


def _holds_nothing(value: Any) -> bool:
    if isinstance(value, dict):
        return all(one is None for one in value.values())
    return value in ([], "") or value is False


def _check_field(
    fields: dict[str, Any], role: Role, key: Any, value: Any, where: str, shows: Shows | None
) -> None:
    """Check one non-null field of a message and store the result in ``fields``.

    Fields without effect are ignored. Raise InvalidRequest with the field's name for an invalid or
    unsupported field.
    """
    if key == "content":
        if role == "assistant" and isinstance(value, list):
            value, reasoning = without_reasoning(value)
            _add_reasoning(fields, reasoning, f"{where}.content")
        fields["content"] = _content(value, f"{where}.content", shows)
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
        if value:  # the plain field wins over reasoning in other forms
            fields["reasoning"] = value
    elif key == "refusal" and role == "assistant" and isinstance(value, str):
        check_text(value, f"{where}.refusal")
        if value and "content" not in fields:
            fields["content"] = (TextPart(value),)
    elif key in REASONING and role == "assistant":
        _add_reasoning(fields, reasoning_of(value), f"{where}.{key}")
    elif key in _NO_EFFECT or _dropped(role, key):
        return
    # Echo the field's name only if the name is short and plain: the name comes from the client.
    elif not (key in (*_NOT_BUILT, *_REASONING) and _holds_nothing(value)):
        shown = key if isinstance(key, str) and re.fullmatch(r"\w{1,40}", key) else "a field"
        raise InvalidRequest(
            f"{where}.{shown} is not supported in a message of the role {role}", param=f"{where}.{shown}"
        )


def _add_reasoning(fields: dict[str, Any], reasoning: str, where: str) -> None:
    check_text(reasoning, where)
    if reasoning:
        fields.setdefault("reasoning", reasoning)


def _dropped(role: Role, key: Any) -> bool:
    """Return True for a field of an assistant message without meaning for the conversation."""
    return role == "assistant" and isinstance(key, str) and key not in _ASKS


def _check_calls(calls: Any, where: str) -> tuple[CallMade, ...]:
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise InvalidRequest(f"{where} must be a list of at most {MAX_CALLS} calls", param=where)
    return tuple(_check_call(call, f"{where}[{number}]") for number, call in enumerate(calls))


def _check_call(call: Any, where: str) -> CallMade:
    """Return one checked tool call. Raise InvalidRequest with the name of the invalid field."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or call.get("type") not in (None, "function"):
        raise InvalidRequest(f'{where} must be an object of type "function"', param=where)
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{where}.function must be an object", param=f"{where}.function")
    # The id is required: a tool message refers to the id of its call. See CallIds for the id "".
    ident = call.get("id")
    if not isinstance(ident, str):
        raise InvalidRequest(f"{where}.id must be a string", param=f"{where}.id")
    check_text(ident, f"{where}.id")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(
            f"{where}.function.name must be a non-empty string", param=f"{where}.function.name"
        )
    check_text(name, f"{where}.function.name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | Mapping | None):
        raise InvalidRequest(
            f"{where}.function.arguments must be JSON text", param=f"{where}.function.arguments"
        )
    if isinstance(arguments, str):
        check_text(arguments, f"{where}.function.arguments")
    return CallMade(id=ident, name=name, arguments=arguments_text(arguments))


def _content(content: Any, where: str, shows: Shows | None) -> tuple[Part, ...]:
    """Return the content as checked parts; a string becomes one text part, and no part is empty text.

    Raises InvalidRequest.
    """
    if isinstance(content, str):
        check_text(content, where)
        return (TextPart(content),)
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts", param=where)
    if not content:
        return (TextPart(""),)
    return tuple(_part(part, f"{where}[{number}]", where, shows) for number, part in enumerate(content))


def _part(part: Any, where: str, content: str, shows: Shows | None) -> Part:
    """Return one checked content part.

    ``content`` names the whole content in errors. Raise InvalidRequest for an unsupported type or an invalid
    part.
    """
    if isinstance(part, ImagePart):  # made by the reader of another API: JSON cannot contain such an object
        if shows is not None:
            return part
        raise _unsupported(part.part_type, part.where, part.where)
    part = as_chat(part)
    part_type = part.get("type") if isinstance(part, Mapping) else None
    if shows is not None and part_type in ("image_url", "image") and isinstance(part, Mapping):
        return image_part(part, str(part_type), where)
    if shows is not None and part_type in VIDEO_PARTS and isinstance(part, Mapping):
        return _video(part, where, shows)
    if not isinstance(part, Mapping) or part_type in ("text", "refusal"):
        text = part.get(part_type) if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f'{where} must be a part of the form {{"type": "text", "text": ...}}', param=content
            )
        check_text(text, content)
        return TextPart(text)
    if not isinstance(part_type, str):
        raise InvalidRequest(f'{where} must have a type, such as "text"', param=content)
    shown = part_type if re.fullmatch(r"\w{1,40}", part_type) else "an unknown name"
    raise _unsupported(shown, where, content)


def _unsupported(part_type: str, where: str, param: str) -> InvalidRequest:
    """Return the error for a part of the type ``part_type``."""
    return InvalidRequest(
        f"{where}: parts of type {part_type} are not supported here; this model, or a message of this role, "
        "accepts only text",
        param=param,
        code="unsupported_parameter",
    )


def _video(part: Mapping[str, Any], where: str, shows: Shows) -> VideoPart:
    """Return a checked video part.

    Raise InvalidRequest if the model accepts no videos or the part is invalid.
    """
    if not shows.group:
        why = shows.no_videos and f": {shows.no_videos}"
        message = f"{where}: this model accepts images, but no videos{why}"
        raise InvalidRequest(message, param=where, code="unsupported_parameter")
    found = video_part(part, where, shows.least or shows.group)
    if isinstance(found, VideoPart):
        return found
    return video_file(part, found, where, shows.least or shows.group, fps_of(part, where))
