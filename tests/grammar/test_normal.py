"""Schemas have the standard meaning; keywords that no grammar enforces can be left out."""

from __future__ import annotations

import json
from enum import Enum
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, Field, Json

from tests.grammar.rig import BACKENDS, Rig
from weft.common.errors import InvalidRequest
from weft.grammar.json_schema.keywords import LLGUIDANCE
from weft.grammar.json_schema.loose import loosened
from weft.grammar.json_schema.normal import normal, without_nulls
from weft.grammar.json_schema.schema import LeftOut, read_schema
from weft.types.grammar import JsonSchema


class Color(Enum):
    red = "red"
    blue = "blue"


class Held(BaseModel):
    """Fields whose pydantic schemas a grammar enforces completely."""

    by_color: dict[Color, int]
    by_word: dict[Literal["a/b", "c~d"], bool]
    by_id: dict[UUID, Color]
    place: Path
    data: bytes
    text: Json[list[int]]
    net: IPv4Network
    maybe: Color | None
    two: tuple[int, str]


class Loose(BaseModel):
    """Fields with a keyword that no grammar enforces."""

    unique: set[int]
    code: Annotated[str, Field(json_schema_extra={"pattern": "^(?!x)"})]
    held: Held


def schema(value: Any) -> JsonSchema:
    return JsonSchema(schema=json.dumps(value))


UUID_TEXT = "123e4567-e89b-42d3-a456-426614174000"
RIGHT = Held(
    by_color={Color.red: 1},
    by_word={"a/b": True},
    by_id={UUID(UUID_TEXT): Color.blue},
    place=Path("/etc"),
    data=b"x",
    text="[1]",
    net=IPv4Network("10.0.0.0/8"),
    maybe=None,
    two=(1, "x"),
).model_dump(mode="json", exclude={"text"}) | {"text": "[1]"}


def test_models_of_pydantic_are_held_to() -> None:
    right = {name: RIGHT[name] for name in Held.model_fields}
    wrong = [
        {**right, "by_color": {"green": 1}},
        {**right, "by_color": {"red": "1"}},
        {**right, "by_word": {"a": True}},
        {**right, "by_id": {"x": "red"}},
        {**right, "two": [1]},
    ]
    Rig("llguidance").check(
        schema(Held.model_json_schema()), [json.dumps(right)], [json.dumps(one) for one in wrong]
    )


def test_what_no_grammar_holds_to_is_left_out() -> None:
    document = Loose.model_json_schema()
    with pytest.raises(InvalidRequest, match="uniqueItems is not supported"):
        read_schema(json.dumps(document), LLGUIDANCE)
    made, left_out = loosened(document, LLGUIDANCE)
    assert LeftOut("/properties/unique", "uniqueItems") in left_out
    assert LeftOut("/properties/code", "pattern") in left_out
    assert len(left_out) == 2
    read_schema(json.dumps(made), LLGUIDANCE)
    assert made["properties"]["unique"]["items"] == {"type": "integer"}, "what can be held to stays"
    assert document == Loose.model_json_schema(), "the request's own schema is unchanged"


def test_each_keyword_is_left_out_where_it_stands() -> None:
    document = {
        "type": "object",
        "properties": {
            "a/b": {"type": "string", "pattern": "(?=x)", "maxLength": 3},
            "c" * 80: {"oneOf": [{"type": "integer"}, {"minimum": 3}]},
            "list": {"type": "array", "items": {"not": {}}, "contains": {"type": "null"}},
            "away": {"$ref": "https://example.org/else"},
        },
        "propertyNames": {"not": {"const": "x"}},
        "if": {"required": ["list"]},
    }
    made, left_out = loosened(document, LLGUIDANCE)
    assert {(one.at, one.keyword) for one in left_out} == {
        ("/properties/a~1b", "pattern"),
        ("/properties/" + "c" * 80, "oneOf"),
        ("/properties/list/items", "not"),
        ("/properties/list", "contains"),
        ("/properties/away", "$ref"),
        ("", "propertyNames"),
        ("", "if"),
    }
    assert made["properties"]["a/b"] == {"type": "string", "maxLength": 3}
    assert made["properties"]["c" * 80] == {"anyOf": [{"type": "integer"}, {"minimum": 3}]}
    read_schema(json.dumps(made), LLGUIDANCE)


@pytest.mark.parametrize("wrong", [{"type": "foo"}, {"required": 5}, {"properties": {"a": 5}}])
def test_what_is_no_schema_stays_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        loosened({"type": "object", "allOf": [wrong]}, LLGUIDANCE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nullable_adds_null_to_the_type(backend: str) -> None:
    rig = Rig(backend, "bundled")
    rig.check(schema({"type": "integer", "nullable": True}), ["1", "null"], ['"x"'])
    rig.check(schema({"type": "integer", "nullable": False}), ["1"], ["null"])


def test_nullable_says_nothing_without_a_type_and_opens_no_enum() -> None:
    """In OpenAPI 3.0.3 ``type`` allows null, and an enum must list null."""
    assert normal({"nullable": True, "anyOf": [{"type": "string"}]}).get("type") is None
    Rig("llguidance").check(schema({"type": "string", "enum": ["a"], "nullable": True}), ['"a"'], ["null"])


ANNOTATIONS: list[dict[str, Any]] = [
    {"format": "path"},
    {"format": "color"},
    {"format": "binary"},
    {"contentEncoding": "base64", "contentMediaType": "image/png"},
    {"contentMediaType": "application/json", "contentSchema": {"type": "array", "uniqueItems": True}},
    {"pattern": None, "enum": None, "minLength": None},
]


@pytest.mark.parametrize("note", ANNOTATIONS)
def test_annotations_ask_nothing_of_a_value(note: dict[str, Any]) -> None:
    assert read_schema(json.dumps({"type": "string", **note}), LLGUIDANCE) == {"type": "string"}


def test_null_keywords_are_absent_and_null_values_stay() -> None:
    document = {
        "type": "object",
        "required": None,
        "properties": {"a": {"type": None, "default": None, "enum": [None, 1], "items": None}, "b": None},
        "anyOf": [{"const": None, "description": None}],
    }
    assert without_nulls(document) == {
        "type": "object",
        "properties": {"a": {"default": None, "enum": [None, 1]}, "b": None},
        "anyOf": [{"const": None}],
    }


def test_references_by_id_and_anchor() -> None:
    document = {
        "$id": "https://example.org/root.json",
        "type": "object",
        "properties": {
            "part": {
                "$id": "part.json",
                "type": "object",
                "properties": {"n": {"$ref": "#/$defs/n"}, "m": {"$ref": "#many"}},
                "required": ["n", "m"],
                "$defs": {"n": {"type": "integer"}, "m": {"$anchor": "many", "type": "boolean"}},
            },
            "again": {"$ref": "part.json"},
            "inner": {"$ref": "https://example.org/part.json#/$defs/n"},
        },
        "required": ["part", "again", "inner"],
        "$defs": {"n": {"type": "string"}},
    }
    one = '{"n":1,"m":true}'
    Rig("llguidance").check(
        schema(document),
        [f'{{"part":{one},"again":{one},"inner":2}}'],
        [f'{{"part":{{"n":"x","m":true}},"again":{one},"inner":2}}', f'{{"part":{one},"again":1,"inner":2}}'],
    )


def test_a_property_may_be_called_as_a_keyword() -> None:
    named = {key: {"type": "integer"} for key in ("id", "$id", "nullable", "$ref", "propertyNames", "format")}
    made = read_schema(json.dumps({"type": "object", "properties": named}), LLGUIDANCE)
    assert made["properties"] == named
    nested = {"type": "object", "properties": {"a": {"id": "#a", "type": "integer"}}}
    assert read_schema(json.dumps(nested), LLGUIDANCE)["properties"] == {"a": {"type": "integer"}}


NAMES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"propertyNames": {"enum": ["a", "b"]}}, ['{"a":1}', "{}"], ['{"c":1}']),
    (
        {"propertyNames": {"const": "a"}, "additionalProperties": {"type": "null"}},
        ['{"a":null}'],
        ['{"a":1}', '{"b":null}'],
    ),
    (
        {"propertyNames": {"enum": ["a"]}, "properties": {"a": {"type": "integer"}, "b": {}}},
        ['{"a":1}'],
        ['{"b":1}', '{"a":"x"}'],
    ),
    ({"propertyNames": {"pattern": "^x"}}, ['{"xy":1}'], ['{"y":1}']),
    ({"propertyNames": {"minLength": 2, "maxLength": 3}}, ['{"ab":1}'], ['{"a":1}', '{"abcd":1}']),
    ({"propertyNames": {"type": "string"}}, ['{"ab":1}'], []),
    ({"propertyNames": True}, ['{"ab":1}'], []),
]


@pytest.mark.parametrize(("fields", "right", "wrong"), NAMES)
def test_names_of_properties(fields: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    Rig("llguidance", "bundled").check(schema({"type": "object", **fields}), right, wrong)


def test_shared_parts_are_counted_as_often_as_they_stand() -> None:
    """A schema of 900 characters would expand to 34 MB."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(6):
        names = {"enum": [f"n{number}" for number in range(10)]}
        schema = {"type": "object", "propertyNames": names, "additionalProperties": schema}
    with pytest.raises(InvalidRequest, match="parts"):
        loosened({"type": "object", "not": {"required": ["a"]}, "$defs": {"x": schema}}, LLGUIDANCE)
