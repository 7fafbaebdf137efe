"""Grammars as data: what the output of a sequence may be, from its first token to its last.

A front builds one ``Grammar`` for the whole output, thoughts included, and sends it with a Submit. A head
compiles it (``weft.grammar``) and masks every sampled token by it. It names text, not tokens: where a
``Text`` spells an added token of the tokenizer (``<tool_call>``), that token is meant.

    Sequence(FreeText(ends=("</think>",)), Text("\\n\\n"), JsonSchema(...))     a thought, then an object
    Triggered(trigger="<tool_call>", parts=(...))                             prose, with calls in it

Grammars are small trees: ``MAX_DEPTH`` levels, ``MAX_PARTS`` nodes, ``MAX_SOURCE`` characters of schemas and
patterns.
"""

from __future__ import annotations

import msgspec

MAX_DEPTH = 16
MAX_PARTS = 2048
MAX_SOURCE = 256 << 10


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Text(_Part, frozen=True):
    """Exactly this text."""

    text: str


class FreeText(_Part, frozen=True, kw_only=True):
    """Any text, up to and with the first of ``ends``; with no ``ends`` up to the end of the output.

    None of ``without`` comes up in it.
    """

    ends: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


class JsonSchema(_Part, frozen=True, kw_only=True):
    """A JSON value that is valid under ``schema``, without white space around it.

    ``schema`` is JSON text, an object or true. Keywords that the backend cannot hold to are refused, never
    ignored.
    """

    schema: str
    compact: bool = False
    """Whether there is no white space in it either, but one blank behind ``,`` and ``:``."""


class Regex(_Part, frozen=True):
    """Text that the whole of ``pattern`` matches: the syntax of Rust's ``regex``, without look-around."""

    pattern: str


class ContextFree(_Part, frozen=True):
    """Text of a context-free grammar in Lark's notation (or GBNF); its rule ``start`` (``root``) is the
    whole.
    """

    source: str


class OneOf(_Part, frozen=True):
    """One of ``parts``."""

    parts: tuple[Grammar, ...]


class Sequence(_Part, frozen=True):
    """All ``parts``, one after the other."""

    parts: tuple[Grammar, ...]


class Repeated(_Part, frozen=True, kw_only=True):
    """``part``, at least ``least`` and at most ``most`` times (None: any number), ``between`` two of them."""

    part: Grammar
    between: str = ""
    least: int = 0
    most: int | None = None


class Triggered(_Part, frozen=True, kw_only=True):
    """Any text; wherever ``trigger`` comes up in it, one of ``parts`` follows, which begin behind the
    trigger.

    Of the parts at most ``most`` (None: any number) come, and at least ``least``.
    """

    trigger: str
    parts: tuple[Grammar, ...]
    least: int = 0
    most: int | None = None


Grammar = Text | FreeText | JsonSchema | Regex | ContextFree | OneOf | Sequence | Repeated | Triggered
