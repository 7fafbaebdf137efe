"""Grammars of arguments in other forms than one JSON object: tags, or Python keywords."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.common.errors import InvalidRequest
from weft.text.parsing.declaration import Keywords, Parameters
from weft.text.parsing.keyword_grammar import HELD, KeywordValues, keyword_pairs, schema_text
from weft.text.parsing.keyword_text import can_read
from weft.text.parsing.parser import Tool
from weft.text.parsing.values import types_of
from weft.types.grammar import FreeText, Grammar, GrammarSequence, JsonSchema, OneOf, Regex, Repeated, Text

_KEY = Regex(r"[A-Za-z0-9_.\-]{1,64}")


def parameter_parts(spelled: Parameters, tool: Tool) -> tuple[Grammar, ...]:
    """Return the grammar behind the head of a call: the parameters in schema order, and the end of the call.

    Raises InvalidRequest if the form cannot express a strict schema.
    """
    properties, needed = _properties(tool)
    parts: list[Grammar] = []
    gap = spelled.gap
    if properties is None:
        any_value = FreeText(ends=(value_close(spelled),))
        key = GrammarSequence(
            (Text(gap + spelled.key_open), _KEY, Text(value_opening(spelled, string=True)), any_value)
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
    strict schema or the name of a parameter.
    """
    properties, needed = _properties(tool)
    end = Text(spelled.end)
    values = KeywordValues(spelled, tool)
    if not all(can_read(spelled, key) for key in properties or {}):
        raise InvalidRequest(
            f"tool {tool.name}: this model's tool call format cannot express the name of a parameter; use "
            "letters, digits and _",
            param="tools",
        )
    if properties is None:
        key = Regex(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
        pair = GrammarSequence((key, Text(spelled.assign), values.of({})))
        return (Repeated(part=pair, between=spelled.between), end)
    pairs = {
        key: GrammarSequence((Text(key + spelled.assign), values.of(schema)))
        for key, schema in properties.items()
    }
    return (*keyword_pairs(spelled.between, pairs, needed), end)


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
        value = JsonSchema(schema=schema_text(tool, schema))
        return (Text(value_opening(spelled, string=False)), value, Text(value_close(spelled)))
    # A string has no quotes here, so a JSON grammar does not apply: only fixed texts or free text remain.
    options = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(schema, Mapping) and "const" in schema:
        options = [schema["const"]]
    if isinstance(options, list) and options and all(isinstance(option, str) for option in options):
        texts = OneOf(tuple(Text(option + value_close(spelled)) for option in options))
        return (Text(value_opening(spelled, string=True)), texts)
    if tool.strict and isinstance(schema, Mapping) and (odd := sorted(schema.keys() - HELD)):
        raise InvalidRequest(
            f"tool {tool.name}: strict cannot enforce {odd[0]} of the parameter {key} in this model's tool "
            "call format; leave strict or the keyword out",
            param="tools",
        )
    return (Text(value_opening(spelled, string=True)), FreeText(ends=(value_close(spelled),)))


def value_opening(spelled: Parameters, *, string: bool) -> str:
    """Return the text between the key and the value."""
    flag = spelled.string_flag + ("true" if string else "false") if spelled.string_flag else ""
    between = "\n" if spelled.value_open.startswith("<") else ""
    return spelled.key_close + flag + between + spelled.value_open + ("\n" if spelled.newlines else "")


def value_close(spelled: Parameters) -> str:
    """Return the text behind a value."""
    return ("\n" if spelled.newlines else "") + spelled.value_close
