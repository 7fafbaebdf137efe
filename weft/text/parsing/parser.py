"""The interface of output parsers: text in any pieces in, events out."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from weft.text.parsing.events import Content, OutputEvent

# fmt: off
_SAY_NOTHING = frozenset((
    "type", "properties", "required", "title", "description", "$schema", "$id", "$comment", "$defs",
    "definitions", "default", "examples",
))
# fmt: on
"""Schema keywords without a statement about any property."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function offered to the model, as the request describes the function."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    """JSON Schema of the arguments, as the request contains the schema."""
    strict: bool = False
    """True if a grammar must force arguments valid under ``parameters``."""
    yields: bool = False
    """For a strict tool: the grammar follows ``parameters`` as far as possible and never refuses a schema."""

    @property
    def arguments(self) -> dict[str, Any]:
        """JSON Schema for a grammar of the arguments.

        ``parameters`` without any statement about properties stand for a function without arguments. The
        closed empty schema keeps a small model from inventing arguments. A caller wanting an open object must
        set ``additionalProperties``.
        """
        made = {"type": "object", **self.parameters}
        if made.get("properties") or made.get("required") or made.keys() - _SAY_NOTHING:
            return made
        return {**made, "properties": {}, "additionalProperties": False}


class OutputSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to read the output of one request. The reader of the request makes the spec, possibly in another
    process.
    """

    tools: tuple[Tool, ...] = ()
    """Tools the model may call. A call of any other name is content."""
    tool_calls: bool = False
    """True if the parser looks for calls."""
    reasoning: bool = False
    """True if the parser separates reasoning from content."""
    in_reasoning: bool = False
    """True if the prompt ends inside a reasoning block opened by the template."""
    parallel: bool = True
    """True if more than one call is allowed. If False, every call after the first is content."""


class OutputParser(Protocol):
    """Parser of one choice. The events, joined, do not depend on the division of the text into pieces."""

    def feed(self, text: str) -> list[OutputEvent]:
        """Return the events certain after ``text``. Hold back only text with a possible markup meaning."""

    def close(self) -> list[OutputEvent]:
        """Return the held text as events at the end of the output. Call once."""


class PlainParser:
    """Parser without a format: all text is content."""

    def feed(self, text: str) -> list[OutputEvent]:
        return [Content(text)] if text else []

    def close(self) -> list[OutputEvent]:
        return []
