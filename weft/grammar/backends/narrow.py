"""Reduce JSON schemas to the forms enforced by xgrammar. xgrammar ignores some combinations of keywords.

The input comes from ``read_schema``. An object schema with listed properties and open further properties
becomes closed. xgrammar does not check further names: a model could repeat a listed name in another spelling.
"""

from __future__ import annotations

import math
import re
from typing import Any, Never

from weft.common.errors import InvalidRequest

_OF_TYPE = {
    "null": frozenset[str](),
    "boolean": frozenset[str](),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "string": frozenset({"pattern", "minLength", "maxLength"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
_MERGED = _OF_TYPE["number"] | _OF_TYPE["string"] | {"type"}
"""Keywords that can move out of allOf."""
_NEGATED = re.compile(r"\[\^(?:[^\]\\]|\\.)*\]")
"""A negated class. xgrammar excludes the characters that need an escape."""
_QUOTED = re.compile(r'"|\\\\|\\u00[01]')
"""Characters that need an escape in a JSON string."""


def narrow(schema: Any) -> Any:
    """Return the schema in the reduced forms. Raises InvalidRequest with the keyword for any other schema.

    ``schema`` loses ``$defs``: do not use ``schema`` afterwards.
    """
    if schema is True:
        return True
    definitions = schema.pop("$defs", {})
    result = _one(schema)
    if definitions:
        defined = {name: _one(inner) for name, inner in definitions.items()}
        result = {**(result if isinstance(result, dict) else {}), "$defs": defined}
    return result


def _one(schema: Any) -> Any:
    """Return one reduced schema. Raises InvalidRequest for keywords that xgrammar would ignore or misread."""
    if schema is True or schema == {}:
        return True
    if schema is False:
        _refuse("a schema that is false")
    schema = _without_all_of(schema)
    if not schema:
        return True
    for key in ("enum", "const"):
        if key in schema:
            return _constants(schema, key)
    # xgrammar ignores keywords beside these two.
    for key in ("$ref", "anyOf"):
        if key in schema:
            if len(schema) > 1:
                _refuse(f"{key} beside other keywords")
            return schema if key == "$ref" else {"anyOf": [_one(inner) for inner in schema["anyOf"]]}
    if "type" not in schema:
        _refuse(f"{next(iter(schema))} without a type")
    types = schema["type"]
    if isinstance(types, list):
        return {"anyOf": [_one({**schema, "type": one}) for one in types]}
    return _of_type(types, {key: value for key, value in schema.items() if key in _OF_TYPE[types]})


def _without_all_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return ``schema`` with the parts of allOf merged.

    Raises InvalidRequest if a keyword occurs twice or cannot stand beside others.
    """
    parts = schema.get("allOf")
    if parts is None:
        return schema
    rest = {key: value for key, value in schema.items() if key != "allOf"}
    if len(parts) == 1 and not rest and isinstance(parts[0], dict):
        return _without_all_of(parts[0])
    # Merge only keywords that xgrammar reads side by side, each at most once.
    for part in parts:
        if not isinstance(part, dict) or set(part) - _MERGED or set(part) & set(rest) or set(rest) - _MERGED:
            _refuse("allOf of several schemas")
        rest.update(part)
    return rest


def _constants(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """Return an enum with the values of a fitting type. Raises InvalidRequest without such a value."""
    if set(schema) - {key, "type"}:
        _refuse(f"{key} beside other keywords")
    values = schema["enum"] if key == "enum" else [schema["const"]]
    types = schema.get("type", list(_OF_TYPE))
    types = types if isinstance(types, list) else [types]
    left = [value for value in values if any(_has_type(value, one) for one in types)]
    if not left:
        raise InvalidRequest(f"no value of {key} has the type that the schema asks for")
    return {"enum": left}


def _has_type(value: Any, kind: str) -> bool:
    """Return True if ``value`` has the JSON type ``kind``. 1.0 counts as an integer."""
    if kind == "integer":
        whole = isinstance(value, float) and value.is_integer()
        return whole or (isinstance(value, int) and not isinstance(value, bool))
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    kinds = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}
    return isinstance(value, kinds[kind])


def _of_type(kind: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of one type in the form xgrammar enforces.

    Raises InvalidRequest for combinations that xgrammar does not enforce.
    """
    if kind == "integer":
        return {"type": kind, **_whole_bounds(keys)}
    if kind == "string" and "pattern" in keys:
        if len(keys) > 1:
            _refuse("pattern (or format) beside minLength or maxLength")
        # xgrammar matches patterns against the raw JSON text, where these characters are escapes.
        if _QUOTED.search(_NEGATED.sub("", keys["pattern"])):
            _refuse("a quotation mark, a backslash or a control character in a pattern")
    if kind == "string" and keys:
        return {"type": kind, "pattern": keys.get("pattern") or _length(keys)}
    if kind == "array":
        return {"type": kind, **_array(keys)}
    if kind == "object":
        return {"type": kind, **_object(keys)}
    return {"type": kind, **keys}


def _length(keys: dict[str, Any]) -> str:
    """Return minLength and maxLength as a pattern. For the keywords, xgrammar would accept control
    characters."""
    least, most = keys.get("minLength", 0), keys.get("maxLength", "")
    return rf'^[^"\\\u0000-\u001f\ud800-\udfff]{{{least},{most}}}$'


def _whole_bounds(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the bounds of integers as minimum and maximum. Raises InvalidRequest for an empty range."""
    least = [math.ceil(keys["minimum"])] if "minimum" in keys else []
    # Exclusive bounds of integers become inclusive bounds.
    least += [math.floor(keys["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in keys else []
    most = [math.floor(keys["maximum"])] if "maximum" in keys else []
    most += [math.ceil(keys["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in keys else []
    if least and most and max(least) > min(most):
        raise InvalidRequest("no whole number is within the bounds of the schema")
    return {**({"minimum": max(least)} if least else {}), **({"maximum": min(most)} if most else {})}


def _array(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of an array schema with reduced inner schemas. Raises InvalidRequest."""
    if "prefixItems" in keys and ("minItems" in keys or "maxItems" in keys):
        _refuse("prefixItems beside minItems or maxItems")
    result = dict(keys)
    if "prefixItems" in keys:
        result["prefixItems"] = [_one(inner) for inner in keys["prefixItems"]]
    # ``items: false`` is supported only behind prefixItems.
    if "items" in keys and not ("prefixItems" in keys and keys["items"] is False):
        result["items"] = _one(keys["items"])
    return result


def _object(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of an object schema: closed if any property is named.

    Raises InvalidRequest for combinations that xgrammar does not enforce.
    """
    properties = {name: _one(inner) for name, inner in keys.get("properties", {}).items()}
    required = keys.get("required", [])
    # A required property without a schema accepts any value.
    properties.update({name: True for name in required if name not in properties})
    further = keys.get("additionalProperties", True)
    if not properties:
        return {"additionalProperties": False if further is False else _one(further)}
    if further not in (True, False, {}):
        _refuse("additionalProperties with a schema beside properties or required")
    if further is False and set(required) - set(keys.get("properties", {})):
        raise InvalidRequest("a required property is not among the properties, and no others are allowed")
    return {
        "properties": properties,
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def _refuse(construct: str) -> Never:
    raise InvalidRequest(
        f"{construct} is not supported by xgrammar; --grammar-backend llguidance may support it"
    )
