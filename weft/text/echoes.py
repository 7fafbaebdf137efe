"""Reasoning and tool calls in messages sent back by clients, in the forms of other servers."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

REASONING = ("reasoning_details", "thinking_blocks")
"""Fields with a list of reasoning blocks: OpenRouter's and LiteLLM's."""
_PARTS = frozenset(["thinking", "think", "reasoning", "reasoning.text", "reasoning.summary"])
_HIDDEN = frozenset(["redacted_thinking", "reasoning.encrypted"])
"""Reasoning readable only by its provider."""
_TEXTS = ("thinking", "think", "text", "summary", "reasoning")
MAX_DEPTH = 64
"""Maximum nesting depth of a call's arguments."""
PARTIAL = "partial_json"
"""Key under which the template receives arguments that are not a JSON object."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def reasoning_of(value: Any) -> str:
    """Return the text of a list of reasoning blocks; "" for anything else."""
    if not isinstance(value, list):
        return ""
    return "".join(_text(part) for part in value if isinstance(part, Mapping))


def without_reasoning(content: list[Any]) -> tuple[list[Any], str]:
    """Return (content parts without reasoning, text of the reasoning parts)."""
    reasoning = [part for part in content if _is_reasoning(part)]
    if not reasoning:
        return content, ""
    return [part for part in content if not _is_reasoning(part)], reasoning_of(reasoning)


def _is_reasoning(part: Any) -> bool:
    part_type = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(part_type, str) and part_type in _PARTS | _HIDDEN


def _text(part: Mapping[str, Any]) -> str:
    """Return the text of one reasoning block, "" for hidden blocks and blocks without text.

    Mistral nests a list of parts inside.
    """
    part_type = part.get("type")
    if isinstance(part_type, str) and part_type in _HIDDEN:
        return ""
    for name in _TEXTS:
        value = part.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            texts = [inner.get("text") for inner in value if isinstance(inner, Mapping)]
            return "".join(text for text in texts if isinstance(text, str))
    return ""


class CallMade(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call made by the assistant, as a client sends the call back."""

    id: str
    name: str
    arguments: str
    """Arguments as received: JSON text of an object, unless the model wrote invalid JSON."""

    def shown(self) -> dict[str, Any]:
        """Return the arguments for a template. Text other than a JSON object stands under
        ``partial_json``.
        """
        values = self.values()
        return {PARTIAL: self.arguments} if values is None else values

    def shown_text(self) -> str:
        """Return ``shown`` as JSON text. Text of a JSON object stays unchanged."""
        own = self.arguments.lstrip().startswith("{") and self.values() is not None
        return self.arguments if own else json.dumps(self.shown(), ensure_ascii=False)

    def values(self) -> dict[str, Any] | None:
        """Return the arguments as a dict. Empty text and null become {}. Return None for anything except an
        object.
        """
        if self.arguments.strip() in ("", "null"):
            return {}
        try:
            decoded = json.loads(self.arguments, parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError):
            return None
        if not isinstance(decoded, dict) or too_deep(decoded, MAX_DEPTH):
            return None
        # An escaped lone surrogate decodes to a string that no tokenizer accepts.
        escapes = _SURROGATE.search(self.arguments) is not None
        return decoded if not escapes or _is_text(json.dumps(decoded, ensure_ascii=False)) else None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not valid in JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large for a JSON number")
    return value


def arguments_text(arguments: Any) -> str:
    """Return a call's arguments, sent back in any form, as JSON text.

    A lone surrogate, which no tokenizer accepts, becomes an escape.
    """
    if arguments is None:
        return ""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return text if _is_text(text) else text.encode("utf-8", "backslashreplace").decode()


def _is_text(text: str) -> bool:
    """Return False for a string with lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def too_deep(value: Any, limit: int) -> bool:
    """Return True if ``value`` is nested deeper than ``limit`` levels. Recursion stops at ``limit``."""
    if not isinstance(value, list | dict):
        return False
    if limit <= 0:
        return True
    items = value.values() if isinstance(value, dict) else value
    return any(too_deep(item, limit - 1) for item in items)


class CallIds:
    """Ids for calls that clients send back with the id "", and for the results of these calls.

    Servers in the style of Gemini write "" as the id of every call. Ollama's calls may have no ids.
    """

    def __init__(self, given: Iterable[str]) -> None:
        """``given``: all ids of the request. A new id never equals one of these ids."""
        self._given = frozenset(given)
        self._count = 0
        self._waiting: dict[str | None, deque[str]] = {}
        """Function name -> ids of the calls of this round, in order; None -> the ids of all these calls."""
        self._answered: set[str] = set()

    def begin(self) -> None:
        """Begin a round of calls. A later result answers no call of an earlier round."""
        self._waiting.clear()

    def call(self, ident: str, name: str) -> str:
        """Return the id of the next call, a new id in place of ""."""
        ident = ident or self._new()
        self._answered.discard(ident)
        for key in (name, None):
            self._waiting.setdefault(key, deque()).append(ident)
        return ident

    def result(self, ident: str, name: str | None) -> str:
        """Return the id of the call that the next result answers. "" means the first call of the round
        without a result: of the function ``name``, else of any function."""
        ident = ident or self._first(name) or self._first(None) or self._new()
        self._answered.add(ident)
        return ident

    def _first(self, name: str | None) -> str:
        waiting = self._waiting.get(name, deque())
        while waiting and waiting[0] in self._answered:
            waiting.popleft()
        return waiting[0] if waiting else ""

    def _new(self) -> str:
        # Some templates (Mistral's) take only ids of nine letters and digits.
        while (ident := f"call{self._count:05}") in self._given:
            self._count += 1
        self._count += 1
        return ident
