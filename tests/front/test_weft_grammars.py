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
QUESTION = "Tom has 12 apples and buys 7 more. How many apples does he have?"


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
