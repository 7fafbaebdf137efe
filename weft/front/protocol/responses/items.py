"""Items of a request's input, added to a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.parse import convert, printable
from weft.front.protocol.responses.responses_tools import joined
from weft.front.protocol.turns import Parts, Turns
from weft.front.sealed_reasoning import unsealed
from weft.text.images import CACHE_HINTS, ImagePart, detail_of


class _Item(msgspec.Struct, frozen=True, kw_only=True):
    id: str | None = None
    status: str | None = None


class MessageItem(_Item, frozen=True, kw_only=True):
    role: str
    content: str | list[dict[str, Any]]
    phase: str | None = None
    """commentary or final_answer; not shown to the model."""


class CallItem(_Item, frozen=True, kw_only=True):
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | None = None


class OutputItem(_Item, frozen=True, kw_only=True):
    call_id: str
    output: str | list[dict[str, Any]] = ""


class CustomCallItem(_Item, frozen=True, kw_only=True):
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class ReasoningItem(_Item, frozen=True, kw_only=True):
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


class SearchItem(_Item, frozen=True, kw_only=True):
    """A search that another server ran. The item has no results, so the model does not see the item."""

    action: dict[str, Any] | None = None


class Adder:
    """Adds items to turns, in order. Raises InvalidRequest, naming the item."""

    def __init__(self, turns: Turns) -> None:
        """``turns`` receives the items."""
        self._turns = turns

    def add(self, item: Mapping[str, Any], where: str) -> None:
        """Add one item.

        Raises InvalidRequest, naming ``where``, for an unsupported type or an invalid item.
        """
        item_type = item.get("type")
        if item_type is None and "role" in item:
            item_type = "message"
        if not isinstance(item_type, str):
            raise InvalidRequest(f"{where} must have a type", param=where)
        if item_type not in self._TYPES:
            raise InvalidRequest(
                f"{where}: items of type {printable(item_type, 40)} are not supported by this server; "
                "supported types: " + ", ".join(self._TYPES),
                param=where,
                code="unsupported_parameter",
            )
        cls, add = self._TYPES[item_type]
        # Items of earlier answers come back with all fields of their server, nulls included.
        given = {name: value for name, value in item.items() if value is not None}
        add(self, convert(where, given, cls), where)

    def _message(self, item: MessageItem, where: str) -> None:
        """Add a message of any role. Raises InvalidRequest for an unknown role."""
        if item.role in ("system", "developer"):
            self._turns.system(_text(item.content, where))
        elif item.role == "user":
            self._turns.user(_parts(item.content, where) or [{"type": "text", "text": ""}])
        elif item.role == "assistant":
            self._turns.says(_text(item.content, where))
        else:
            raise InvalidRequest(
                f"{where}.role must be user, assistant, system or developer", param=f"{where}.role"
            )

    def _call(self, item: CallItem, where: str) -> None:
        self._turns.calls(item.call_id, joined(item.namespace, item.name), item.arguments)

    def _custom_call(self, item: CustomCallItem, where: str) -> None:
        arguments = msgspec.json.encode({"input": item.input}).decode()
        self._turns.calls(item.call_id, joined(item.namespace, item.name), arguments)

    def _output(self, item: OutputItem, where: str) -> None:
        parts = _parts(item.output, where, "output")
        texts = [part["text"] for part in parts if not isinstance(part, ImagePart)]
        self._turns.result(item.call_id, "\n".join(texts) if len(texts) == len(parts) else parts)

    def _reasoning(self, item: ReasoningItem, where: str) -> None:
        """Add reasoning: the text, else the encrypted content, else the summary.

        Unreadable reasoning is left out.
        """
        reasoning = _parts_of(item.content, "reasoning_text", where)
        reasoning = reasoning or unsealed(item.encrypted_content or "")
        reasoning = reasoning or _parts_of(item.summary, "summary_text", where)
        if reasoning:
            self._turns.thinks(reasoning)

    def _search(self, item: SearchItem, where: str) -> None:
        pass

    # Functions of the class: methods of an object, kept in the object, would be a cycle of references.
    _TYPES: ClassVar[Mapping[str, tuple[type[Any], Callable[[Any, Any, str], None]]]] = {
        "message": (MessageItem, _message),
        "function_call": (CallItem, _call),
        "function_call_output": (OutputItem, _output),
        "custom_tool_call": (CustomCallItem, _custom_call),
        "custom_tool_call_output": (OutputItem, _output),
        "reasoning": (ReasoningItem, _reasoning),
        "web_search_call": (SearchItem, _search),
    }


_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def _text(content: str | list[dict[str, Any]], where: str) -> str:
    return "\n".join(_texts(content, where))


def _texts(content: str | list[dict[str, Any]], where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_part(part, f"{where}.content[{number}]") for number, part in enumerate(content)]


def _parts(content: str | list[dict[str, Any]], where: str, field: str = "content") -> Parts:
    """Return texts and images as content parts. Raises InvalidRequest."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    made: Parts = []
    for number, part in enumerate(content):
        place = f"{where}.{field}[{number}]"
        if part.get("type") in ("input_image", "image_url"):
            made.append(_image(part, place))
        else:
            made.append({"type": "text", "text": _part(part, place)})
    return made


def _image(part: dict[str, Any], where: str) -> ImagePart:
    """Return the image of a part.

    Raises InvalidRequest without a URL, for a bad detail, and for other fields.
    """
    url = part.get("image_url")
    if isinstance(url, Mapping):  # the form of chat
        given = {name: value for name, value in url.items() if value is not None}
        part = {**part, "detail": given.pop("detail", part.get("detail"))}
        url = given.get("url") if given.keys() == {"url"} else None
    rest = {name for name, value in part.items() if value is not None} - {
        "type",
        "image_url",
        "detail",
        *CACHE_HINTS,
    }
    if rest or not isinstance(url, str):
        raise InvalidRequest(
            f"{where}: an input_image must have image_url, and may have detail; file_id is not supported",
            param=where,
            code="unsupported_parameter",
        )
    return ImagePart(url, where, detail_of(part.get("detail"), where), "input_image")


def _part(part: dict[str, Any], where: str) -> str:
    """Return the text of a part. Raises InvalidRequest for a part without text."""
    part_type = part.get("type")
    text = (
        part.get("refusal") if part_type == "refusal" else part.get("text") if part_type in _TEXTS else None
    )
    if isinstance(text, str):
        return text
    if not isinstance(part_type, str):
        raise InvalidRequest(f'{where} must have a type, such as "input_text"', param=where)
    if part_type in (*_TEXTS, "refusal"):
        field = "refusal" if part_type == "refusal" else "text"
        raise InvalidRequest(f"{where}.{field} must be a string", param=f"{where}.{field}")
    raise InvalidRequest(
        f"{where}: this server supports only text parts here, not {printable(part_type, 40)}",
        param=where,
        code="unsupported_parameter",
    )


def _parts_of(parts: list[dict[str, Any]] | None, part_type: str, where: str) -> str:
    """Return the texts of parts of ``part_type``, one per line. Raises InvalidRequest for other parts."""
    texts = []
    for part in parts or ():
        if part.get("type") not in (part_type, "text") or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where} may hold only parts of type {part_type}, with text", param=where)
        texts.append(part["text"])
    return "\n".join(texts)
