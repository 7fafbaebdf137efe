"""The store of responses: shares of keys, and the stored parts of an item."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.common.errors import NotFound
from weft.front.protocol.parse import parse
from weft.front.protocol.responses.conversion import History, conversation
from weft.front.protocol.responses.protocol import ResponsesRequest
from weft.front.responses.response_store import ResponseStore, Stored


def stored(id: str, key: int, size: int = 1000) -> Stored:
    return Stored(id=id, key=key, answer=b"x" * size, output=b"[]", input=b"[]", output_ids=())


def test_a_key_that_floods_evicts_its_own_responses() -> None:
    store = ResponseStore(20 * stored("", 0).size)
    store.add(stored("mine", 1))
    for number in range(100):
        store.add(stored(f"theirs{number}", 0))
    assert store.get("mine", 1).id == "mine"
    assert store.used <= store.limit
    assert store.get("theirs99", 0)
    with pytest.raises(NotFound):
        store.get("theirs0", 0)


def test_a_share_that_is_not_used_serves_others_until_it_is() -> None:
    store = ResponseStore(10 * stored("", 0).size)
    for number in range(10):
        store.add(stored(f"a{number}", 0))
    assert store.get("a0", 0)
    for number in range(5):
        store.add(stored(f"b{number}", 1))
    assert all(store.get(f"b{number}", 1) for number in range(5))
    store.remove("b0", 1)
    assert store.used == 9 * stored("", 0).size


@pytest.mark.parametrize(
    "item",
    [
        {"role": "assistant", "content": "Hi", "phase": "x" * 10_000},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi", "more": "x" * 10_000}]},
        {"role": "user", "content": "Hi", "status": "x" * 10_000},
        {"role": "user", "content": "Hi", "id": "x" * 10_000},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hi", "annotations": ["x" * 10_000]}],
        },
    ],
)
def test_fields_that_no_prompt_shows_are_not_stored(item: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", "input": [{"type": "message", **item}]}).encode()
    _, facts = conversation(parse(body, ResponsesRequest), History(), system_inside=True)
    assert b"Hi" in facts.items
    assert len(facts.items) < 500


def test_a_short_phase_comes_back() -> None:
    item = {"type": "message", "role": "assistant", "content": "Hi", "phase": "commentary"}
    body = json.dumps({"model": "m", "input": [item]}).encode()
    _, facts = conversation(parse(body, ResponsesRequest), History(), system_inside=True)
    assert json.loads(facts.items)[0]["phase"] == "commentary"
