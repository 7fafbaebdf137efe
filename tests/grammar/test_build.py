"""Conversion of request fields to grammars."""

from __future__ import annotations

from typing import Any

import pytest

from tests.grammar.rig import BACKENDS, Rig
from weft.common.errors import InvalidRequest
from weft.grammar import build
from weft.types.grammar import MAX_DEPTH, MAX_SOURCE, FreeText, Grammar, GrammarSequence, OneOf, Regex, Text

CALL = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
TAGS = [
    {"begin": "<function=a>", "schema": CALL, "end": "</function>"},
    {"begin": "<function=b>", "schema": {"type": "integer"}, "end": "</function>"},
]
MADE = 'so <function=a>{"x":1}</function> and <function=b>5</function>'


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("triggers", [["<function="], ["<function=a", "<function=b"]])
def test_the_older_structural_tag(backend: str, triggers: list[str]) -> None:
    rig = Rig(backend)
    tag = build.structural_tag({"type": "structural_tag", "structures": TAGS, "triggers": triggers})
    rig.check(tag, ["prose <func", MADE], ['<function=a>{"y":1}</function>', MADE[:-1]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_newer_structural_tag(backend: str) -> None:
    rig = Rig(backend)

    def tag(form: dict[str, Any]) -> Grammar:
        return build.structural_tag({"type": "structural_tag", "format": form})

    reasoning = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
    number = {"type": "tag", "begin": "[", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "]"}
    listed = {"type": "tags_with_separator", "separator": ",", "tags": [number], "at_least_one": True}
    end = {"type": "optional", "content": {"type": "const_string", "value": "!"}}
    whole = tag({"type": "sequence", "elements": [reasoning, listed, end]})
    rig.check(whole, ["<think>x</think>[1],[22]!", "<think></think>[1]"], ["<think>x</think>", "[1]"])
    calls = [
        {
            "type": "tag",
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one["schema"]},
            "end": ["</function>", "</f>"],
        }
        for one in TAGS
    ]
    some = {"type": "triggered_tags", "triggers": ["<function="], "tags": calls, "excludes": ["bad"]}
    rig.check(tag(some), [MADE, "so"], ["bad", f"{MADE} bad"])
    first = tag({**some, "at_least_one": True, "stop_after_first": True})
    rig.check(first, ["a <function=b>5</f>"], ["a", MADE, "<function=b>5</f> more"])
    choice = {"type": "or", "elements": [{"type": "grammar", "grammar": 'root ::= "ab"+'}, number]}
    repeated = tag({"type": "repeat", "min": 1, "max": 2, "content": choice})
    rig.check(repeated, ["abab[1]", "[1][2]"], ["", "[1][2][3]"])
    rig.check(tag({"type": "plus", "content": number}), ["[1][2][3]"], [""])
    rig.check(tag({"type": "star", "content": number}), ["", "[1]"], ["["])


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"structures": [], "triggers": ["<"]},
        {"structures": TAGS, "triggers": []},
        {"structures": TAGS, "triggers": ["<function=a"]},
        {"structures": TAGS, "triggers": ["<f", "<function="]},
        {"structures": [{"begin": "<f>", "schema": 5, "end": ""}], "triggers": ["<f>"]},
        {"format": None},
        {"format": {"type": "dispatch", "rules": []}},
        {"format": {"type": "any_text", "max_tokens": 5}},
        {"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}},
        {"format": {"type": "sequence", "elements": []}},
        {"format": {"type": "repeat", "min": "1", "max": 2, "content": {"type": "any_text"}}},
        {"format": {"type": "repeat", "min": 1 << 70, "max": -1, "content": {"type": "any_text"}}},
        {"format": {"type": "repeat", "min": 0, "max": 1 << 70, "content": {"type": "any_text"}}},
        {"format": {"type": "repeat", "min": -1, "max": 2, "content": {"type": "any_text"}}},
    ],
)
def test_a_broken_structural_tag_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as error:
        build.structural_tag(value, param="response_format")
    assert error.value.param == "response_format"
    nested: dict[str, Any] = {"type": "any_text"}
    for _ in range(50):
        nested = {"type": "star", "content": nested}
    with pytest.raises(InvalidRequest, match="levels"):
        build.structural_tag({"format": nested})


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_forms(backend: str) -> None:
    rig = Rig(backend)
    rig.check(build.json_object(), ["{}", '{"a": [1, null]}'], ["[]", "1", '{"a"}'])
    rig.check(build.json_schema('{"type": "integer"}'), ["5"], ["x"])
    rig.check(build.json_schema(True), ["5", "[]"], ["x"])
    rig.check(build.choice(["a", "b", "a"]), ["a", "b"], ["c", "ab"])
    rig.check(build.regex("[0-9]+"), ["12"], ["x"])
    rig.check(build.context_free('root ::= "x" | "y"'), ["x"], ["z"])


@pytest.mark.parametrize("value", ["{", "[]", "5", False, None, {"minimum": float("inf")}])
def test_a_schema_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequest):
        build.json_schema(value)


@pytest.mark.parametrize(
    "make", [lambda: build.choice([]), lambda: build.choice(["a", ""]), lambda: build.regex(""),
             lambda: build.context_free("  ")],
)  # fmt: skip
def test_empty_grammars_are_refused(make: Any) -> None:
    with pytest.raises(InvalidRequest):
        make()


@pytest.mark.parametrize("backend", BACKENDS)
def test_trees_are_bounded(backend: str) -> None:
    rig = Rig(backend)
    deep: Grammar = Text("a")
    for _ in range(MAX_DEPTH):
        deep = GrammarSequence((deep,))
    assert "levels deep" in rig.refusal(deep)
    assert "parts" in rig.refusal(GrammarSequence(tuple(Text("a") for _ in range(3000))))
    assert "characters" in rig.refusal(Regex("a" * (MAX_SOURCE + 1)))
    assert "at least one" in rig.refusal(OneOf(()))
    assert "at least one" in rig.refusal(FreeText(ends=("",)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_clients_rules_reach_nothing_else(backend: str) -> None:
    rig = Rig(backend)
    many = " ".join(f"r{n}" for n in range(600)) + "".join(f'\nr{n}: "a"' for n in range(600))
    for source, what in [
        ('start: %json {"not": {}}', "%json"),
        ('%llguidance {"no_forcing": false}\nstart: "a"', "%llguidance"),
        ("start: @whole", "@"),
        ("start: <[5]>", "token ids"),
        (f"start: {many}", "rules"),
    ]:
        assert what in rig.refusal(build.context_free(source))
    rig.check(build.context_free('start: "@ %json <[" // @ %json'), ["@ %json <["], ["@"])
