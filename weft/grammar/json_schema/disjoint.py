"""Decide if JSON schemas exclude each other. For such schemas, ``oneOf`` means the same as ``anyOf``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from weft.common.errors import InvalidRequest

_MAX_DEPTH = 8
_MAX_PAIRS = 20_000


class Disjoint:
    """Compares checked schemas of one document: each keyword already has a valid value.

    ``resolve`` returns the target of a reference.
    """

    def __init__(self, resolve: Callable[[str], Any]) -> None:
        """``resolve`` returns the target of a reference, and may raise InvalidRequest."""
        self._resolve = resolve
        self._pairs = 0
        self._known: dict[int, tuple[dict[str, Any], frozenset[str] | None]] = {}
        """Cache of ``_possible`` by the id of a schema. The entry keeps the schema alive, so that the id
        stays unique. Without the caches, references with cycles would be followed again and again."""
        self._types: dict[int, tuple[dict[str, Any], frozenset[str]]] = {}
        """Cache of ``_kinds`` by the id of a schema."""
        self._properties_of: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        """Cache of ``_required`` by the id of a schema."""

    def check(self, schemas: list[Any], at: str) -> None:
        """Raise InvalidRequest unless the ``schemas`` of the ``oneOf`` at ``at`` exclude each other."""
        if not self.all(schemas):
            raise InvalidRequest(
                f"oneOf is supported where its schemas exclude each other by type, or by the value of a "
                f"required property; use anyOf (at {at})"
            )

    def all(self, schemas: list[Any]) -> bool:
        """Return True if provably no value is valid under two of ``schemas``. Return False in doubt.

        Cheap tests come first: types, then lists of all values, then the values of one required property.
        Only schemas with a common type, and only if these tests fail, are compared in pairs, because there
        are many pairs.
        """
        by_type: dict[str, list[Any]] = {}
        for schema in schemas:
            for name in self._kinds(schema, 0):
                by_type.setdefault(name, []).append(schema)
        return all(
            self._by_values(group) or (name == "object" and self._by_property(group)) or self._by_pairs(group)
            for name, group in by_type.items()
        )

    def _by_values(self, schemas: list[Any]) -> bool:
        """Return True if each schema lists its values and no value is listed twice."""
        listed = []
        for schema in schemas:
            values = self._possible(schema, 0)
            if values is None:
                return False
            listed.append(values)
        return len(frozenset().union(*listed)) == sum(map(len, listed))

    def _by_property(self, schemas: list[Any]) -> bool:
        """Return True if all schemas require the same property and list different values for the property."""
        found = [self._required(schema, 0) for schema in schemas]
        return any(
            self._by_values([properties[name] for properties in found])
            for name in found[0]
            if all(name in properties for properties in found)
        )

    def _by_pairs(self, schemas: list[Any]) -> bool:
        return all(
            self._two(one, other, 0) for number, one in enumerate(schemas) for other in schemas[:number]
        )

    def _parts(self, schema: dict[str, Any]) -> list[Any]:
        """Return the schemas that must hold wherever ``schema`` holds."""
        reference = schema.get("$ref")
        return [*([self._resolve(reference)] if isinstance(reference, str) else ()), *schema.get("allOf", ())]

    def _kinds(self, schema: Any, depth: int) -> frozenset[str]:
        """Return a superset of the types of valid values; all types in doubt.

        "number" includes integers. Cached.
        """
        if schema is False:
            return frozenset()
        if depth > _MAX_DEPTH or not isinstance(schema, dict):
            return frozenset(_types({}))
        if (known := self._types.get(id(schema))) is not None:
            return known[1]
        kinds = frozenset(_types(schema))
        for part in self._parts(schema):
            kinds &= self._kinds(part, depth + 1)
        self._types[id(schema)] = (schema, kinds)
        return kinds

    def _possible(self, schema: Any, depth: int) -> frozenset[str] | None:
        """Return a superset of the valid values, as texts; None if the values are not listed. Cached."""
        if schema is False:
            return frozenset()
        if depth > _MAX_DEPTH or not isinstance(schema, dict):
            return None
        if (known := self._known.get(id(schema))) is not None:
            return known[1]
        constants = _constants(schema)
        values = None if constants is None else frozenset(map(_plain, constants))
        # Any listed superset is enough: take the first found.
        parts = iter(self._parts(schema))
        while values is None and (part := next(parts, None)) is not None:
            values = self._possible(part, depth + 1)
        for key in ("anyOf", "oneOf"):
            if values is None and schema.get(key):
                listed = [self._possible(part, depth + 1) for part in schema[key]]
                if None not in listed:
                    values = frozenset().union(*(each for each in listed if each is not None))
        self._known[id(schema)] = (schema, values)
        return values

    def _required(self, schema: Any, depth: int) -> dict[str, Any]:
        """Return name to schema for the properties that every valid object has.

        Required names without a schema are left out, and beyond ``_MAX_DEPTH`` nothing is found. The result
        is cached: callers must not change the result.
        """
        found: dict[str, Any] = {}
        if depth > _MAX_DEPTH or not isinstance(schema, dict):
            return found
        if (known := self._properties_of.get(id(schema))) is not None:
            return known[1]
        for part in self._parts(schema):
            found.update(self._required(part, depth + 1))
        properties = schema.get("properties", {})
        found.update({name: properties[name] for name in schema.get("required", ()) if name in properties})
        self._properties_of[id(schema)] = (schema, found)
        return found

    def _two(self, one: Any, other: Any, depth: int) -> bool:
        """Return True if provably no value is valid under both schemas.

        Return False in doubt, and after ``_MAX_PAIRS`` comparisons.
        """
        # A bound on all comparisons together, because references can multiply the pairs.
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
            or self._values(one, other)
            or not (_types(one) & _types(other))
            or self._properties(one, other, depth)
        )

    def _inside(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """Return True if mandatory parts of ``one`` exclude ``other``."""
        reference = one.get("$ref")
        if isinstance(reference, str) and self._two(self._resolve(reference), other, depth + 1):
            return True
        # One conflicting part of allOf is enough; of anyOf, every part must conflict.
        if any(self._two(part, other, depth + 1) for part in one.get("allOf", ())):
            return True
        for key in ("anyOf", "oneOf"):
            parts = one.get(key, ())
            if parts and all(self._two(part, other, depth + 1) for part in parts):
                return True
        return False

    def _values(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        first, second = self._possible(one, 0), self._possible(other, 0)
        return first is not None and second is not None and first.isdisjoint(second)

    def _properties(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """Return True if both are objects and a required property distinguishes them."""
        if _types(one) != {"object"} or _types(other) != {"object"}:
            return False
        for name in set(one.get("required", ())) & set(other.get("required", ())):
            first, second = (schema.get("properties", {}).get(name, True) for schema in (one, other))
            if self._two(first, second, depth + 1):
                return True
        return _lacks(one, other) or _lacks(other, one)


def _lacks(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if ``other`` requires a property that ``one`` forbids."""
    if one.get("additionalProperties") is not False or one.get("patternProperties"):
        return False
    return any(name not in one.get("properties", {}) for name in other.get("required", ()))


def _types(schema: dict[str, Any]) -> set[str]:
    """Return a superset of the types of valid values. "number" includes integers."""
    if "const" in schema or "enum" in schema:
        return {_type(value) for value in _constants(schema) or ()}
    given = schema.get("type", ["null", "boolean", "number", "string", "array", "object"])
    types = given if isinstance(given, list) else [given]
    return {"number" if one == "integer" else one for one in types}


def _constants(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values of ``const`` or ``enum``; None without either."""
    if "const" in schema:
        return [schema["const"]]
    values: list[Any] | None = schema.get("enum")
    return values


def _plain(value: Any) -> str:
    """Return a text of ``value``. Equal values give equal texts: 1 and 1.0 are equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    elif isinstance(value, list):
        return "[" + ",".join(map(_plain, value)) + "]"
    elif isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{_plain(value[key])}" for key in sorted(value)) + "}"
    return json.dumps(value)


def _type(value: Any) -> str:
    """Return the JSON type of ``value``; "number" for every number."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
