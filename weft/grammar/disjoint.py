"""Whether JSON schemas exclude each other: then one of them holds where any of them does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from weft.common.errors import InvalidRequest

_MAX_DEPTH = 8
_MAX_PAIRS = 20_000


class Disjoint:
    """Compares schemas of one document, which were read: each keyword has a value that it may have.
    ``resolve`` finds what a reference points to.
    """

    def __init__(self, resolve: Callable[[str], Any]) -> None:
        self._resolve = resolve
        self._pairs = 0

    def check(self, schemas: list[Any], at: str) -> None:
        """Raises InvalidRequest unless the ``schemas`` of a ``oneOf``, which stands at ``at``, exclude each
        other."""
        if not self.all(schemas):
            raise InvalidRequest(
                f"oneOf is supported where its schemas exclude each other by type, or by the value of a "
                f"required property; use anyOf (at {at})"
            )

    def all(self, schemas: list[Any]) -> bool:
        """Whether no value is valid under two of ``schemas``, as far as is seen. False when in doubt."""
        return all(
            self._two(one, other, 0) for number, one in enumerate(schemas) for other in schemas[:number]
        )

    def _two(self, one: Any, other: Any, depth: int) -> bool:
        self._pairs += 1
        if depth > _MAX_DEPTH or self._pairs > _MAX_PAIRS:
            return False
        if one is False or other is False:
            return True
        if one is True or other is True or not isinstance(one, dict) or not isinstance(other, dict):
            return False
        return (
            self._inside(one, other, depth)
            or self._inside(other, one, depth)
            or _values(one, other)
            or not (_types(one) & _types(other))
            or self._properties(one, other, depth)
        )

    def _inside(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """Whether parts of ``one`` that hold beside the rest of it tell it from ``other``."""
        reference = one.get("$ref")
        if isinstance(reference, str) and self._two(self._resolve(reference), other, depth + 1):
            return True
        if any(self._two(part, other, depth + 1) for part in one.get("allOf", ())):
            return True
        for key in ("anyOf", "oneOf"):
            parts = one.get(key, ())
            if parts and all(self._two(part, other, depth + 1) for part in parts):
                return True
        return False

    def _properties(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """Both are objects with a required property that tells them apart."""
        if _types(one) != {"object"} or _types(other) != {"object"}:
            return False
        for name in set(one.get("required", ())) & set(other.get("required", ())):
            first, second = (schema.get("properties", {}).get(name, True) for schema in (one, other))
            if self._two(first, second, depth + 1):
                return True
        return _lacks(one, other) or _lacks(other, one)


def _lacks(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether ``other`` requires a property that ``one`` forbids."""
    if one.get("additionalProperties") is not False or one.get("patternProperties"):
        return False
    return any(name not in one.get("properties", {}) for name in other.get("required", ()))


def _types(schema: dict[str, Any]) -> set[str]:
    """Types of values that may be valid. A number may be an integer."""
    if "const" in schema or "enum" in schema:
        return {_type(value) for value in _constants(schema) or ()}
    given = schema.get("type", ["null", "boolean", "number", "string", "array", "object"])
    types = given if isinstance(given, list) else [given]
    return {"number" if one == "integer" else one for one in types}


def _constants(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values: list[Any] | None = schema.get("enum")
    return values


def _values(one: dict[str, Any], other: dict[str, Any]) -> bool:
    first, second = _constants(one), _constants(other)
    if first is None or second is None:
        return False
    return not ({_plain(value) for value in first} & {_plain(value) for value in second})


def _plain(value: Any) -> str:
    """Equal values give equal texts: 1 and 1.0 are equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    elif isinstance(value, list):
        return "[" + ",".join(map(_plain, value)) + "]"
    elif isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{_plain(value[key])}" for key in sorted(value)) + "}"
    return json.dumps(value)


def _type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
