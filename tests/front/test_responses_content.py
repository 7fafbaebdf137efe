"""Items of a response, their events, and the memory for responses."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from weft.common.errors import NotFound
from weft.front.http.answers import to_json
from weft.front.protocol.responses.conversion import ResponsesFacts
from weft.front.protocol.responses.responses_tools import Named
from weft.front.responses.content import Items
from weft.front.responses.response_store import OVERHEAD, ResponseStore, Stored, history
from weft.front.sealed_reasoning import unsealed
from weft.text.parsing.events import CallArguments, CallBegin, CallEnd, Content, OutputEvent, Reasoning

CALL: list[OutputEvent] = [
    CallBegin(call=0, name="f", id="c0"),
    CallArguments(call=0, text='{"a":'),
    CallArguments(call=0, text=" 1}"),
    CallEnd(call=0),
]


def played(
    found: list[OutputEvent], *, whole: bool = True, waiting: list[bytes] | None = None, **facts: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(events, items), as JSON."""
    left = list(waiting or ())
    items = Items(ResponsesFacts(**facts), lambda: left.pop(0) if left else b"")
    events = [event for one in found for event in items.take(one)] + items.close(whole=whole)
    return json.loads(to_json(events)), json.loads(to_json(items.done))


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


TEXT = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
]


def test_the_published_order_of_events() -> None:
    events, items = played([Reasoning("why"), Content("so"), *CALL])
    reasoning = [kind.replace("output_text", "reasoning_text") for kind in TEXT]
    arguments = "function_call_arguments."
    assert kinds(events) == [
        *reasoning,
        "output_item.done",
        *TEXT,
        "output_item.done",
        "output_item.added",
        arguments + "delta",
        arguments + "delta",
        arguments + "done",
        "output_item.done",
    ]
    assert [event["output_index"] for event in events] == [0] * 6 + [1] * 6 + [2] * 5
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "why"}]
    assert items[1]["content"] == [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}]
    assert (items[2]["arguments"], items[2]["call_id"], items[2]["status"]) == ('{"a": 1}', "c0", "completed")
    for event in events:
        if "item" in event:
            done = event["type"].endswith("done")
            expected = items[event["output_index"]]
            assert (event["item"] == expected) is done, "an item starts empty and ends whole"
            assert event["item"]["id"] == expected["id"]
        else:
            assert event["item_id"] == items[event["output_index"]]["id"]


def test_a_reasoning_shown_as_its_summary() -> None:
    events, (item,) = played([Reasoning("wh"), Reasoning("y")], summarizes=True, encrypted=True)
    assert kinds(events) == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    assert item["summary"] == [{"type": "summary_text", "text": "why"}]
    assert "content" not in item
    assert unsealed(item["encrypted_content"]) == "why"
    assert events[0]["item"]["encrypted_content"] is None
    assert "encrypted_content" not in played([Reasoning("why")])[1][0]


def test_names_are_the_clients() -> None:
    names = {"ns.g": Named(name="g", namespace="ns"), "p": Named(name="p", custom=True)}
    given = [
        CallBegin(call=0, name="ns.g", id="c0"),
        CallEnd(call=0),
        CallBegin(call=1, name="p", id="c1"),
        CallArguments(call=1, text='{"input": "a '),
        CallArguments(call=1, text='\\"b\\""}'),
        CallEnd(call=1),
    ]
    events, (call, custom) = played(given, names=names)
    assert (call["name"], call["namespace"], call["arguments"]) == ("g", "ns", "")
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "p", 'a "b"')
    assert kinds(events)[-4:] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert events[-3]["delta"] == 'a "b"'


@pytest.mark.parametrize("arguments", ['{"input": 5}', "{", '{"input": "x", "more": 1}', "[]", ""])
def test_input_of_another_form_is_kept(arguments: str) -> None:
    given = [CallBegin(call=0, name="p", id="c"), CallArguments(call=0, text=arguments)]
    _, (item,) = played(given, names={"p": Named(name="p", custom=True)})
    assert item["input"] == arguments


def test_what_the_end_cut_short_is_incomplete() -> None:
    assert played([Content("x")], whole=False)[1][0]["status"] == "incomplete"
    assert played(CALL[:2], whole=False)[1][0]["status"] == "incomplete"
    assert played([*CALL, Content("x")], whole=False)[1][0]["status"] == "completed"


def test_logprobs_go_with_their_text() -> None:
    given = [Content("a"), Reasoning("t"), Content("b"), Content("c")]
    waiting = [b"1", b"2", b"3,4", b""]
    events, items = played(given, waiting=waiting, logprobs=True)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert deltas == [[1], [3, 4], []]
    shown = [item["content"][0]["logprobs"] for item in items if item["type"] == "message"]
    assert shown == [[1], [3, 4]], "those of the thought are not shown"


def test_what_the_events_say_is_what_the_items_have() -> None:
    parts: list[list[OutputEvent]] = [[Reasoning("r"), Reasoning("s")], [Content("c")], CALL]
    for order, summarizes in itertools.product(itertools.product(parts, repeat=3), (False, True)):
        events, items = played([event for part in order for event in part], summarizes=summarizes)
        text: dict[str, str] = {}
        for event in events:
            if event["type"].endswith(".delta"):
                text[event["item_id"]] = text.get(event["item_id"], "") + event["delta"]
        for item in items:
            shown = item.get("arguments") or [*item.get("content", ()), *item.get("summary", ())][0]["text"]
            assert text[item["id"]] == shown


def stored(id: str, size: int = 0, previous: str | None = None, key: int = 0) -> Stored:
    output = [{"type": "message", "id": f"msg_{id}", "role": "assistant", "content": []}]
    answer = to_json({"id": id})
    padding = to_json([{"id": f"in_{id}", "role": "user", "content": "x" * size}])
    return Stored(
        id=id,
        key=key,
        answer=answer,
        input=padding,
        output=to_json(output),
        output_ids=(f"msg_{id}",),
        previous=previous,
    )


def test_a_chain_is_found_with_all_of_its_items() -> None:
    store = ResponseStore(1 << 20)
    for id, previous in (("a", None), ("b", "a"), ("c", "b"), ("other", None)):
        store.add(stored(id, previous=previous))
    chain = store.chain("c", 0)
    found = history(chain, store.owners(["msg_b", "nothing"], 0), ["msg_b", "nothing"])
    assert [item["id"] for item in found.items] == ["in_a", "msg_a", "in_b", "msg_b", "in_c", "msg_c"]
    assert list(found.referenced) == ["msg_b"]
    assert store.owners(["in_a"], 0) == [], "only what this server wrote can be referred to"


def test_its_memory_is_bounded_and_the_least_used_goes_first() -> None:
    store = ResponseStore(4 * (OVERHEAD + 1200))
    for id, previous in (("a", None), ("b", "a"), ("x", None), ("y", None)):
        store.add(stored(id, 1000, previous))
    store.chain("b", 0)
    store.add(stored("z", 1000))
    assert store.used <= store.limit
    with pytest.raises(NotFound):
        store.get("x", 0)
    assert [one.id for one in store.chain("b", 0)] == ["a", "b"]
    store.add(stored("huge", 1 << 20))
    with pytest.raises(NotFound):
        store.get("huge", 0)
    assert store.get("z", 0).id == "z"
    for id in ("a", "b", "y", "z"):
        store.remove(id, 0)
    assert store.used == 0
    assert store.owners(["msg_a"], 0) == []


def test_what_is_gone_is_named() -> None:
    store = ResponseStore(1 << 20, "; or elsewhere")
    store.add(stored("a"))
    store.add(stored("b", previous="a"))
    store.remove("a", 0)
    for id in ("b", "nothing\n"):
        with pytest.raises(NotFound) as caught:
            store.chain(id, 0)
        assert caught.value.error_code == "previous_response_not_found"
        assert caught.value.param == "previous_response_id"
        assert "; or elsewhere" in caught.value.message
        assert "\n" not in caught.value.message
    with pytest.raises(NotFound) as caught:
        store.get("a", 0)
    assert caught.value.error_code == "response_not_found"


def test_nobody_finds_what_another_key_made() -> None:
    store = ResponseStore(1 << 20)
    store.add(stored("a", key=1))
    store.add(stored("b", previous="a", key=1))
    assert [one.id for one in store.chain("b", 1)] == ["a", "b"]
    assert [one.id for one in store.owners(["msg_a"], 1)] == ["a"]
    for look in (store.get, store.chain, store.remove):
        with pytest.raises(NotFound, match="is not stored"):
            look("a", 2)
    assert store.owners(["msg_a"], 2) == []
    store.add(stored("c", previous="a", key=2))
    with pytest.raises(NotFound):
        store.chain("c", 2)
    assert store.get("a", 1).id == "a"
