"""From the forms that APIs have (response formats, guided decoding, structural tags) to grammars.

Nothing here compiles: a form is checked for its shape, and what a schema or a pattern says is checked where
the grammar is compiled. Every function raises InvalidRequest that names ``param``, the request's parameter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Items
from typing import Any, Never

from weft.common.errors import InvalidRequest
from weft.grammar.structural_tags import read_structural_tag
from weft.types.grammar import (
    ContextFree,
    Grammar,
    JsonSchema,
    OneOf,
    Regex,
    Text,
)


def json_object(*, compact: bool = False) -> Grammar:
    """Any JSON object: ``response_format: {"type": "json_object"}``."""
    return JsonSchema(schema='{"type":"object"}', compact=compact)


def json_schema(schema: Any, *, compact: bool = False, param: str = "response_format") -> Grammar:
    """A JSON value that is valid under ``schema``: parsed JSON (an object or a boolean), or its text.

    ``compact``: see ``JsonSchema``; what a model writes by itself differs by family.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            _refuse("the JSON schema is not valid JSON", param)
    if schema is False:
        _refuse("the JSON schema is false, which no output satisfies", param)
    if schema is not True and not isinstance(schema, dict):
        _refuse("the JSON schema must be an object", param)
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError):
        _refuse("the JSON schema holds numbers that are not finite, or is nested too deeply", param)
    return JsonSchema(schema=text, compact=compact)


def regex(pattern: str, *, param: str = "guided_regex") -> Grammar:
    """Text that the whole of ``pattern`` matches."""
    if not isinstance(pattern, str) or not pattern:
        _refuse(f"{param} must be a pattern of at least one character", param)
    return Regex(pattern)


def context_free(source: str, *, param: str = "guided_grammar") -> Grammar:
    """Text of a context-free grammar: Lark (rule ``start``) or GBNF / EBNF (rule ``root``)."""
    if not isinstance(source, str) or not source.strip():
        _refuse(f"{param} must be a grammar with at least one rule", param)
    return ContextFree(source)


def choice(texts: Items[str], *, param: str = "guided_choice") -> Grammar:
    """One of ``texts``, exactly."""
    if not isinstance(texts, list | tuple) or not texts:
        _refuse(f"{param} must be a list of at least one text", param)
    if not all(isinstance(text, str) and text for text in texts):
        _refuse(f"{param} must hold texts of at least one character", param)
    unique = tuple(dict.fromkeys(texts))
    return Text(unique[0]) if len(unique) == 1 else OneOf(tuple(Text(text) for text in unique))


def structural_tag(value: Any, *, param: str = "response_format") -> Grammar:
    """``{"type": "structural_tag", ...}`` in both forms.

    The older has ``structures`` (``begin``, ``schema``, ``end``) and ``triggers``; the newer has ``format``,
    a tree of const_string, json_schema, any_text, regex, grammar, sequence, or, tag, triggered_tags,
    tags_with_separator, optional, star, plus and repeat. Other formats are refused by name.
    """
    return read_structural_tag(value, param)


def _refuse(message: str, param: str) -> Never:
    raise InvalidRequest(message, param=param)
