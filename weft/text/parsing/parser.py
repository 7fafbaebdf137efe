"""The parser of an output: text in, in any pieces; events out."""

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
"""Keywords that say of no property what it may be."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call, as a request describes it."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    """JSON Schema of its arguments, as the request has it."""
    strict: bool = False
    """Whether arguments must be valid under ``parameters`` (by a grammar)."""
    yields: bool = False
    """Of a strict tool: a grammar holds to ``parameters`` as far as it can, and never refuses them."""

    @property
    def arguments(self) -> dict[str, Any]:
        """JSON Schema that a grammar of the arguments holds to.

        ``parameters`` that say nothing of any property stand for a function without arguments, so a small
        model cannot go on writing some. Open objects say so: ``additionalProperties``.
        """
        made = {"type": "object", **self.parameters}
        if made.get("properties") or made.get("required") or made.keys() - _SAY_NOTHING:
            return made
        return {**made, "properties": {}, "additionalProperties": False}


class OutputSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How the output of one request is to be read. Made by the reader of the request, which may be another
    process.
    """

    tools: tuple[Tool, ...] = ()
    """Those the model may call; a call of another name is content."""
    tool_calls: bool = False
    """Whether calls are looked for."""
    reasoning: bool = False
    """Whether thoughts are told apart from content."""
    in_reasoning: bool = False
    """Whether the prompt ends inside a thought that the template has opened."""
    parallel: bool = True
    """Whether more than one call may come. Further ones are content where it is false."""


class OutputParser(Protocol):
    """Reads one choice. Joined pieces give the same events, whatever the pieces (up to how texts are cut)."""

    def feed(self, text: str) -> list[OutputEvent]:
        """What is certain now. Holds back only what may still become markup."""

    def close(self) -> list[OutputEvent]:
        """What was held back, at the output's end, and what only that end makes whole. Called once."""


class PlainParser:
    """Everything is content: no format, or nothing is looked for."""

    def feed(self, text: str) -> list[OutputEvent]:
        return [Content(text)] if text else []

    def close(self) -> list[OutputEvent]:
        return []
