"""Draw JSON schemas by seed, make texts near their values, and decide if a text is valid."""

from __future__ import annotations

import ipaddress
import json
import random
import re
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema

FUNCTIONS = Path(__file__).parent / "data" / "function_schemas.json"
"""Path of fifty schemas in the style of agent functions."""

_NAMES = ["a", "b", "id", "name", "x y", "é", "k/1", "type", "$ref", "items", "a.b", "A", "aa"]
_WORDS = ["", "a", "ab", "red", "über", 'q"t', "line\nend", "back\\slash", "日本", "0", "null", "true", " x "]
_PATTERNS = [
    "^[a-z]+$", "^a", "b$", "x+", r"^\d{2,4}$", r"^\w+@\w+\.com$", "^(red|green|blue)$", r"^[^,]*$",
    "^.{2,5}$", "^[A-Z][a-z]*( [A-Z][a-z]*)*$", r"^\S+$", r"^\s*$", "^a|b$", r"^[+-]?\d+(\.\d+)?$",
    "(ab)*c?", "^(?!x)", r"\bword\b", r"^é?$", r"^[\w.-]+$", r'^"q"$',
]  # fmt: skip
_FORMATS = [
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    "json-pointer", "int32", "int64", "float", "regex", "iri",
]  # fmt: skip


def functions() -> list[dict[str, Any]]:
    """Return the fifty schemas without the function names."""
    return [entry["parameters"] for entry in json.loads(FUNCTIONS.read_text())]


class Drawn:
    """Draw schemas by seed. Half of all keywords are rarely enforced by grammar backends."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._names: list[str] = []

    def schema(self) -> dict[str, Any]:
        """Return one schema, with definitions if the schema refers to some."""
        if self._random.random() < 0.25:
            self._names = [f"d{number}" for number in range(self._random.randint(1, 3))]
        result = self._one(0)
        if self._names:
            result = {**result, "$defs": {name: self._one(1) for name in self._names}}
        return result

    def _one(self, depth: int) -> dict[str, Any]:
        draw = self._random.random()
        if self._names and depth and draw < 0.12:
            return {"$ref": f"#/$defs/{self._pick(self._names)}", **self._rarely({"title": "t"}, 0.2)}
        if draw < 0.2:
            return self._combined(depth)
        if draw < 0.28:
            return {"enum": [self._constant() for _ in range(self._random.randint(1, 4))]}
        if draw < 0.31:
            return {"const": self._constant()}
        if draw < 0.33:
            return {}
        kinds = [self._string, self._number, self._integer, self._object, self._array]
        weights = [3, 2, 2, 5, 3] if depth < 3 else [3, 2, 2, 0, 0]
        result: dict[str, Any] = self._random.choices(kinds, weights)[0](depth)
        if self._random.random() < 0.06:
            other: dict[str, Any] = self._pick([self._string, self._integer])(depth)
            result = {**other, **result, "type": list({result["type"], other["type"]})}
        if self._random.random() < 0.04:
            del result["type"]
        return {**result, **self._rarely({"description": "what it is", "default": None}, 0.2)}

    def _combined(self, depth: int) -> dict[str, Any]:
        key = self._pick(["anyOf", "anyOf", "oneOf", "allOf", "not", "if"])
        if key == "not":
            return {**self._integer(depth), "not": {"const": 3}}
        if key == "if":
            return {"if": self._one(3), "then": self._one(3), "else": self._one(3)}
        parts = [self._one(min(depth + 1, 3)) for _ in range(self._random.randint(1, 3))]
        return {key: parts, **self._rarely({"minimum": 2}, 0.1)}

    def _string(self, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {"type": "string"}
        draw = self._random.random()
        if draw < 0.25:
            result["pattern"] = self._pick(_PATTERNS)
        elif draw < 0.4:
            result["format"] = self._pick(_FORMATS)
        if self._random.random() < 0.25:
            low = self._random.randint(0, 4)
            result.update(self._pick([{"minLength": low}, {"maxLength": low + 3}]))
        return result

    def _number(self, depth: int) -> dict[str, Any]:
        low = round(self._random.uniform(-50, 50), self._random.randint(0, 3))
        high = round(low + self._random.uniform(0.5, 100), 2)
        return {"type": "number", **self._bounds(low, high), **self._rarely({"multipleOf": 0.25}, 0.1)}

    def _integer(self, depth: int) -> dict[str, Any]:
        low = self._random.randint(-1000, 1000)
        step = self._random.randint(2, 7)
        bounds = self._bounds(low, low + self._random.randint(2, 5000))
        return {"type": "integer", **bounds, **self._rarely({"multipleOf": step}, 0.12)}

    def _bounds(self, low: float, high: float) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._random.random() < 0.4:
            found[self._pick(["minimum", "exclusiveMinimum"])] = low
        if self._random.random() < 0.4:
            found[self._pick(["maximum", "exclusiveMaximum"])] = high
        return found

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(_NAMES, self._random.randint(0, 4))
        result: dict[str, Any] = {"type": "object", "properties": {n: self._one(depth + 1) for n in names}}
        required = [name for name in names if self._random.random() < 0.5]
        if self._random.random() < 0.05:
            required.append("extra")
        result.update({"required": required} if required else {})
        draw = self._random.random()
        if draw < 0.5:
            result["additionalProperties"] = False
        elif draw < 0.65:
            result["additionalProperties"] = self._one(depth + 1)
        for keyword, chance in (
            ({"minProperties": self._random.randint(0, 3)}, 0.06),
            ({"maxProperties": self._random.randint(1, 5)}, 0.06),
            ({"patternProperties": {self._pick(["^x", "^[ab]"]): self._one(depth + 1)}}, 0.06),
            ({"propertyNames": {"pattern": "^[a-z]"}}, 0.03),
            ({"dependentRequired": {"a": ["b"]}}, 0.03),
        ):
            result.update(self._rarely(keyword, chance))
        return result

    def _array(self, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {"type": "array"}
        if self._random.random() < 0.2:
            result["prefixItems"] = [self._one(depth + 1) for _ in range(self._random.randint(1, 3))]
            result.update(self._rarely({"items": False}, 0.5))
        else:
            result["items"] = self._one(depth + 1)
        low = self._random.randint(0, 2)
        for keyword, chance in (
            ({"minItems": low}, 0.3),
            ({"maxItems": low + self._random.randint(0, 3)}, 0.3),
            ({"uniqueItems": True}, 0.06),
            ({"contains": {"type": "integer"}}, 0.03),
        ):
            result.update(self._rarely(keyword, chance))
        return result

    def _constant(self) -> Any:
        return self._pick(
            [*_WORDS, 0, 1, -7, 2.5, 1.0, 1000000, True, False, None, [], [1, "a"], {"k": 1}, {"b": []}]
        )

    def _rarely(self, keyword: dict[str, Any], chance: float) -> dict[str, Any]:
        return keyword if self._random.random() < chance else {}

    def _pick(self, items: Any) -> Any:
        return self._random.choice(items)


def mutants(value: Any, rng: random.Random) -> list[str]:
    """Return texts near a value: changed values, more or fewer keys, unusual spellings. Some texts are
    valid.
    """
    result = []
    for _ in range(4):
        separators = rng.choice([(",", ":"), (", ", ": ")])
        result.append(json.dumps(_changed(value, rng), ensure_ascii=False, separators=separators))
    text = json.dumps(value, ensure_ascii=False)
    names = re.findall(r'"([a-z])(?=[^"]*":)', text)
    if names:
        letter = rng.choice(names)
        result.append(text.replace(f'"{letter}', f'"\\u{ord(letter):04x}', 1))
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        twice = json.dumps({key: _changed(value[key], rng)}, ensure_ascii=False)[1:]
        result.append(text[:-1] + ", " + twice)
        spelled = twice.replace(f'"{key[:1]}', f'"\\u{ord(key[:1] or "x"):04x}', 1)
        result.append(text[:-1] + ", " + spelled)
        result.append("{" + twice[:-1] + ", " + text[1:])
    if isinstance(value, int | float) and not isinstance(value, bool):
        result += [f"{value}{end}" for end in ("e0", ".0", "0", ".000000000000000001", ".")]
        result += [f"-{value}", f"0{value}"]
    return result


def _changed(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.8:
        result = dict(value)
        key = rng.choice(list(result))
        draw = rng.random()
        if draw < 0.2:
            del result[key]
        elif draw < 0.4:
            result[rng.choice(_NAMES)] = rng.choice([1, "a", None])
        else:
            result[key] = _changed(result[key], rng)
        return result
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        draw = rng.random()
        if draw < 0.25:
            return value[:place] + value[place + 1 :]
        if draw < 0.5:
            return [*value, value[place]]
        return [*value[:place], _changed(value[place], rng), *value[place + 1 :]]
    if isinstance(value, str) and rng.random() < 0.7:
        return rng.choice([value + "a", value[:-1], value + "\n", value.upper(), value + "é", "\t" + value])
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.7:
        return rng.choice([value + 1, value - 1, value * 10, value + 0.5, -value, 0])
    return rng.choice([None, True, 0, 1.5, -1, "", "a", [], {}, [1], {"a": 1}])


class Oracle:
    """Decide if a text is JSON and valid under a schema. Numbers are decimals; formats are checked."""

    def __init__(self, schema: Any) -> None:
        exact = json.loads(json.dumps(schema), parse_float=Decimal)
        self._validator = _VALIDATOR(exact, format_checker=_CHECKER)

    def valid(self, text: str) -> bool:
        """Return True for a valid text. Return False also for text that is not JSON or has white space
        around.
        """
        try:
            value = json.loads(text, parse_float=Decimal, parse_constant=_constant)
        except ValueError:
            return False
        return text == text.strip() and bool(self._validator.is_valid(value))


def _constant(name: str) -> Any:
    raise ValueError(name)


def _is_integer(checker: Any, value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, Decimal) and value == value.to_integral_value())


_BASE = jsonschema.Draft202012Validator
_VALIDATOR = jsonschema.validators.extend(
    _BASE, type_checker=_BASE.TYPE_CHECKER.redefine("integer", _is_integer)
)
_CHECKER = jsonschema.FormatChecker(formats=())


def _check(name: str) -> Callable[[Callable[[str], object]], None]:
    def add(function: Callable[[str], object]) -> None:
        def checked(value: object) -> bool:
            return not isinstance(value, str) or bool(function(value))

        _CHECKER.checks(name, raises=ValueError)(checked)

    return add


_ASCII_HOST = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*\Z")
_check("date")(lambda text: len(text) == 10 and date.fromisoformat(text))
_check("time")(lambda text: re.search(r"([zZ]|[+-]\d\d:\d\d)\Z", text) and _moment(f"2000-01-01T{text}"))
_check("date-time")(lambda text: re.search(r"([zZ]|[+-]\d\d:\d\d)\Z", text) and _moment(text))
_check("ipv4")(lambda text: text.isascii() and ipaddress.IPv4Address(text))
_check("ipv6")(lambda text: "%" not in text and ipaddress.IPv6Address(text))
_check("uuid")(lambda text: re.fullmatch("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", text))
_check("hostname")(lambda text: len(text) < 254 and _ASCII_HOST.match(text))
_check("email")(lambda text: " " not in text and _ASCII_HOST.match(text.partition("@")[2]))
_check("uri")(lambda text: text.isascii() and " " not in text and urlsplit(text).scheme)
_check("json-pointer")(lambda text: (not text or text[0] == "/") and not re.search(r"~(?![01])", text))
_check("duration")(
    lambda text: re.fullmatch(
        r"P(?!\Z)((\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?|\d+W)", text, re.ASCII
    )
)


def _moment(text: str) -> object:
    """Parse an RFC 3339 timestamp; raise ValueError. Digits beyond microseconds are cut."""
    if not re.fullmatch(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)", text, re.ASCII):
        raise ValueError(text)
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))


_check("int32")(lambda text: True)
