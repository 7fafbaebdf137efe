"""Express ``propertyNames`` by keywords that grammars support: single names, or one pattern."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.grammar.json_schema.formats import FORMATS

_MAX_STEPS = 16
"""Maximum length of a chain of references."""
_NOTES = frozenset(["type", "title", "description", "$comment", "examples", "default", "deprecated"])


def without_property_names(schema: dict[str, Any], resolve: Callable[[str], Any]) -> dict[str, Any] | None:
    """Return ``schema`` with the same meaning without ``propertyNames``; None if impossible.

    A list of names gives each name an entry in ``properties``. Any other rule becomes the pattern of the
    further properties. ``resolve`` returns the target of a reference.
    """
    rule = _rule(schema["propertyNames"], resolve)
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    further = schema.get("additionalProperties", True)
    properties = schema.get("properties", {})
    if rule is True or _allows_every_name(rule):
        return rest
    if not isinstance(rule, dict) or not isinstance(properties, dict):
        return None
    if (names := _names(rule)) is not None:
        if schema.get("patternProperties"):
            return None
        # A listed property outside the allowed names becomes impossible (False).
        listed = frozenset(names)
        allowed = {key: value if key in listed else False for key, value in properties.items()}
        allowed |= {name: further for name in names if name not in properties and further is not False}
        return {**rest, "properties": allowed, "additionalProperties": False}
    pattern = _pattern(rule)
    if pattern is None or properties or schema.get("patternProperties"):
        return None
    return {**rest, "patternProperties": {pattern: further}, "additionalProperties": False}


def _rule(rule: Any, resolve: Callable[[str], Any]) -> Any:
    """Return the rule at the end of a chain of references; None if the chain is too long or has other
    keywords."""
    for _ in range(_MAX_STEPS):
        if not isinstance(rule, dict) or not isinstance(rule.get("$ref"), str):
            return rule
        if rule.keys() - _NOTES - {"$ref"}:
            return None
        rule = resolve(rule["$ref"])
    return None


def _names(rule: dict[str, Any]) -> list[str] | None:
    """Return the allowed names if the rule lists names, else None."""
    if rule.get("type", "string") != "string" or rule.keys() - _NOTES - {"enum", "const"}:
        return None
    listed = rule.get("enum", [rule["const"]] if "const" in rule else None)
    if not isinstance(listed, list) or ("enum" in rule and "const" in rule):
        return None
    return [name for name in listed if isinstance(name, str)]


def _pattern(rule: dict[str, Any]) -> str | None:
    """Return a pattern of the names if the rule has exactly one constraint, else None."""
    if rule.get("type", "string") != "string":
        return None
    constraints = {key: value for key, value in rule.items() if key not in _NOTES}
    if constraints.keys() <= {"minLength", "maxLength"}:
        # Bounds of length count as one constraint.
        least, most = constraints.get("minLength", 0), constraints.get("maxLength", "")
        if not all(type(one) is int and one >= 0 for one in (least, most) if one != ""):
            return None
        return rf"^[^\u0000]{{{least},{most}}}$"
    if len(constraints) != 1:
        return None
    ((key, value),) = constraints.items()
    if key == "pattern" and isinstance(value, str):
        return value
    if key == "format" and isinstance(value, str) and value in FORMATS:
        return f"^(?:{FORMATS[value]})$"
    return None


def _allows_every_name(rule: Any) -> bool:
    """Return True if every name satisfies the rule."""
    if not isinstance(rule, dict) or rule.get("type", "string") != "string":
        return False
    constraints = rule.keys() - _NOTES
    return not constraints or (
        constraints == {"format"} and isinstance(rule["format"], str) and rule["format"] not in FORMATS
    )
