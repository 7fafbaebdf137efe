"""Grammars of the values of keywords: JSON, or strings with the quotes of a family."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from weft.text.parsing.declaration import Keywords
from weft.text.parsing.json_text import quoted
from weft.text.parsing.parser import Tool
from weft.text.parsing.values import resolved, types_of
from weft.types.grammar import FreeText, Grammar, GrammarSequence, JsonSchema, OneOf, Regex, Repeated, Text

HELD = frozenset(("type", "enum", "const", "description", "title", "default", "examples", "$comment"))
"""Schema keywords a grammar can enforce for a string without quotes."""
_KNOWN = frozenset((*HELD, "items", "properties", "required", "additionalProperties", "anyOf", "$ref"))
"""Schema keywords a grammar can enforce for a value with the quotes of a family."""
_BARE_KEY = Regex(r"[A-Za-z0-9_.\-]{1,64}")
_LEVELS = 2
"""Nested levels with the quotes of a family. The depth of a grammar is limited, so deeper levels are JSON."""
_SCALARS = ("integer", "number", "boolean", "null")


class KeywordValues:
    """Makes the grammars of the values of one tool's keywords.

    Without quotes of the family, values are JSON. With such quotes, strings have the quotes at every level.
    Anything that this spelling cannot express is JSON, which the reader of keywords accepts too.
    """

    def __init__(self, spelled: Keywords, tool: Tool) -> None:
        self._quote = spelled.quote
        self._between = spelled.between
        self._tool = tool

    def of(self, schema: Any, levels: int = _LEVELS) -> Grammar:
        """Return the grammar of a value of ``schema`` with at most ``levels`` levels in the family's
        spelling.
        """
        made = JsonSchema(schema=schema_text(self._tool, schema))
        if not self._quote or not isinstance(schema, Mapping) or levels < 0:
            return made
        if "$ref" in schema:
            schema = resolved(schema["$ref"], self._tool.parameters)
            return self.of(schema, levels - 1) if isinstance(schema, Mapping) else made
        # A strict tool with a keyword outside the notation is followed in JSON.
        if self._tool.strict and schema.keys() - _KNOWN:
            return made
        options = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(options, list) and options:
            return OneOf(tuple(map(self._fixed, options)))
        choices = schema.get("anyOf")
        if isinstance(choices, list) and choices:
            return OneOf(tuple(self.of(choice, levels - 1) for choice in choices))
        types = types_of(schema, self._tool.parameters)
        if not types:
            return self._open(levels)
        parts = tuple(self._of_type(name, schema, levels) for name in types)
        return parts[0] if len(parts) == 1 else OneOf(parts)

    def _of_type(self, name: str, schema: Mapping[str, Any], levels: int) -> Grammar:
        """Return the grammar of a value of ``schema`` with the JSON type ``name``."""
        if name == "string":
            return self._string()
        if name in _SCALARS or levels == 0:
            return JsonSchema(schema=schema_text(self._tool, {**schema, "type": name}))
        if name == "array":
            items = schema.get("items")
            return self._list(self.of(items or {}, levels - 1))
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            return self._any_object(levels)
        pairs = {
            key: GrammarSequence((Text(_key(key) + ":"), self.of(value, levels - 1)))
            for key, value in properties.items()
        }
        needed = schema.get("required")
        named = frozenset(needed) if isinstance(needed, list) else frozenset()
        return GrammarSequence((Text("{"), *keyword_pairs(self._between, pairs, named), Text("}")))

    def _fixed(self, value: Any) -> Grammar:
        """Return the grammar of one fixed value."""
        # A text with the quotes of the family inside stands in the quotes of JSON.
        if isinstance(value, str) and self._quote not in value:
            return Text(self._quote + value + self._quote)
        return JsonSchema(schema=json.dumps({"const": value}, ensure_ascii=False))

    def _string(self) -> Grammar:
        return GrammarSequence((Text(self._quote), FreeText(ends=(self._quote,))))

    def _list(self, item: Grammar) -> Grammar:
        return GrammarSequence((Text("["), Repeated(part=item, between=self._between), Text("]")))

    def _any_object(self, levels: int) -> Grammar:
        pair = GrammarSequence((_BARE_KEY, Text(":"), self._open(levels - 1)))
        return GrammarSequence((Text("{"), Repeated(part=pair, between=self._between), Text("}")))

    def _open(self, levels: int) -> Grammar:
        """Return the grammar of any value with at most ``levels`` nested levels in the family's spelling."""
        if levels <= 0:
            return JsonSchema(schema="true")
        scalar = JsonSchema(schema=json.dumps({"type": list(_SCALARS)}))
        item = self._open(levels - 1)
        return OneOf((self._string(), scalar, self._list(item), self._any_object(levels)))


def _key(key: str) -> str:
    """Return a key of a nested object. A key that is no word stands in the quotes of JSON."""
    return key if re.fullmatch(_BARE_KEY.pattern, key) else quoted(key)


def keyword_pairs(between: str, pairs: Mapping[str, Grammar], needed: frozenset[str]) -> tuple[Grammar, ...]:
    """Return the grammar of pairs: the needed pairs in order, then any others.

    The needed pairs come first, so that every other pair can start with ``between``.
    """
    comma = Text(between)
    first = [pair for key, pair in pairs.items() if key in needed]
    others = [pair for key, pair in pairs.items() if key not in needed]
    if not first:
        some = Repeated(part=OneOf(tuple(others)), between=between, most=len(others)) if others else Text("")
        return (some,)
    parts: list[Grammar] = [first[0]]
    parts += [GrammarSequence((comma, pair)) for pair in first[1:]]
    parts += [Repeated(part=GrammarSequence((comma, pair)), most=1) for pair in others]
    return tuple(parts)


def schema_text(tool: Tool, schema: Any) -> str:
    """Return a parameter's schema as JSON, with the definitions of the tool's schema for ``$ref``."""
    made = schema if isinstance(schema, Mapping) else {}
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return json.dumps({**made, **shared}, ensure_ascii=False)
