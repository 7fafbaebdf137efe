"""Read the ``response_template`` of transformers as a declaration.

A template names the fields of an assistant message. For each field, the template gives the opening and
closing texts (or regular expressions), the form of the body, and the conversion of the parsed body. A
declaration can express these parts: reasoning between tags; calls as JSON objects, as lists of objects, as a
name and JSON, or as a name and tags. For any other template the result is None, and the family must be known.

Source: ``transformers.utils.chat_parsing`` (version 1 of the format).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from weft.text.parsing.declaration import (
    BLANK,
    LINE,
    NAME,
    Arguments,
    Blank,
    Call,
    CallObject,
    JsonArguments,
    Name,
    Optional,
    OutputFormat,
    Parameters,
    ReasoningMarks,
    Section,
    Syntax,
    check_format,
)

_REASONING = ("thinking", "reasoning_content", "reasoning")
_PIECE = re.compile(
    r"(?P<blank>\\[sn](?:[*+?]\??)?)"
    r"|\(\?P<(?P<group>\w+)>(?:\\[wSd]|\[(?:\\.|[^\]\\])+\]|\.)(?:[+*]\??|\{\d*,?\d*\})?\)"
    r"|\(\?:(?P<optional>(?:\\.|[^()\\])*)\)\?"
    r"|\\(?P<escaped>[^A-Za-z0-9])"
    r"|(?P<plain>[^\\()\[\]{}.*+?|^$])",
    re.DOTALL,
)
"""One piece of a regular expression made of texts, white space and named groups only."""


class _Unreadable(Exception):
    """A declaration cannot express this template."""


def read_response_template(template: Any) -> OutputFormat | None:
    """Return the declaration for a ``response_template``.

    Return None if a declaration cannot express the template, or if the template declares neither reasoning
    nor calls.
    """
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping) or template.get("version", 1) != 1:
        return None
    try:
        reasoning = [
            reasoning_marks
            for name in _REASONING
            if name in fields
            for reasoning_marks in _reasoning(fields[name])
        ]
        calls = _calls(fields["tool_calls"]) if "tool_calls" in fields else ()
        _check_content(fields.get("content"))
        # Fields of no interest here (for example the role) are ignored.
        made = OutputFormat(name="response_template", reasoning=tuple(reasoning), calls=calls)
        check_format(made)
    except (_Unreadable, ValueError):
        return None
    return made if made.reasoning or made.calls else None


def _reasoning(field: Any) -> list[ReasoningMarks]:
    """Return the reasoning tags of a field. Raise _Unreadable unless there is one closing text."""
    opens = _texts(field, "open")
    closes = _texts(field, "close")
    if len(closes) != 1 or field.get("content", "text") != "text":
        raise _Unreadable
    close = closes[0].strip()
    if not opens:  # the output starts inside the reasoning
        return [ReasoningMarks(open=close.replace("/", "", 1), close=close, implied=True)]
    return [ReasoningMarks(open=text.strip(), close=close) for text in opens]


def _check_content(field: Any) -> None:
    """Raise _Unreadable unless content is all text outside the other fields."""
    if field is not None and ("open" in field or "open_pattern" in field):
        raise _Unreadable


def _calls(field: Any) -> tuple[Call, ...]:
    """Return the spellings of a call, one per opening text. Raise _Unreadable without an opening."""
    heads: list[Syntax] = [(text.strip(), LINE) for text in _texts(field, "open")]
    if "open_pattern" in field:
        heads = [(*_syntax(field["open_pattern"]), BLANK)]
    tail: Syntax = ()
    if "close_pattern" in field:
        tail = _syntax(field["close_pattern"])
    elif texts := _texts(field, "close"):
        tail = (LINE, texts[0].strip())
    if not heads:
        raise _Unreadable
    return tuple(_call(field, _stripped(head), tail) for head in heads)


def _call(field: Mapping[str, Any], head: Syntax, tail: Syntax) -> Call:
    """Return one spelling of a call. Raise _Unreadable for an unknown body."""
    content = field.get("content", "text")
    named = any(isinstance(item, Name) for item in head)
    if content == "xml-inline" and named:
        return _tagged(field, head, tail)
    if content != "json" or field.get("content_args"):
        raise _Unreadable
    if named:
        return Call(head=head, arguments=JsonArguments(), tail=tail)
    if field.get("transform_each"):
        section = Section(head=(*head, "[", BLANK), tail=(BLANK, "]", *tail), between=",")
        return Call(section=section, arguments=_object(field), gap=", ")
    return Call(head=head, arguments=_object(field), tail=tail)


def _object(field: Mapping[str, Any]) -> Arguments:
    """Return the keys of name and arguments in the JSON object of a call.

    Raise _Unreadable for another form.
    """
    transform = field.get("transform")
    function = transform.get("function") if isinstance(transform, Mapping) else "{content}"
    if function in ("{content}", {"name": "{name}", "arguments": "{arguments}"}):
        return CallObject(arguments=("arguments",))
    if not isinstance(function, Mapping):
        raise _Unreadable
    members = [
        re.fullmatch(r"\{(?:content\.)?(\w+)\}", str(function.get(key))) for key in ("name", "arguments")
    ]
    name, arguments = members
    if name is None or arguments is None:
        raise _Unreadable
    return CallObject(name=name[1], arguments=(arguments[1],))


def _tagged(field: Mapping[str, Any], head: Syntax, tail: Syntax) -> Call:
    """Return a call with arguments in tags, from a ``tag_pattern`` with the groups key and value.

    Raise _Unreadable for another pattern, or without a closing text.
    """
    arguments = field.get("content_args")
    pattern = arguments.get("tag_pattern") if isinstance(arguments, Mapping) else None
    if not isinstance(pattern, str):
        raise _Unreadable
    found = re.fullmatch(r"(.*?)(\(\?P<key>.+?\))(.*?)(\(\?P<value>.*?\))(.*)", pattern, re.DOTALL)
    end = [item for item in tail if isinstance(item, str)]
    if found is None or not end:
        raise _Unreadable
    # The pattern reads: before, key, between, value, after. Each text between groups becomes a tag.
    before, between, after = (_syntax(found[number]) for number in (1, 3, 5))
    opening, keys, closing = (_texts_of(items) for items in (before, between, after))
    if len(opening) != 1 or len(closing) != 1 or not 1 <= len(keys) <= 2:
        raise _Unreadable
    spelled = Parameters(
        key_open=opening[0],
        key_close=keys[0],
        value_open=keys[1] if len(keys) == 2 else "",
        value_close=closing[0],
        end=end[0],
        newlines=isinstance(between[-1], Blank) or isinstance(after[0], Blank),
    )
    return Call(head=head, arguments=spelled, tail=tail[tail.index(end[0]) + 1 :])


def _texts_of(items: Syntax) -> list[str]:
    return [item for item in items if isinstance(item, str)]


def _texts(field: Any, key: str) -> list[str]:
    """Return the texts under ``key``: several, one, or none. Raise _Unreadable for anything except texts."""
    if not isinstance(field, Mapping):
        raise _Unreadable
    value = field.get(key)
    texts = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise _Unreadable
    return texts


def _syntax(pattern: Any) -> Syntax:
    """Return a regular expression as items of a declaration. Raise _Unreadable for any other construct."""
    if not isinstance(pattern, str):
        raise _Unreadable
    items: list[Any] = []
    at = 0
    while at < len(pattern):
        piece = _PIECE.match(pattern, at)
        if piece is None:
            raise _Unreadable
        at = piece.end()
        text = piece["escaped"] or piece["plain"]
        if text is not None and (text.isspace() or text == " "):
            items.append(BLANK)
        elif text is not None:
            # A repeated character is not an exact text.
            if at < len(pattern) and pattern[at] in "*+?{":
                raise _Unreadable
            joins = bool(items) and isinstance(items[-1], str)
            items[-1:] = [items[-1] + text] if joins else [*items[-1:], text]
        elif piece["blank"] is not None:
            items.append(LINE)
        elif piece["optional"] is not None:
            items.append(Optional(_syntax(piece["optional"])))
        elif piece["group"] == "name":
            items.append(NAME)
        else:
            raise _Unreadable
    return tuple(items)


def _stripped(items: Syntax) -> Syntax:
    """Return ``items`` without leading white space."""
    while items and isinstance(items[0], Blank):
        items = items[1:]
    return items
