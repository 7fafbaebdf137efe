"""Check of tool parameter schemas. Schemas beyond a grammar's means are refused elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.common.errors import InvalidRequest
from weft.front.protocol.parse import printable
from weft.grammar.json_schema.normal import step

MAX_LEVELS = 32
_TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


def check_schema(schema: Any, where: str, at: str = "", levels: int = MAX_LEVELS) -> None:
    """Raise InvalidRequest, naming ``tools``, unless ``schema`` looks like a JSON schema.

    The message contains ``where``, which names the tool, and the place in the schema. A keyword with value
    null counts as absent.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise _wrong(where, at, "must be an object")
    if not levels:
        raise _wrong(where, "", f"is nested more than {MAX_LEVELS} levels deep")
    _check_type(schema.get("type"), where, at)
    required = schema.get("required")
    if required is not None and not _is_texts(required):
        raise _wrong(where, at, "must have a list of names in required")
    # Keywords with an object of schemas, a list of schemas, or a single schema; `at` is the JSON pointer.
    for name in _BY_NAME:
        parts = schema.get(name)
        if parts is None:
            continue
        if not isinstance(parts, Mapping):
            raise _wrong(where, at, f"must have an object in {name}")
        for key, part in parts.items():
            check_schema(part, where, f"{at}/{name}/{step(key)}", levels - 1)
    for name in _LISTS:
        parts = schema.get(name)
        if parts is None:
            continue
        if not isinstance(parts, list):
            raise _wrong(where, at, f"must have a list in {name}")
        for number, part in enumerate(parts):
            check_schema(part, where, f"{at}/{name}/{number}", levels - 1)
    for name in _ONE:
        if schema.get(name) is not None:
            check_schema(schema[name], where, f"{at}/{name}", levels - 1)


def _check_type(kind: Any, where: str, at: str) -> None:
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is not None and not all(isinstance(one, str) and one in _TYPES for one in kinds):
        raise _wrong(where, at, f"may have only these types: {', '.join(sorted(_TYPES))}")


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _wrong(where: str, at: str, what: str) -> InvalidRequest:
    place = f" (at {printable(at, 200)})" if at else ""
    return InvalidRequest(f"{where}: the schema of its parameters {what}{place}", param="tools")
