"""Grammars as data: constraints on the whole output of a sequence.

An API server builds one ``Grammar`` for the whole output, reasoning included, and sends the grammar with a
Submit. An engine process compiles the grammar (``weft.grammar``) and masks every sampled token. A grammar
names text, not tokens. If a ``Text`` spells an added token of the tokenizer (``<tool_call>``), the output
must have the added token.

    GrammarSequence((FreeText(ends=("</think>",)), JsonSchema(schema="...")))     reasoning, then an object
    Triggered(trigger="<tool_call>", parts=(...,))                                text with tool calls

Grammars are small trees: ``MAX_DEPTH`` levels, ``MAX_PARTS`` nodes, ``MAX_SOURCE`` characters of schemas and
patterns.
"""

from __future__ import annotations

import msgspec

MAX_DEPTH = 16
MAX_PARTS = 2048
MAX_SOURCE = 256 << 10


class _GrammarPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Text(_GrammarPart, frozen=True):
    """Exactly this text."""

    text: str


class FreeText(_GrammarPart, frozen=True, kw_only=True):
    """Any text up to and including the first of ``ends``; without ``ends``, up to the end of the output.

    The text contains none of ``without``.
    """

    ends: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


class JsonSchema(_GrammarPart, frozen=True, kw_only=True):
    """A JSON value valid under ``schema``, without surrounding white space.

    ``schema`` is JSON text, an object or true. Keywords that the backend cannot enforce are rejected, never
    ignored.
    """

    schema: str
    compact: bool = False
    """True to allow no white space inside the value, except one blank after ``,`` and ``:``."""


class Regex(_GrammarPart, frozen=True):
    """Text fully matched by ``pattern``, in the syntax of Rust's ``regex`` without look-around."""

    pattern: str


class ContextFree(_GrammarPart, frozen=True):
    """Text of a context-free grammar in Lark's notation (or GBNF), from the rule ``start`` (``root``)."""

    source: str


class OneOf(_GrammarPart, frozen=True):
    """One of ``parts``."""

    parts: tuple[Grammar, ...]


class GrammarSequence(_GrammarPart, frozen=True):
    """All ``parts``, in order."""

    parts: tuple[Grammar, ...]


class Repeated(_GrammarPart, frozen=True, kw_only=True):
    """``part``, at least ``least`` and at most ``most`` times (None: unlimited), separated by ``between``."""

    part: Grammar
    between: str = ""
    least: int = 0
    most: int | None = None


class Triggered(_GrammarPart, frozen=True, kw_only=True):
    """Any text in which each ``trigger`` starts one of ``parts``. A part begins after the trigger.

    At least ``least`` and at most ``most`` parts occur (None: unlimited).
    """

    trigger: str
    parts: tuple[Grammar, ...]
    least: int = 0
    most: int | None = None


Grammar = Text | FreeText | JsonSchema | Regex | ContextFree | OneOf | GrammarSequence | Repeated | Triggered
