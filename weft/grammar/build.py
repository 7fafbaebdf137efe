"""Convert the forms of the APIs (response formats, guided decoding, structural tags) to grammars.

Nothing is compiled here. Only the shape of a form is checked. The content of a schema or pattern is checked
during the compile. Every function raises InvalidRequest with ``param``, the request's parameter.
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


def json_object() -> Grammar:
    """Return the grammar of any JSON object: ``response_format: {"type": "json_object"}``."""
    return JsonSchema(schema='{"type":"object"}')


def json_schema(schema: Any, *, compact: bool = False, param: str = "response_format") -> Grammar:
    """Return the grammar of a JSON value valid under ``schema``: parsed JSON (an object or a boolean), or
    JSON text.

    See ``JsonSchema`` for ``compact``: models differ in the spacing of JSON. Raises InvalidRequest with
    ``param`` for invalid JSON, for false, for another type, and for infinite numbers.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            _refuse("the JSON schema is not valid JSON", param)
    # False is valid JSON Schema, but no output satisfies False.
    if schema is False:
        _refuse("the JSON schema is false, which no output satisfies", param)
    if schema is not True and not isinstance(schema, dict):
        _refuse("the JSON schema must be an object", param)
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError):
        _refuse("the JSON schema has numbers that are not finite, or is nested too deeply", param)
    return JsonSchema(schema=text, compact=compact)


def regex(pattern: str, *, param: str = "guided_regex") -> Grammar:
    """Return the grammar of texts that match the whole of ``pattern``."""
    if not isinstance(pattern, str) or not pattern:
        _refuse(f"{param} must be a non-empty regular expression", param)
    return Regex(pattern)


def context_free(source: str, *, param: str = "guided_grammar") -> Grammar:
    """Return the grammar of a context-free source: Lark (rule ``start``) or GBNF / EBNF (rule ``root``)."""
    if not isinstance(source, str) or not source.strip():
        _refuse(f"{param} must be a grammar with at least one rule", param)
    return ContextFree(source)


def choice(texts: Items[str], *, param: str = "guided_choice") -> Grammar:
    """Return the grammar of exactly one of ``texts``.

    Raises InvalidRequest for an empty list or an empty text.
    """
    if not isinstance(texts, list | tuple) or not texts:
        _refuse(f"{param} must be a non-empty list of strings", param)
    if not all(isinstance(text, str) and text for text in texts):
        _refuse(f"{param} must have non-empty strings only", param)
    unique = tuple(dict.fromkeys(texts))
    return Text(unique[0]) if len(unique) == 1 else OneOf(tuple(Text(text) for text in unique))


def structural_tag(value: Any, *, param: str = "response_format") -> Grammar:
    """Return the grammar of ``{"type": "structural_tag", ...}`` in the older or newer form.

    The older form has ``structures`` (``begin``, ``schema``, ``end``) and ``triggers``. The newer form has
    ``format``, a tree of const_string, json_schema, any_text, regex, grammar, sequence, or, tag,
    triggered_tags, tags_with_separator, optional, star, plus and repeat. Other formats are refused by name.
    """
    return read_structural_tag(value, param)


def _refuse(message: str, param: str) -> Never:
    raise InvalidRequest(message, param=param)
