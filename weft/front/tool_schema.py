"""Whether the schema of a tool's parameters is one. What a grammar cannot hold to is refused elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.common.errors import InvalidRequest

MAX_LEVELS = 32
_TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


def check_schema(schema: Any, where: str, levels: int = MAX_LEVELS) -> None:
    """Raises InvalidRequest naming ``tools``, with ``where`` in it, unless ``schema`` looks like one."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise _wrong(where, "must be an object")
    if not levels:
        raise _wrong(where, f"is nested more than {MAX_LEVELS} levels deep")
    _check_type(schema.get("type"), where)
    if not _is_texts(schema.get("required", [])):
        raise _wrong(where, "must have a list of names in required")
    for name in _BY_NAME:
        parts = schema.get(name, {})
        if not isinstance(parts, Mapping):
            raise _wrong(where, f"must have an object in {name}")
        for part in parts.values():
            check_schema(part, where, levels - 1)
    for name in _LISTS:
        parts = schema.get(name, [])
        if not isinstance(parts, list):
            raise _wrong(where, f"must have a list in {name}")
        for part in parts:
            check_schema(part, where, levels - 1)
    for name in _ONE:
        if name in schema:
            check_schema(schema[name], where, levels - 1)


def _check_type(kind: Any, where: str) -> None:
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is not None and not all(isinstance(one, str) and one in _TYPES for one in kinds):
        raise _wrong(where, f"must have types out of {', '.join(sorted(_TYPES))}")


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _wrong(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: the schema of its parameters {what}", param="tools")
