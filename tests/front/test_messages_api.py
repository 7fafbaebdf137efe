"""/v1/messages of a real server with scripted outputs, through anthropic-python and raw requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pydantic
import pytest

from tests.support.servers import Running
from tests.support.slowness import deadline
from tests.support.tool_template import write_template

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SCRIPT: list[dict[str, Any]] = [
    {"match": "<tool_response>", "text": "It is 12 degrees in Oslo.", "num_cached": 64, "repeat": True},
    {"match": "both cities", "text": CALL + "\n" + CALL.replace("Oslo", "Rome"), "repeat": True},
    {"match": "the weather", "text": "<think>\nI ask.\n</think>\n\nLet me see.\n" + CALL, "repeat": True},
    {"match": "an object", "text": '{"city": "Oslo"}', "repeat": True},
    {"match": "half a call", "text": CALL[:60], "finish": "length", "repeat": True},
    {"match": "fail later", "text": "abc", "finish": "error", "repeat": True},
    {"match": "be full", "error": "overloaded", "repeat": True},
    {"match": "be gone", "error": "unavailable", "repeat": True},
    {"text": "one two three", "repeat": True},
]
TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "Tells it.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]


@pytest.fixture(scope="module")
def server(start_scripted: Callable[..., Running], tmp_path_factory: pytest.TempPathFactory) -> Running:
    template = write_template(tmp_path_factory.mktemp("template"))
    return start_scripted(SCRIPT, "--chat-template", str(template), "--max-request-bytes", "200000")


@pytest.fixture(scope="module")
def client(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=deadline(20))


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def post(server: Running, text: str = "hello", **fields: Any) -> httpx.Response:
    body = {"model": server.model, "max_tokens": 300, "messages": user(text), **fields}
    return server.http.post("/v1/messages", json=body)


def test_a_message(client: anthropic.Anthropic, server: Running) -> None:
    made = client.messages.create(model=server.model, max_tokens=50, messages=user("hello"), system="brief")
    assert [block.type for block in made.content] == ["text"]
    assert made.content[0].type == "text"
    assert made.content[0].text == "one two three"
    assert (made.stop_reason, made.role, made.model) == ("end_turn", "assistant", server.model)
    assert made.usage.input_tokens > 5
    assert made.usage.output_tokens > 3


@pytest.mark.requirement("G10")
def test_a_tool_loop(client: anthropic.Anthropic, server: Running) -> None:
    conversation = user("the weather in Oslo?")
    options: dict[str, Any] = {"model": server.model, "max_tokens": 200, "tools": TOOLS}
    first = client.messages.create(messages=conversation, **options)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.stop_reason == "tool_use"
    call = first.content[2]
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}
    second = client.messages.create(
        messages=[
            *conversation,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ],
        **options,
    )
    assert second.content[0].type == "text"
    assert second.content[0].text == "It is 12 degrees in Oslo."
    usage = second.usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (64, 0)
    count = client.messages.count_tokens(
        model=server.model,
        tools=TOOLS,
        messages=[
            *conversation,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ],
    )
    assert count.input_tokens == usage.input_tokens + 64


def test_a_stream_tells_the_same_as_the_whole(client: anthropic.Anthropic, server: Running) -> None:
    options: dict[str, Any] = {"model": server.model, "max_tokens": 200, "tools": TOOLS}
    for text in ("the weather", "both cities", "hello", "half a call"):
        whole = client.messages.create(messages=user(text), **options)
        with client.messages.stream(messages=user(text), **options) as stream:
            kinds = [event.type for event in stream]
            built = stream.get_final_message()
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        shown = [one.to_dict() for one in (whole, built)]
        for one in shown:
            for block in one["content"]:  # type: ignore[attr-defined]
                block.pop("id", None)
                if block["type"] == "tool_use" and "partial_json" in block["input"]:
                    block["input"] = {}  # the client's own reading of half an object
            one.pop("id")
        if text == "half a call":
            shown[0]["content"], shown[1]["content"] = [], []
        assert shown[0] == shown[1]


def test_parallel_calls_and_no_parallel_calls(server: Running) -> None:
    both = post(server, "both cities", tools=TOOLS).json()
    calls = [block for block in both["content"] if block["type"] == "tool_use"]
    assert [call["input"]["city"] for call in calls] == ["Oslo", "Rome"]
    assert calls[0]["id"] != calls[1]["id"]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    one = post(server, "both cities", tools=TOOLS, tool_choice=choice).json()
    assert sum(block["type"] == "tool_use" for block in one["content"]) == 1
    none = post(server, "both cities", tools=TOOLS, tool_choice={"type": "none"}).json()
    assert [block["type"] for block in none["content"]] == ["text"]
    assert none["stop_reason"] == "end_turn"


def test_why_a_message_ends(server: Running) -> None:
    stopped = post(server, stop_sequences=["two", "three"]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
    assert stopped["content"][0]["text"] == "one "
    cut = post(server, max_tokens=2).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    full = post(server, "x " * 800 + "half a call", max_tokens=10**6).json()
    assert full["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.requirement("G10")
def test_reasoning_can_be_left_out_and_come_back(server: Running) -> None:
    thinking = {"type": "enabled", "budget_tokens": 2048, "display": "omitted"}
    made = post(server, "the weather", tools=TOOLS, thinking=thinking).json()
    reasoning = made["content"][0]
    assert (reasoning["type"], reasoning["thinking"]) == ("thinking", "")
    shown = post(server, "the weather", tools=TOOLS).json()["content"][0]["thinking"]
    result = {"type": "tool_result", "tool_use_id": made["content"][2]["id"], "content": "12"}

    def tokens(content: Any) -> int:
        turns = [*user("the weather"), {"role": "assistant", "content": content}]
        body = {"model": server.model, "messages": [*turns, {"role": "user", "content": [result]}]}
        return int(server.http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])

    with_reasoning = [{"type": "thinking", "thinking": shown, "signature": ""}, *made["content"][1:]]
    assert tokens(made["content"]) == tokens(with_reasoning) > tokens(made["content"][1:])


@pytest.mark.requirement("G10")
def test_events_are_named_and_in_order(server: Running) -> None:
    body = {"model": server.model, "max_tokens": 100, "messages": user("hello"), "stream": True}
    text = server.http.post("/v1/messages", json=body).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    data = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert names == [event["type"] for event in data]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "[DONE]" not in text
    assert data[0]["message"]["content"] == []


class City(pydantic.BaseModel):
    city: str


def test_parse(client: anthropic.Anthropic, server: Running) -> None:
    made = client.messages.parse(
        model=server.model, max_tokens=50, messages=user("an object"), output_format=City
    )
    assert made.parsed_output == City(city="Oslo")


def test_the_answer_goes_on_from_a_prefill(server: Running) -> None:
    turns = [*user("hello"), {"role": "assistant", "content": "zero "}]
    made = post(server, messages=turns).json()
    assert made["content"][0]["text"] == "one two three"


def test_errors_have_their_classes(client: anthropic.Anthropic, server: Running) -> None:
    def fails(text: str = "hello", **fields: Any) -> Any:
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.create(
                **{"model": server.model, "max_tokens": 5, "messages": user(text), **fields}
            )
        assert caught.value.request_id
        return caught.value

    bad = fails(max_tokens=0)
    assert isinstance(bad, anthropic.BadRequestError)
    assert bad.type == "invalid_request_error"
    assert "max_tokens" in bad.message
    assert isinstance(fails(model="nope"), anthropic.NotFoundError)
    full = fails("be full")
    assert (full.status_code, full.type) == (529, "overloaded_error")
    assert int(full.response.headers["retry-after"]) >= 1
    assert fails("be gone").type == "overloaded_error"
    long = fails("x " * 5000)
    assert (long.status_code, long.type) == (400, "invalid_request_error")
    assert fails("x" * 300_000).type == "request_too_large"
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        client.messages.stream(model=server.model, max_tokens=9, messages=user("fail later")) as stream,
    ):
        stream.until_done()
    assert caught.value.type == "api_error"


def test_every_failure_of_its_routes_has_its_shape(
    server: Running, start_scripted: Callable[..., Running]
) -> None:
    def shape(answer: httpx.Response) -> tuple[int, str]:
        body = answer.json()
        assert body["type"] == "error"
        assert set(body["error"]) <= {"type", "message", "param"}
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        return answer.status_code, body["error"]["type"]

    http = server.http
    assert shape(http.get("/v1/messages")) == (405, "invalid_request_error")
    assert shape(http.post("/v1/messages/nope", json={})) == (404, "not_found_error")
    assert shape(http.post("/v1/messages", content=b"{")) == (415, "invalid_request_error")
    kind = {"content-type": "application/json"}
    for body in (b"{", b"[]", b"null", b"[" * 10_000, b'{"messages": "\\ud800"}'):
        assert shape(http.post("/v1/messages", content=body, headers=kind)) == (400, "invalid_request_error")
        assert shape(http.post("/v1/messages/count_tokens", content=body, headers=kind))[0] == 400
    assert http.get("/v1/nope").json()["error"]["code"] == "not_found"
    guarded = start_scripted(SCRIPT[-1:], "--api-key", "secret")
    refused = guarded.http.post("/v1/messages", json={})
    assert shape(refused) == (401, "authentication_error")
    allowed = {"x-api-key": "secret", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    body = {"model": guarded.model, "max_tokens": 5, "messages": user("x")}
    assert guarded.http.post("/v1/messages?beta=true", json=body, headers=allowed).status_code == 200


VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**70,
    1e300,
    "",
    "x",
    "\x00",
    [],
    [[]],
    {},
    {"type": "x"},
    [{"type": 5}],
]


@pytest.mark.slow
def test_no_body_makes_a_server_error(server: Running) -> None:
    fields = (
        "messages", "max_tokens", "system", "tools", "tool_choice", "stop_sequences", "stream", "temperature",
        "top_p", "top_k", "min_p", "repetition_penalty", "thinking", "metadata", "output_config",
        "output_format", "service_tier",
        "cache_control", "context_management", "betas", "model", "unknown",
    )  # fmt: skip
    blocks = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking", "document", "image")
    inside = (
        "text",
        "id",
        "name",
        "input",
        "tool_use_id",
        "content",
        "thinking",
        "signature",
        "data",
        "source",
    )
    for name in fields:
        for value in VALUES:
            answer = post(server, **{name: value})
            assert answer.status_code in (200, 400, 404), (name, value, answer.text)
    for kind in blocks:
        for name in inside:
            for value in VALUES:
                for role in ("user", "assistant"):
                    turn = {"role": role, "content": [{"type": kind, name: value}]}
                    answer = post(server, messages=[*user("x"), turn, *user("y")])
                    assert answer.status_code in (200, 400), (kind, name, value, answer.text)


def test_a_large_body_is_read_elsewhere_the_same(server: Running) -> None:
    """Bodies over 64 KiB are read in a separate process with the same result."""
    schema = {"type": "object", "properties": {"a": {"description": "d" * 70_000}}}
    big = [{"name": "big", "input_schema": schema}]
    body = {"model": server.model, "messages": user("x"), "tools": big}
    answer = server.http.post("/v1/messages/count_tokens", json=body)
    assert answer.status_code == 400
    assert "context" in answer.json()["error"]["message"]
    body["tool_choice"] = {"type": "none"}
    assert server.http.post("/v1/messages/count_tokens", json=body).status_code == 200
    reasoning = {"type": "redacted_thinking", "data": "x" * 70_000}
    body["messages"] = [*user("x"), {"role": "assistant", "content": [reasoning]}, *user("y")]
    body["tools"] = [{"name": "f", "input_schema": {"type": "object", "maximum": 10**30}}]
    body["tool_choice"] = {"type": "auto"}
    refused = server.http.post("/v1/messages/count_tokens", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
    body["tools"] = [{"name": "f", "input_schema": {"type": "object", "maximum": 2**63}}]
    assert server.http.post("/v1/messages/count_tokens", json=body).status_code == 200


@pytest.mark.requirement("G11")
def test_tokens_that_a_prompt_adds_to_the_cache(weft_server: Running) -> None:
    text = "Tom has 12 apples and buys 7 more. " * 12

    def usage(text: str) -> dict[str, int]:
        found: dict[str, int] = post(weft_server, text, max_tokens=1, temperature=0).json()["usage"]
        return found

    first, again, longer = usage(text), usage(text), usage(text + "Ann has 3. " * 12)
    whole = first["input_tokens"] + first["cache_creation_input_tokens"]
    assert first["cache_read_input_tokens"] == 0
    assert first["cache_creation_input_tokens"] == whole // 64 * 64 > 64
    assert again["cache_read_input_tokens"] == first["cache_creation_input_tokens"]
    assert again["cache_creation_input_tokens"] == 0
    assert longer["cache_read_input_tokens"] >= 64
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    count = sum(longer[part] for part in parts)
    assert longer["cache_creation_input_tokens"] == count // 64 * 64 - longer["cache_read_input_tokens"]


@pytest.mark.requirement("G13")
def test_a_line_of_attribution_ends_no_shared_prefix(
    server: Running, start_scripted: Callable[..., Running], tmp_path: Path
) -> None:
    def counts(running: Running) -> tuple[int, int]:
        def count(system: Any) -> int:
            body = {"model": running.model, "messages": user("x"), "system": system}
            return int(running.http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])

        line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=5f3a1;"}
        rest = {"type": "text", "text": "You are brief."}
        return count([line, rest]), count([rest])

    with_line, without = counts(server)
    assert with_line == without
    post(server, system="x-anthropic-billing-header: a\nx")
    post(server, system="x-anthropic-billing-header: b\nx")
    kept = start_scripted(SCRIPT[-1:], "--keep-attribution-lines")
    with_line, without = counts(kept)
    assert with_line > without


def test_async_streams(server: Running) -> None:
    async def run() -> None:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="x", timeout=deadline(20)) as client:

            async def one() -> str:
                async with client.messages.stream(
                    model=server.model, max_tokens=50, messages=user("hello")
                ) as stream:
                    return "".join([text async for text in stream.text_stream])

            assert await asyncio.gather(*(one() for _ in range(10))) == ["one two three"] * 10

    asyncio.run(run())
