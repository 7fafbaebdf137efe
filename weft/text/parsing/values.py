"""Conversion of plain-text argument values to JSON by the types of the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from weft.text.parsing.json_text import MAX_DEPTH, is_number, quoted
from weft.text.parsing.python_text import python_to_json

_MAX_NESTED = 8
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_WHOLE_FLOAT = re.compile(r"(-?[0-9]+)\.0*")
_OF_VALUE = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
ALL_TYPES = ("null", "boolean", "integer", "number", "object", "array", "string")


def types_of(schema: Any, root: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Return the JSON Schema types named by ``schema``, in order; empty if the schema names none.

    ``root`` is the document for ``$ref``.
    """
    return tuple(dict.fromkeys(_types(schema, root, 0, set())))


def _types(schema: Any, root: Mapping[str, Any] | None, depth: int, followed: set[str]) -> list[str]:
    """Return the JSON types allowed by ``schema``, with repetitions; empty if unknown or nested too deep.

    ``followed`` is extended with each resolved reference. A second visit adds no type. Without the set,
    definitions with many mutual references would take exponential time.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_NESTED:
        return []
    # Sources of types in order: ``type``, values of ``enum`` and ``const``, ``$ref``, then unions. The first
    # source with a result wins.
    named = schema.get("type")
    types = [item for item in (named if isinstance(named, list) else [named]) if isinstance(item, str)]
    if not types and isinstance(schema.get("enum"), list):
        types = [_OF_VALUE.get(type(value), "null") for value in schema["enum"]]
    if not types and "const" in schema:
        types = [_OF_VALUE.get(type(schema["const"]), "null")]
    reference = schema.get("$ref")
    if not types and isinstance(reference, str) and reference not in followed:
        followed.add(reference)
        types = _types(resolved(reference, root), root, depth + 1, followed)
    for union in ("anyOf", "oneOf", "allOf"):
        options = schema.get(union)
        if not types and isinstance(options, list):
            types = [found for option in options for found in _types(option, root, depth + 1, followed)]
    if named and schema.get("nullable") is True:  # the OpenAPI 3.0 way to add null
        types.append("null")
    return types


def parameter_types(parameters: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the types of one parameter of a tool; empty if the schema names none."""
    properties = parameters.get("properties")
    return types_of(properties.get(key), parameters) if isinstance(properties, Mapping) else ()


def resolved(reference: Any, root: Mapping[str, Any] | None) -> Any:
    """Return the target of a ``#/...`` reference; None if missing or outside of ``root``."""
    if root is None or not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for step in reference[2:].split("/"):
        if not isinstance(found, Mapping):
            return None
        found = found.get(step.replace("~1", "/").replace("~0", "~"))
    return found


def to_json(raw: str, types: tuple[str, ...]) -> str:
    """Return ``raw`` as JSON of the first fitting type of ``types``. Null precedes all other types. The
    fallback is a string.

    Without types, ``raw`` becomes the JSON value of its spelling, or a string.
    """
    stripped = raw.strip()
    if "null" in types and stripped in ("null", "None"):
        return "null"
    for name in types or ("null", "boolean", "number", "object", "array"):
        found = _as_type(raw, stripped, name)
        if found is not None:
            return found
    # No type fits: keep a JSON string, otherwise quote the raw text.
    if types and "string" not in types and _is_json_string(stripped):
        return stripped
    return quoted(raw)


def _is_json_string(text: str) -> bool:
    try:
        return text.startswith('"') and isinstance(json.loads(text), str)
    except ValueError:
        return False


def _as_type(raw: str, stripped: str, name: str) -> str | None:
    """Return the value as JSON of the type ``name``; None if the text is not of that type."""
    if name == "string":
        return quoted(raw)
    if name == "null":
        return "null" if stripped == "null" else None
    if name == "boolean":
        return stripped.lower() if stripped in ("true", "false", "True", "False") else None
    if name == "integer":
        # Models write 3.0 for an integer.
        whole = _WHOLE_FLOAT.fullmatch(stripped)
        text = stripped if whole is None else whole[1]
        return text if is_number(text) and text.lstrip("-").isdecimal() else None
    if name == "number":
        return stripped if is_number(stripped) else None
    if name in ("object", "array") and stripped[:1] == ("{" if name == "object" else "["):
        return _nested(stripped)
    return None


def _nested(text: str) -> str | None:
    """Return an object or array as JSON.

    Accept Python spelling too. Return None for other text, or deeper than ``MAX_DEPTH``.
    """
    try:
        json.loads(text, parse_constant=_refuse)
        return text if _depth(text) <= MAX_DEPTH else None
    except (ValueError, RecursionError):
        return python_to_json(text)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not valid in JSON")


def _depth(text: str) -> int:
    """Return the depth of brackets in ``text``, which must be JSON."""
    deepest = depth = 0
    for char in _STRING.sub("", text):
        if char in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "}]":
            depth -= 1
    return deepest
