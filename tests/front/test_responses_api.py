"""/v1/responses of a real server with scripted outputs, through openai-python and raw requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.front.test_messages_api import VALUES
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
    {"match": "patch it", "text": CALL.replace("weather", "patch").replace("city", "input"), "repeat": True},
    {"match": "ask a friend", "text": CALL.replace("weather", "ns.ask"), "repeat": True},
    {"match": "fail later", "text": "abc", "finish": "error", "repeat": True},
    {"match": "be full", "error": "overloaded", "repeat": True},
    {"match": "my name is Ann", "text": "Hello Ann.", "repeat": True},
    {"text": "one two three", "repeat": True},
]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "description": "Tells it.",
        "parameters": PARAMETERS,
        "strict": False,
    }
]


@pytest.fixture(scope="module")
def server(start_scripted: Callable[..., Running], tmp_path_factory: pytest.TempPathFactory) -> Running:
    template = write_template(tmp_path_factory.mktemp("template"))
    return start_scripted(SCRIPT, "--chat-template", str(template))


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=deadline(20))


def post(server: Running, input: Any = "hello", **fields: Any) -> httpx.Response:
    return server.http.post("/v1/responses", json={"model": server.model, "input": input, **fields})


def events_of(server: Running, input: Any = "hello", **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, after a check of its lines."""
    text = post(server, input, stream=True, **fields).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert names == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "[DONE]" not in text
    return events


def test_a_response(client: openai.OpenAI, server: Running) -> None:
    made = client.responses.create(model=server.model, input="hello", instructions="brief")
    assert made.output_text == "one two three"
    assert (made.status, made.object, made.model, made.instructions) == (
        "completed",
        "response",
        server.model,
        "brief",
    )
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert made.usage.output_tokens_details.reasoning_tokens == 0


@pytest.mark.requirement("G10")
def test_a_tool_loop_without_state(client: openai.OpenAI, server: Running) -> None:
    items: list[Any] = [{"role": "user", "content": "the weather in Oslo?"}]
    options: dict[str, Any] = {
        "model": server.model,
        "tools": TOOLS,
        "store": False,
        "include": ["reasoning.encrypted_content"],
    }
    first = client.responses.create(input=items, **options)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    reasoning, _, call = first.output
    assert reasoning.type == "reasoning"
    assert reasoning.encrypted_content
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Oslo"}, "completed")
    assert first.usage is not None
    assert 0 < first.usage.output_tokens_details.reasoning_tokens < first.usage.output_tokens
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    second = client.responses.create(input=[*items, *first.output, result], **options)
    assert second.output_text == "It is 12 degrees in Oslo."
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens == 64
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


@pytest.mark.requirement("G10")
def test_a_tool_loop_in_the_servers_memory(client: openai.OpenAI, server: Running) -> None:
    options: dict[str, Any] = {"model": server.model, "tools": TOOLS}
    first = client.responses.create(input="the weather in Oslo?", **options)
    call = first.output[-1]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    second = client.responses.create(input=[result], previous_response_id=first.id, **options)
    assert second.output_text == "It is 12 degrees in Oslo."
    assert second.previous_response_id == first.id
    whole = [{"role": "user", "content": "the weather in Oslo?"}, *first.output, result]
    counted = client.responses.input_tokens.count(input=whole, **options)
    assert second.usage is not None
    assert counted.input_tokens == second.usage.input_tokens
    counted = client.responses.input_tokens.count(input=[result], previous_response_id=first.id, **options)
    assert counted.input_tokens == second.usage.input_tokens
    third = client.responses.create(input=[{"type": "item_reference", "id": call.id}, result], **options)
    assert third.output_text == "It is 12 degrees in Oslo."


def test_stored_responses(client: openai.OpenAI, server: Running) -> None:
    first = client.responses.create(model=server.model, input="my name is Ann", metadata={"a": "b"})
    with client.responses.stream(model=server.model, input="again", previous_response_id=first.id) as stream:
        second = stream.get_final_response()
    assert second.output_text == "Hello Ann.", "the first turn is in the prompt of the second"
    kept = client.responses.retrieve(second.id)
    assert kept.to_dict() == {**second.to_dict(), "output": kept.to_dict()["output"]}
    assert client.responses.retrieve(first.id).metadata == {"a": "b"}
    items = client.responses.input_items.list(second.id)
    assert [item.type for item in items.data] == ["message"]
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(first.id)
    client.responses.delete(first.id)
    for use in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            use(first.id)
    for id in (first.id, second.id, "resp_nothing"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(model=server.model, input="x", previous_response_id=id)
        assert caught.value.code == "previous_response_not_found"
        assert caught.value.param == "previous_response_id"


def test_pages_of_input_items(server: Running) -> None:
    items = [{"role": "user", "content": f"number {number}"} for number in range(25)]
    made = post(server, items).json()["id"]

    def page(**asked: Any) -> Any:
        return server.http.get(f"/v1/responses/{made}/input_items", params=asked)

    newest = page().json()
    assert (len(newest["data"]), newest["has_more"]) == (20, True)
    assert newest["data"][0]["content"] == [{"type": "input_text", "text": "number 24"}]
    rest = page(after=newest["last_id"]).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == [f"number {n}" for n in (4, 3, 2, 1, 0)]
    assert not rest["has_more"]
    assert page(order="asc", limit=1).json()["data"][0]["content"][0]["text"] == "number 0"
    for bad in ({"limit": 0}, {"limit": "x"}, {"limit": 10**12}, {"order": "up"}, {"after": "nothing"}):
        answer = page(**bad)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(bad)))


def test_a_stream_tells_the_same_as_the_whole(client: openai.OpenAI, server: Running) -> None:
    options: dict[str, Any] = {"model": server.model, "tools": TOOLS, "store": False}

    def comparable(response: Any) -> Any:
        shown = response.to_dict()
        for name in ("id", "created_at", "completed_at"):
            shown.pop(name)
        for item in shown["output"]:
            item.pop("id")
            item.pop("call_id", None)
            item.pop("parsed_arguments", None)
            for part in item.get("content", ()):
                part.pop("parsed", None)
        return shown

    for text in ("the weather", "both cities", "hello"):
        whole = client.responses.create(input=text, **options)
        with client.responses.stream(input=text, **options) as stream:
            pieces = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            built = stream.get_final_response()
        assert comparable(built) == comparable(whole)
        assert pieces == whole.output_text


@pytest.mark.requirement("G10")
def test_events_in_their_published_order(server: Running) -> None:
    events = events_of(server, "the weather", tools=TOOLS, reasoning={"summary": "auto"})
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = list(dict.fromkeys(kinds))
    assert once[:3] == ["created", "in_progress", "output_item.added"]
    assert once[3:6] == [
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
    ]
    assert kinds[-1] == "completed"
    begun, ended = events[0]["response"], events[-1]["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    assert (ended["status"], ended["id"]) == ("completed", begun["id"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == ended["output"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]


def test_why_a_response_ends(server: Running) -> None:
    cut = post(server, max_output_tokens=2).json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][0]["status"] == "incomplete"
    assert events_of(server, max_output_tokens=2)[-1]["type"] == "response.incomplete"
    half = post(server, "half a call", tools=TOOLS).json()
    assert [(item["type"], item["status"]) for item in half["output"]] == [("function_call", "incomplete")]
    last = events_of(server, "fail later")[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"


def test_tools_of_other_kinds(server: Running) -> None:
    space = {"type": "namespace", "name": "ns", "description": "d", "tools": [{**TOOLS[0], "name": "ask"}]}
    search = {"type": "web_search", "external_web_access": True}
    made = post(server, "ask a friend", tools=[space, search]).json()
    (call,) = made["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "ns", "ask")
    assert [tool["type"] for tool in made["tools"]] == ["namespace"]
    (call,) = post(server, "patch it", tools=[{"type": "custom", "name": "patch"}]).json()["output"]
    assert (call["type"], call["input"]) == ("custom_tool_call", "Oslo")
    refused = post(server, tools=[{"type": "code_interpreter", "container": {"type": "auto"}}])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[0]")


class City(pydantic.BaseModel):
    city: str


def test_parse(client: openai.OpenAI, server: Running) -> None:
    made = client.responses.parse(model=server.model, input="an object", text_format=City)
    assert made.output_parsed == City(city="Oslo")
    assert made.text is not None
    assert made.text.format is not None
    assert made.text.format.type == "json_schema"


def test_logprobs(weft_server: Running) -> None:
    fields = {"max_output_tokens": 5, "temperature": 0, "top_logprobs": 2}
    whole = post(weft_server, "Tom has 12 apples.", **fields).json()["output"][0]["content"][0]
    entries = whole["logprobs"]
    assert "".join(entry["token"] for entry in entries).startswith(whole["text"])
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in entries)
    events = events_of(weft_server, "Tom has 12 apples.", **fields)
    pieces = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in pieces for entry in event["logprobs"]] == entries
    plain = post(weft_server, "Tom has 12 apples.", max_output_tokens=5).json()
    assert plain["output"][0]["content"][0]["logprobs"] == []


def test_errors_have_their_classes(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model=server.model, input="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="nope", input="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model=server.model, input="be full")
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(model=server.model, input="x " * 5000)
    assert (long.value.param, long.value.code) == ("input", "context_length_exceeded")
    answer = server.http.post("/v1/responses/compact", json={"model": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unsupported_route")
    answer = post(server, background=True)
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (
        "background",
        "unsupported_parameter",
    )


@pytest.mark.slow
def test_no_body_makes_a_server_error(server: Running) -> None:
    fields = (
        "input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls",
        "text", "reasoning", "max_output_tokens", "temperature", "top_p", "top_k", "min_p",
        "repetition_penalty", "seed", "stop",
        "top_logprobs", "include", "store", "stream_options", "metadata", "user", "prompt_cache_options",
        "client_metadata",
        "background", "truncation", "service_tier", "conversation", "model", "unknown",
    )  # fmt: skip
    kinds = (
        "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
        "reasoning", "item_reference",
    )  # fmt: skip
    inside = (
        "role",
        "content",
        "call_id",
        "name",
        "arguments",
        "output",
        "input",
        "summary",
        "id",
        "namespace",
    )
    for name in fields:
        for value in VALUES:
            answer = post(server, **{name: value})
            assert answer.status_code in (200, 400, 404), (name, value, answer.text)
    for kind in kinds:
        for name in inside:
            for value in VALUES:
                item = {
                    "type": kind,
                    "role": "user",
                    "content": "x",
                    "call_id": "c",
                    "name": "f",
                    name: value,
                }
                answer = post(server, [item])
                assert answer.status_code in (200, 400, 404), (kind, name, value, answer.text)
    kind_of = {"content-type": "application/json"}
    for body in (b"{", b"[]", b"null", b"[" * 10_000, b'{"input": "\\ud800", "previous_response_id": "x"}'):
        assert server.http.post("/v1/responses", content=body, headers=kind_of).status_code == 400
    for path in ("x" * 5000, "%00", "..%2f..", "resp_1/input_items"):
        assert server.http.get("/v1/responses/" + path).status_code == 404


def test_a_large_body_is_read_elsewhere_the_same(server: Running) -> None:
    """Bodies over 64 KiB are read in a separate process, which receives the responses they refer to."""
    first = post(server, "my name is Ann").json()["id"]
    padding = {"type": "reasoning", "summary": [], "encrypted_content": "x" * 70_000}
    items = [padding, {"role": "user", "content": "again"}]
    made = post(server, items, previous_response_id=first)
    assert made.status_code == 200, made.text
    assert made.json()["output"][0]["content"][0]["text"] == "Hello Ann."
    last = post(server, "and again", previous_response_id=made.json()["id"])
    assert last.json()["output"][0]["content"][0]["text"] == "Hello Ann."


@pytest.mark.parametrize("turns", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_long_chain_counts_what_its_prompt_shows(
    turns: int, start_scripted: Callable[..., Running]
) -> None:
    """Each response repeats tools and instructions; no later prompt contains them, and none count."""
    server = start_scripted(SCRIPT[-1:], "--max-request-bytes", "131072", "--max-model-len", "200000")
    about = {"type": "object", "description": "x" * 50_000}
    tools = [{"type": "function", "name": "look", "parameters": about}]
    previous: dict[str, Any] = {}
    for turn in range(turns):
        made = post(server, f"turn {turn}", instructions="y" * 2000, tools=tools, **previous)
        assert made.status_code == 200, made.text
        previous = {"previous_response_id": made.json()["id"]}
    for _ in range(4):
        made = post(server, "z" * 40_000, **previous)
        if made.status_code != 200:
            break
        previous = {"previous_response_id": made.json()["id"]}
    assert made.status_code == 413
    error = made.json()["error"]
    assert "--max-request-bytes" in error["message"]
    assert error["param"] == "previous_response_id"
    answer = post(server, [{"type": "item_reference", "id": "msg_none"}])
    assert answer.status_code == 404


def test_an_item_is_referred_to_once(server: Running) -> None:
    """Short references could make a prompt of any length."""
    item = post(server).json()["output"][0]["id"]
    reference = {"type": "item_reference", "id": item}
    asked = {"role": "user", "content": "go on"}
    assert post(server, [reference, asked]).status_code == 200
    answer = post(server, [reference, reference, asked])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[1]"
    assert "twice" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_of_several_fronts_each_keeps_its_own(start_scripted: Callable[..., Running]) -> None:
    server = start_scripted(SCRIPT[-1:], "--fronts", "2", "--responses-store-bytes", "100000")
    made = post(server).json()["id"]
    answers = []
    for _ in range(20):
        with httpx.Client(base_url=server.url, timeout=deadline(20)) as http:
            answers.append(http.get(f"/v1/responses/{made}"))
    assert {answer.status_code for answer in answers} <= {200, 404}
    missed = [answer.json()["error"]["message"] for answer in answers if answer.status_code == 404]
    assert all("--fronts" in message for message in missed)
    assert any(answer.status_code == 200 for answer in answers)


def test_a_stored_response_is_its_own_key_s(start_scripted: Callable[..., Running]) -> None:
    server = start_scripted(SCRIPT[-1:], "--api-key", "one", "--api-key", "two")
    with (
        httpx.Client(base_url=server.url, headers={"authorization": "Bearer one"}) as one,
        httpx.Client(base_url=server.url, headers={"x-api-key": "two"}) as two,
    ):
        body = {"model": server.model, "input": "hello"}
        made = one.post("/v1/responses", json=body).json()["id"]
        again = {**body, "previous_response_id": made}
        asked = [f"/v1/responses/{made}", f"/v1/responses/{made}/input_items"]
        assert [two.get(path).status_code for path in asked] == [404, 404]
        assert two.delete(asked[0]).status_code == 404
        assert two.post("/v1/responses", json=again).status_code == 404
        assert [one.get(path).status_code for path in asked] == [200, 200]
        assert one.post("/v1/responses", json=again).status_code == 200


def test_async(server: Running) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key="x", timeout=deadline(20)
        ) as client:

            async def one() -> str:
                async with client.responses.stream(model=server.model, input="hello") as stream:
                    return (await stream.get_final_response()).output_text

            assert await asyncio.gather(*(one() for _ in range(10))) == ["one two three"] * 10

    asyncio.run(run())
