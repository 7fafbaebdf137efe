"""Grammars of arguments in other forms than one JSON object: tags, or Python keywords."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from weft.common.errors import InvalidRequest
from weft.text.parsing.declaration import Keywords, Parameters
from weft.text.parsing.parser import Tool
from weft.text.parsing.values import types_of
from weft.types.grammar import FreeText, Grammar, GrammarSequence, JsonSchema, OneOf, Regex, Repeated, Text

_KEY = Regex(r"[A-Za-z0-9_.\-]{1,64}")
_HELD = frozenset(("type", "enum", "const", "description", "title", "default", "examples", "$comment"))
"""Schema keywords a grammar can enforce for a string without quotes."""
_NESTED = frozenset((*_HELD, "items", "properties", "required", "additionalProperties"))
"""Schema keywords a grammar can enforce for a value with the quotes of the family."""
_MAX_NESTED = 8


def parameter_parts(spelled: Parameters, tool: Tool) -> tuple[Grammar, ...]:
    """Return the grammar behind the head of a call: the parameters in schema order, and the end of the call.

    Raises InvalidRequest if the form cannot express a strict schema.
    """
    properties, needed = _properties(tool)
    parts: list[Grammar] = []
    gap = spelled.gap
    if properties is None:
        any_value = FreeText(ends=(_close(spelled),))
        key = GrammarSequence(
            (Text(gap + spelled.key_open), _KEY, Text(_opening(spelled, string=True)), any_value)
        )
        parts.append(Repeated(part=key))
    for key_name, schema in (properties or {}).items():
        one = GrammarSequence(
            (Text(gap + spelled.key_open + key_name), *_value(spelled, tool, key_name, schema))
        )
        parts.append(one if key_name in needed else Repeated(part=one, most=1))
    return (*parts, Text(gap + spelled.end))


def keyword_parts(spelled: Keywords, tool: Tool) -> tuple[Grammar, ...]:
    """Return the grammar of ``a=1, b=2)`` behind the opening bracket, in the spelling of ``spelled``.

    Values are JSON, or have the quotes of ``spelled``. Raises InvalidRequest if the form cannot express a
    strict schema.
    """
    properties, needed = _properties(tool)
    end = Text(spelled.end)
    if properties is None:
        key = Regex(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
        pair = GrammarSequence((key, Text(spelled.assign), JsonSchema(schema="true")))
        return (Repeated(part=pair, between=spelled.between), end)
    pairs = {
        key: GrammarSequence((Text(key + spelled.assign), _keyword_value(spelled, tool, schema)))
        for key, schema in properties.items()
    }
    return (*_pairs(spelled, pairs, needed), end)


def _pairs(
    spelled: Keywords, pairs: Mapping[str, Grammar], needed: frozenset[str]
) -> tuple[Grammar, ...]:
    """Return the grammar of keywords: the needed keywords in order, then any others.

    The needed keywords come first, so that every other keyword can start with a comma.
    """
    comma = Text(spelled.between)
    first = [pair for key, pair in pairs.items() if key in needed]
    others = [pair for key, pair in pairs.items() if key not in needed]
    if not first:
        if not others:
            return (Text(""),)
        return (Repeated(part=OneOf(tuple(others)), between=spelled.between, most=len(others)),)
    parts: list[Grammar] = [first[0]]
    parts += [GrammarSequence((comma, pair)) for pair in first[1:]]
    parts += [Repeated(part=GrammarSequence((comma, pair)), most=1) for pair in others]
    return tuple(parts)


def _keyword_value(spelled: Keywords, tool: Tool, schema: Any, depth: int = 0) -> Grammar:
    """Return the grammar of the value of a keyword.

    With own quotes, strings have these quotes, also in arrays and in objects with known properties. Anything
    that this spelling cannot express is JSON, which every reader of keywords accepts.
    """
    made = JsonSchema(schema=_schema(tool, schema))
    known = _NESTED if tool.strict else None
    if not spelled.quote or not isinstance(schema, Mapping) or depth > _MAX_NESTED:
        return made
    if known is not None and schema.keys() - known:
        return made
    types = types_of(schema, tool.parameters)
    quote = spelled.quote
    options = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(options, list) and options and all(isinstance(option, str) for option in options):
        return OneOf(tuple(Text(quote + option + quote) for option in options))
    if types == ("string",) and not isinstance(options, list):
        return GrammarSequence((Text(quote), FreeText(ends=(quote,))))
    items = schema.get("items")
    if types == ("array",) and isinstance(items, Mapping):
        one = _keyword_value(spelled, tool, items, depth + 1)
        return GrammarSequence((Text("["), Repeated(part=one, between=spelled.between), Text("]")))
    properties = schema.get("properties")
    if types == ("object",) and isinstance(properties, Mapping) and properties:
        needed = schema.get("required")
        pairs = {
            key: GrammarSequence((Text(key + ":"), _keyword_value(spelled, tool, value, depth + 1)))
            for key, value in properties.items()
        }
        named = frozenset(needed) if isinstance(needed, list) else frozenset()
        if named <= pairs.keys():
            return GrammarSequence((Text("{"), *_pairs(spelled, pairs, named), Text("}")))
    return made


def _properties(tool: Tool) -> tuple[dict[str, Any] | None, frozenset[str]]:
    """Return (properties in order, required names). The properties are None if any property is allowed.

    Raises InvalidRequest if a strict tool uses a schema keyword without a counterpart in this form.
    """
    parameters = tool.arguments
    properties = parameters.get("properties")
    needed = parameters.get("required")
    known = frozenset(needed) if isinstance(needed, list) else frozenset()
    if tool.strict:
        # Only keywords about single properties have a counterpart; ``anyOf`` or ``minProperties`` have none.
        odd = sorted(
            parameters.keys()
            - {
                "type",
                "properties",
                "required",
                "additionalProperties",
                "$defs",
                "definitions",
                "description",
                "title",
                "$schema",
            }
        )
        if odd or not known <= frozenset(properties or {}):
            word = odd[0] if odd else "required"
            raise InvalidRequest(
                f"tool {tool.name}: strict cannot enforce {word} of the parameters in this model's tool call "
                "format; leave strict out",
                param="tools",
            )
    if not isinstance(properties, Mapping):
        return None, known
    if not properties and parameters.get("additionalProperties") is not False:
        return None, known
    return dict(properties), known


def _value(spelled: Parameters, tool: Tool, key: str, schema: Any) -> tuple[Grammar, ...]:
    """Return the grammar from behind a key up to and including the closing tag of the value.

    Raises InvalidRequest if a strict tool uses a keyword that cannot be enforced for a string.
    """
    types = types_of(schema, tool.parameters)
    if types and "string" not in types:
        value = JsonSchema(schema=_schema(tool, schema))
        return (Text(_opening(spelled, string=False)), value, Text(_close(spelled)))
    # A string has no quotes here, so a JSON grammar does not apply: only fixed texts or free text remain.
    options = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(schema, Mapping) and "const" in schema:
        options = [schema["const"]]
    if isinstance(options, list) and options and all(isinstance(option, str) for option in options):
        texts = OneOf(tuple(Text(option + _close(spelled)) for option in options))
        return (Text(_opening(spelled, string=True)), texts)
    if tool.strict and isinstance(schema, Mapping) and (odd := sorted(schema.keys() - _HELD)):
        raise InvalidRequest(
            f"tool {tool.name}: strict cannot enforce {odd[0]} of the parameter {key} in this model's tool "
            "call format; leave strict or the keyword out",
            param="tools",
        )
    return (Text(_opening(spelled, string=True)), FreeText(ends=(_close(spelled),)))


def _opening(spelled: Parameters, *, string: bool) -> str:
    """Return the text between the key and the value."""
    flag = spelled.string_flag + ("true" if string else "false") if spelled.string_flag else ""
    between = "\n" if spelled.value_open.startswith("<") else ""
    return spelled.key_close + flag + between + spelled.value_open + ("\n" if spelled.newlines else "")


def _close(spelled: Parameters) -> str:
    return ("\n" if spelled.newlines else "") + spelled.value_close


def _schema(tool: Tool, schema: Any) -> str:
    """Return a parameter's schema as JSON, with the definitions of the tool's schema for ``$ref``."""
    made = schema if isinstance(schema, Mapping) else {}
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return json.dumps({**made, **shared}, ensure_ascii=False)
