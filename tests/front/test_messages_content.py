"""Blocks of a message, their events, and errors in the form of the Messages API."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from weft.common.errors import (
    ErrorInfo,
    InvalidRequest,
    NotFound,
    Overloaded,
    TooLarge,
    Unauthorized,
    Unavailable,
)
from weft.front.http.answers import to_json
from weft.front.messages.messages_content import ContentBlocks
from weft.front.messages.messages_errors import error_body, translated
from weft.front.middleware import has_messages_shape
from weft.front.sealed_reasoning import unsealed
from weft.text.parsing.events import CallArguments, CallBegin, CallEnd, Content, OutputEvent, Reasoning
from weft.text.token_counts import cache_creation

CALL: list[OutputEvent] = [
    CallBegin(call=0, name="f", id="c0"),
    CallArguments(call=0, text='{"a":'),
    CallArguments(call=0, text=" 1}"),
    CallEnd(call=0),
]


def played(found: list[OutputEvent], **options: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(events, blocks), as JSON."""
    blocks = ContentBlocks(**options)
    events = [event for one in found for event in blocks.take(one)] + blocks.close()
    return json.loads(to_json(events)), json.loads(to_json(blocks.done))


def shown(events: list[dict[str, Any]]) -> list[str]:
    found = []
    for event in events:
        kind = event.get("delta", event.get("content_block", {})).get("type", "")
        found.append(f"{event['index']} {event['type'].removeprefix('content_block_')} {kind}")
    return found


def test_reasoning_text_and_calls_in_their_order() -> None:
    second = [CallBegin(call=1, name="g", id="c1"), CallEnd(call=1)]
    events, blocks = played([Reasoning("a"), Reasoning("b"), Content("c"), Content("d"), *CALL, *second])
    assert shown(events) == [
        "0 start thinking",
        "0 delta thinking_delta",
        "0 delta thinking_delta",
        "0 delta signature_delta",
        "0 stop ",
        "1 start text",
        "1 delta text_delta",
        "1 delta text_delta",
        "1 stop ",
        "2 start tool_use",
        "2 delta input_json_delta",
        "2 delta input_json_delta",
        "2 stop ",
        "3 start tool_use",
        "3 stop ",
    ]
    assert blocks[0]["thinking"] == "ab"
    assert blocks[0]["signature"]
    # Anthropic's schema requires the field, and Vercel's AI SDK refuses null.
    assert blocks[1] == {"type": "text", "text": "cd", "citations": []}
    called = {"type": "tool_use", "id": "c0", "name": "f", "input": {"a": 1}, "caller": {"type": "direct"}}
    assert blocks[2] == called
    assert blocks[3]["input"] == {}
    start = events[9]["content_block"]
    assert start == {**called, "input": {}}, "a block starts empty"


def test_an_omitted_reasoning_is_in_its_signature() -> None:
    events, blocks = played([Reasoning("se"), Reasoning("cret"), Content("x")], omit_reasoning=True)
    assert blocks[0]["thinking"] == ""
    assert unsealed(blocks[0]["signature"]) == "secret"
    assert shown(events)[:3] == ["0 start thinking", "0 delta signature_delta", "0 stop "]
    assert events[1]["delta"]["signature"] == blocks[0]["signature"]


@pytest.mark.parametrize("text", ['{"a": ', "[1]", "nonsense", '"x"', "[" * 5000])
def test_arguments_that_are_no_object_are_kept(text: str) -> None:
    _, blocks = played([CallBegin(call=0, name="f", id="c"), CallArguments(call=0, text=text)])
    assert blocks[0]["input"] == {"partial_json": text}


def test_what_the_events_say_is_what_the_message_has() -> None:
    kinds: list[list[OutputEvent]] = [[Reasoning("r")], [Content("c")], CALL]
    for order in itertools.product(kinds, repeat=3):
        events, blocks = played([event for kind in order for event in kind])
        built: list[dict[str, Any]] = []
        for event in events:
            if event["type"] == "content_block_start":
                assert event["index"] == len(built)
                built.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                into = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
                key = into.get(delta["type"], "json")
                built[-1][key] += delta[into.get(delta["type"], "partial_json")]
        for block in built:
            text = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(text)
        assert built == blocks


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("x", param="p"), 400, "invalid_request_error"),
        (Unauthorized("x"), 401, "authentication_error"),
        (NotFound("x"), 404, "not_found_error"),
        (TooLarge("x"), 413, "request_too_large"),
        (Overloaded("x"), 529, "overloaded_error"),
        (Overloaded("x", code="rate_limited"), 429, "rate_limit_error"),
        (Unavailable("x"), 529, "overloaded_error"),
    ],
)
def test_errors_have_the_apis_names(error: Any, status: int, kind: str) -> None:
    info = translated(error.info())
    assert info.http_status == status
    body = json.loads(to_json(error_body(info)))
    param = {"param": "p"} if error.param else {}
    assert body == {"type": "error", "error": {"type": kind, "message": "x", **param}}


def test_an_engine_that_failed_is_an_api_error() -> None:
    info = ErrorInfo(code="engine_dead", message="x", http_status=500)
    assert error_body(translated(info)).error.type == "api_error"


def test_which_routes_have_this_shape() -> None:
    assert has_messages_shape("/v1/messages")
    assert has_messages_shape("/v1/messages/count_tokens")
    assert not has_messages_shape("/v1/messagesx")
    assert not has_messages_shape("/v1/chat/completions")


def test_the_cache_holds_full_blocks() -> None:
    assert cache_creation(200, 64, 64) == 128
    assert cache_creation(191, 0, 64) == 128
    assert cache_creation(63, 0, 64) == 0
    assert cache_creation(200, 192, 64) == 0
    assert cache_creation(200, 199, 64) == 0
    assert cache_creation(200, 0, 0) == 0
