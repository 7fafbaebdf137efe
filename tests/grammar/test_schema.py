"""JSON schemas: refusals with name and place, and the effect of patterns and formats."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grammar.rig import BACKENDS, Rig, schema
from tests.support.slowness import deadline
from weft.common.errors import InvalidRequest
from weft.grammar.json_schema.disjoint import Disjoint
from weft.grammar.json_schema.keywords import LLGUIDANCE
from weft.grammar.json_schema.patterns import ECMA, whole_pattern
from weft.grammar.json_schema.schema import read_schema
from weft.types.grammar import JsonSchema


def exclusive(first: Any) -> Any:
    """``first`` or another schema, both behind references."""
    second = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    return {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": first, "b": second}}


REFUSED: list[tuple[Any, str]] = [
    ({"not": {}}, "not is not supported by llguidance (at /)"),
    ({"properties": {"a/b": {"if": True}}}, "if is not supported by llguidance (at /properties/a~1b)"),
    ({"items": {"uniqueItems": True}}, "uniqueItems is not supported by llguidance (at /items)"),
    ({"type": "foo"}, '"foo" is not a JSON type (at /type)'),
    ({"minimun": 3}, "minimun is not supported"),
    ({"type": "object", "propertyNames": {"not": {}}}, "propertyNames is not supported by llguidance (at /)"),
    ({"type": "string", "pattern": "(?=a)"}, "look-around"),
    ({"type": "string", "pattern": "("}, "unclosed group"),
    ({"type": "integer", "exclusiveMinimum": True}, "a number is expected (at /exclusiveMinimum)"),
    ({"type": "string", "maxLength": -1}, "(at /maxLength)"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "oneOf"),
    (exclusive({"type": "object", "properties": 5, "required": ["a"]}), "(at /$defs/a/properties)"),
    (exclusive({"type": "object", "required": 5}), "(at /$defs/a/required)"),
    (exclusive({"type": [[]]}), "[] is not a JSON type (at /$defs/a/type)"),
    (exclusive({"enum": 5}), "(at /$defs/a/enum)"),
    (exclusive({"allOf": 5}), "(at /$defs/a/allOf)"),
    ({"$ref": "http://localhost/x"}, "$ref points outside"),
    ({"$ref": "#/$defs/none"}, "$ref points to nothing"),
    ({"$ref": "#"}, "$ref refers to itself"),
    ({"items": [{"type": "integer"}]}, "prefixItems"),
    ({"type": "object", "minProperties": 3}, "minProperties"),
    ({"enum": []}, "enum"),
    ({"enum": ["\x00"]}, "control characters"),
    ({"const": 2**60}, "too large"),
    ({"properties": {"a": 5}}, "must be an object or a boolean (at /properties/a)"),
    ({"type": "string", "format": []}, "format must be a string (at /format)"),
    ({"type": "object", "propertyNames": {"format": []}}, "propertyNames is not supported"),
    ({"type": "object", "propertyNames": {"minLength": -1}}, "propertyNames is not supported"),
    ({"type": "string", "pattern": f"a{{{'9' * 5000}}}"}, "a count above 65535"),
    ({"allOf": [{"type": "string"}], "anyOf": [{"$ref": f"#/allOf/{'9' * 5000}"}]}, "points to nothing"),
    ({"$id": "http://a/b", "anyOf": [{"$ref": "http://[c"}]}, "$ref points outside"),
    (False, "must be an object"),
    ([], "must be an object"),
]


@pytest.mark.requirement("G7")
@pytest.mark.parametrize(("value", "message"), REFUSED)
def test_what_is_not_held_to_is_refused_by_name_and_place(value: Any, message: str) -> None:
    assert message in Rig("llguidance", "bundled").refusal(schema(value))


@pytest.mark.parametrize("backend", BACKENDS)
def test_text_that_is_no_schema_is_refused(backend: str) -> None:
    rig = Rig(backend, "bundled")
    for text in ("", "{", "nothing", '{"minimum": NaN}', "[" * 100_000):
        assert rig.refusal(JsonSchema(schema=text))


@pytest.mark.parametrize("backend", BACKENDS)
def test_options_of_the_library_in_a_schema_do_nothing(backend: str) -> None:
    rig = Rig(backend, "bundled")
    options = {"lenient": True, "whitespace_flexible": False}
    closed = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    rig.check(schema({**closed, "x-guidance": options}), ['{ "a" : 1 }'], ['{"a":"x"}'])
    assert "not" in rig.refusal(schema({**closed, "not": {}, "x-guidance": options}))


@pytest.mark.requirement("G7")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_cannot_pass_for_another_by_its_spelling(backend: str) -> None:
    rig = Rig(backend, "bundled")
    listed = {"type": "object", "properties": {"a": {"type": "integer"}}}
    rig.check(
        schema(listed), ['{"a":1}', "{}"], ['{"\\u0061":"x"}', '{"a":1,"a":"x"}', '{"a":1,"\\u0061":"x"}']
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_references_and_recursion(backend: str) -> None:
    rig = Rig(backend, "bundled")
    node = {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["v", "next"],
        "additionalProperties": False,
    }
    rig.check(schema(node), ['{"v":1,"next":{"v":2,"next":null}}'], ['{"v":1,"next":{"v":2}}', '{"v":1}'])
    odd = {"$ref": "#/definitions/a%20b~1c", "definitions": {"a b/c": {"const": {"$ref": "x"}}}}
    rig.check(schema(odd), ['{"$ref":"x"}'], ['{"$ref":"y"}'])


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_of_schemas_that_exclude_each_other(backend: str) -> None:
    rig = Rig(backend, "bundled")
    kinds = [
        {
            "type": "object",
            "properties": {"kind": {"const": name}, name: {"type": "integer"}},
            "required": ["kind"],
            "additionalProperties": False,
        }
        for name in ("a", "b")
    ]
    value = {
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        "$defs": dict(zip("AB", kinds, strict=True)),
    }
    rig.check(schema(value), ['{"kind":"a"}', '{"kind":"b","b":1}'], ['{"kind":"a","b":1}', '{"kind":"c"}'])


FORMATS = {
    "date": (["2024-02-29", "0001-01-01"], ["2023-02-29", "2024-13-01", "2024-04-31", "0000-01-01"]),
    "time": (["23:59:59Z", "00:00:00.5+02:00"], ["24:00:00Z", "12:00", "12:00:00"]),
    "date-time": (["2024-02-29T12:00:00Z"], ["2024-02-30T12:00:00Z", "2024-02-29 12:00:00Z"]),
    "duration": (["P1D", "PT5M", "P1Y2M3DT4H"], ["P", "PT", "1D", "P1DT"]),
    "email": (["a.b+c@d-e.org"], ["a@", "@b", "a b@c", "a@-b"]),
    "hostname": (["a.b-c.org"], ["-a", "a..b", "a_b"]),
    "ipv4": (["0.0.0.0", "255.1.20.3"], ["256.1.1.1", "1.1.1", "01.1.1.1"]),
    "ipv6": (
        ["::", "::1", "1::2:3", "1:2:3:4:5:6:7:8", "::1.2.3.4"],
        ["1:2:3:4:5:6:7", "1::2::3", ":1", "g::"],
    ),
    "uuid": (["123e4567-E89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
    "uri": (["https://a.b/c?d=%20#e"], ["a.b", "https://", "https://a b"]),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_formats_are_held_to(backend: str) -> None:
    rig = Rig(backend, "bundled")
    for name, (good, bad) in FORMATS.items():
        form = schema({"type": "string", "format": name})
        rig.check(form, [json.dumps(text) for text in good], [json.dumps(text) for text in bad])


PATTERNS = [
    "^a+$", "b", "^a|b$", r"^\d{2,3}$", r"\w", r"^\S*$", r"^\s?x$", "^[^ab]$", "^.?$", r"^(a|b)*c{2}$",
    r"^[\w.-]+@[a-b]+\.(com|de)$", r"\.", "^[+-]?[0-9]*$", r"^\u0061\x62$", "(?:ab){1,2}?", "(?<n>a)b",
    "a{", "^$", "[a]]", "[a-b-]",
]  # fmt: skip


@given(st.sampled_from(PATTERNS), st.text(alphabet="abcxy01 .@-+\n\té٣", max_size=6))
@settings(max_examples=600, deadline=None, database=None)
def test_a_rewritten_pattern_matches_what_is_found_and_nothing_else(pattern: str, text: str) -> None:
    """Python's engine evaluates both patterns; for ASCII without line ends they agree."""
    rewritten = re.fullmatch(whole_pattern(pattern, ECMA), text) is not None
    found = re.search(pattern.replace("(?<n>", "(?P<n>"), text) is not None
    assert found or not rewritten
    if text.isascii() and "\n" not in text and "\t" not in text:
        assert found == rewritten


def test_patterns_that_dialects_read_differently_are_refused() -> None:
    for pattern in (
        "(?i)a",
        r"\bword",
        r"(a)\1",
        "(?!x)",
        "a++",
        "^a$b",
        "(a$)",
        "[",
        "[z-a]",
        "\\",
        r"\p{L}",
        "a{3,2}",
    ):
        with pytest.raises(InvalidRequest):
            whole_pattern(pattern)


MANY = 199
EXCLUSIVE: dict[str, list[Any]] = {
    "lists of values": [{"enum": [f"{n}-{k}" for k in range(60)]} for n in range(MANY)],
    "values behind references": [{"$ref": f"#/$defs/d{n}"} for n in range(MANY)],
    "one property": [
        {"type": "object", "properties": {"kind": {"const": n}}, "required": ["kind"]} for n in range(MANY)
    ],
    "one property of several": [
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "kind": {"enum": [n, f"{n}"]}},
            "required": ["a", "kind"],
        }
        for n in range(MANY)
    ],
    "types, then values": [
        {"type": "null"},
        {"type": "array", "items": {"type": "integer"}},
        *({"enum": [n]} for n in range(MANY)),
        *({"enum": [f"{n}"]} for n in range(MANY)),
    ],
}


@pytest.mark.parametrize("name", EXCLUSIVE)
def test_many_schemas_that_exclude_each_other_are_read_fast(name: str) -> None:
    """Measures CPU time, because the check holds the GIL. A quadratic check took more than a second."""
    definitions = {f"d{n}": {"enum": [f"{n}-{k}" for k in range(60)]} for n in range(MANY)}
    text = json.dumps({"oneOf": EXCLUSIVE[name], "$defs": definitions})
    begin = time.thread_time()
    read_schema(text, LLGUIDANCE)
    assert time.thread_time() - begin < deadline(0.3)


OVERLAPPING: dict[str, list[Any]] = {
    "a value twice": [*({"enum": [f"{n}", "x" * (n + 1)]} for n in range(50)), {"enum": ["7"]}],
    "1 and 1.0": [{"enum": [1]}, {"enum": [1.0]}],
    "a property's value twice": [
        {"type": "object", "properties": {"kind": {"const": n % 40}}, "required": ["kind"]} for n in range(50)
    ],
    "a property that may be missing": [
        {"type": "object", "properties": {"kind": {"const": n}}, "required": []} for n in range(3)
    ],
    "no type": [{"properties": {"kind": {"const": n}}, "required": ["kind"]} for n in range(3)],
    "patterns": [{"type": "string", "minLength": n} for n in range(3)],
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_schemas_that_may_overlap_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="exclude each other"):
        read_schema(json.dumps({"oneOf": OVERLAPPING[name]}), LLGUIDANCE)


def test_references_that_lead_to_each_other_are_followed_once() -> None:
    knot = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{(n + k) % 9}"} for k in range(9)]} for n in range(9)}
    schemas = [{"$ref": f"#/$defs/d{n}"} for n in range(9)]
    disjoint = Disjoint(lambda reference: knot[reference.rpartition("/")[2]])
    begin = time.thread_time()
    assert not disjoint.all(schemas)
    assert time.thread_time() - begin < deadline(2)
