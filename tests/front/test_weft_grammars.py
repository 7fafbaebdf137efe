"""Grammars from a request to sampled tokens: the bundled model, over HTTP."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Tom", "Ann"]},
        "apples": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "apples"],
    "additionalProperties": False,
}
PATTERN = "^(a|b)*a(a|b){%d}c{%d}$"
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "large": ({"type": "integer", "multipleOf": 98_993}, "grammar_too_large"),
    "endless": (
        {"allOf": [{"type": "string", "pattern": PATTERN % (17 + n % 3, 3 + n)} for n in range(59)]},
        "grammar_timeout",
    ),
}
QUESTION = "Tom has 12 apples and buys 7 more. How many apples does he have?"


@pytest.mark.requirement("G5")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_under_a_schema(weft_server: Any, temperature: float) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "apples", "schema": SCHEMA, "strict": True}}
    answer = weft_server.chat(
        QUESTION, response_format=form, temperature=temperature, n=4, max_tokens=300, seed=1
    )
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert choice["finish_reason"] == "stop"
        made = json.loads(choice["message"]["content"])
        assert made.keys() == {"name", "apples"}
        assert made["name"] in ("Tom", "Ann")
        assert 0 <= made["apples"] <= 99


def test_a_stream_under_a_grammar(weft_server: Any, sse: Any) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    with weft_server.stream(
        messages=messages, response_format={"type": "json_object"}, max_tokens=60
    ) as response:
        events = sse(response)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert text.startswith("{")


@pytest.mark.requirement("G6")
def test_completions_are_held_to_forms_too(weft_server: Any) -> None:
    got = weft_server.complete(QUESTION, guided_choice=["nineteen", "twelve"], temperature=0, max_tokens=40)
    assert got.json()["choices"][0]["text"] in ("nineteen", "twelve")
    got = weft_server.complete(QUESTION, guided_regex="[0-9]{3}-[a-f]{2}", seed=3, max_tokens=40)
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", got.json()["choices"][0]["text"])
    got = weft_server.complete("x", guided_grammar='start: ("a" | "b") "!"', seed=3, max_tokens=40)
    assert got.json()["choices"][0]["text"] in ("a!", "b!")


def test_a_mask_that_leaves_nothing_fails_its_request_alone(weft_server: Any) -> None:
    answer = weft_server.complete("x", guided_choice=["abc"], allowed_token_ids=[5], max_tokens=10)
    assert answer.status_code in (400, 500)
    assert answer.json()["error"]["message"]
    assert weft_server.complete("x", max_tokens=2).status_code == 200


def test_grammars_of_large_bodies_are_proved_by_the_front(weft_server: Any) -> None:
    """The process that reads large bodies compiles nothing; the API server reports whether a grammar
    compiles.
    """
    padding = {"description": "x" * (100 << 10)}
    schema = {**SCHEMA, **padding}
    form = {"type": "json_schema", "json_schema": {"name": "apples", "schema": schema, "strict": True}}
    answer = weft_server.chat(QUESTION, response_format=form, max_tokens=60, seed=1)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["message"]["content"]).keys() == {"name", "apples"}
    bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": {**padding, "uniqueItems": True}}}
    answer = weft_server.chat(QUESTION, response_format=bad)
    assert answer.status_code == 400
    assert "uniqueItems" in answer.json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["", "x" * (100 << 10)], ids=["small", "large"])
@pytest.mark.parametrize("name", HOSTILE)
def test_grammars_that_cost_too_much_are_refused(weft_server: Any, name: str, padding: str) -> None:
    schema, code = HOSTILE[name]
    form = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {**schema, "description": padding}},
    }
    answer = weft_server.chat(QUESTION, response_format=form)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code
    assert weft_server.chat(QUESTION, guided_regex="[0-9]", max_tokens=2).status_code == 200
