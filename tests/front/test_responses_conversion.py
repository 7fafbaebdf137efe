"""Conversion of requests of the Responses API, and refusals that name the wrong field."""

from __future__ import annotations

import codecs
import json
from typing import Any

import pytest

from weft.common.errors import InvalidRequest, NotFound, WeftError
from weft.front.protocol.conversation import Conversation
from weft.front.protocol.parse import parse
from weft.front.protocol.responses.conversion import History, ResponsesFacts, conversation
from weft.front.protocol.responses.protocol import ResponsesRequest
from weft.front.protocol.responses.read import Lookup, line_of, references
from weft.front.protocol.responses.responses_tools import Named
from weft.front.sealed_reasoning import sealed
from weft.text.images import ImagePart

CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "4"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def read(history: History = History(), **fields: Any) -> tuple[Conversation, ResponsesFacts]:
    body = {"model": "m", "input": "hello", **fields}
    asked = parse(json.dumps(body).encode(), ResponsesRequest)
    return conversation(asked, history, system_inside=True)


def messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read(input=list(items), **fields)[0].messages
    return found


def refused(**fields: Any) -> WeftError:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.http_status == 400
    return caught.value


def user(content: Any = "hello") -> dict[str, Any]:
    return {"role": "user", "content": content}


def part(text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def test_a_text_is_the_users() -> None:
    made, facts = read(instructions="be brief")
    assert made.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ]
    (stored,) = json.loads(bytes(facts.items))
    assert stored["content"] == [{"type": "input_text", "text": "hello"}]
    assert stored["id"].startswith("msg_")


def test_a_tool_loop_becomes_messages_of_a_chat() -> None:
    made = messages(
        {"type": "message", "role": "developer", "content": [part("one"), part("two")]},
        {"role": "developer", "content": "three"},
        user([part("hello")]),
        {"type": "reasoning", "id": "rs_1", "summary": [part("I think", "summary_text")], "status": None},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "phase": "commentary",
            "content": [{**part("I call.", "output_text"), "annotations": [], "logprobs": []}],
        },
        CALL,
        {**CALL, "call_id": "call_2", "namespace": "ns", "name": "g"},
        RESULT,
        {**RESULT, "call_id": "call_2", "output": [part("5"), part("6")]},
        user("go on"),
    )
    assert made == [
        {"role": "system", "content": "one\ntwo\n\nthree"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {
            "role": "assistant",
            "content": "I call.",
            "reasoning_content": "I think",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
                {"id": "call_2", "type": "function", "function": {"name": "ns.g", "arguments": '{"a": 1}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "4"},
        {"role": "tool", "tool_call_id": "call_2", "content": "5\n6"},
        {"role": "user", "content": [{"type": "text", "text": "go on"}]},
    ]


def test_a_reasoning_is_taken_from_where_the_most_of_it_is() -> None:
    summary = [part("short", "summary_text")]
    content = [part("long", "reasoning_text")]

    def reasoning(**fields: Any) -> Any:
        (turn,) = messages(
            {"type": "reasoning", "summary": [], **fields}, {"role": "assistant", "content": "x"}
        )
        return turn.get("reasoning_content")

    assert reasoning(summary=summary, content=content, encrypted_content=sealed("whole")) == "long"
    assert reasoning(summary=summary, encrypted_content=sealed("whole")) == "whole"
    assert reasoning(summary=summary, encrypted_content="gAAAA of another server") == "short"
    assert reasoning() is None


def test_a_search_of_another_server_is_left_out() -> None:
    search = {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "q", "sources": None},
    }
    answer = {"role": "assistant", "content": "x"}
    assert messages(user("hello"), search, answer) == messages(user("hello"), answer)


def test_a_tool_whose_input_is_text() -> None:
    made, facts = read(tools=[{"type": "custom", "name": "patch", "description": "d"}])
    (tool,) = made.tools.tools
    assert (tool.name, list(tool.parameters["properties"])) == ("patch", ["input"])
    assert facts.names == {"patch": Named(name="patch", custom=True)}
    call = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'a "b"'}
    turn, _ = messages(call, {"type": "custom_tool_call_output", "call_id": "c", "output": "done"})
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == {"input": 'a "b"'}


def test_namespaces_and_a_search_that_agents_always_offer() -> None:
    space = {"type": "namespace", "name": "ns", "description": "d", "tools": [TOOL, {**TOOL, "name": "g"}]}
    search = {"type": "web_search", "external_web_access": True}
    made, facts = read(tools=[TOOL, space, search])
    assert [tool.name for tool in made.tools.tools] == ["f", "ns.f", "ns.g"]
    assert facts.names["ns.g"] == Named(name="g", namespace="ns")
    assert [tool["type"] for tool in facts.repeats["tools"]] == ["function", "namespace"]
    assert read(tools=[search])[0].tools.tools == ()
    assert refused(tools=[search], tool_choice="required").param == "tool_choice"


def test_the_choice_among_tools() -> None:
    def use(choice: Any, **fields: Any) -> tuple[Any, ...]:
        tools = read(tools=[TOOL, {**TOOL, "name": "g"}], tool_choice=choice, **fields)[0].tools
        return tools.mode, tools.names, tools.parallel

    assert use(None, parallel_tool_calls=False) == ("auto", None, False)
    assert use("required") == ("required", None, True)
    assert use({"type": "function", "name": "g"}) == ("required", ("g",), False), "exactly one"
    some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    assert use(some) == ("auto", ("f",), True)


def test_what_is_asked_is_repeated() -> None:
    _, facts = read(
        tools=[TOOL],
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_object"}, "verbosity": "low"},
        metadata={"a": "b"},
        temperature=0.5,
        store=False,
        include=["reasoning.encrypted_content"],
    )
    shown = facts.repeats
    assert shown["tools"] == [{"description": None, **TOOL}]
    assert shown["reasoning"] == {"effort": "low", "summary": "auto"}
    assert shown["text"] == {"format": {"type": "json_object"}, "verbosity": "low"}
    assert (shown["metadata"], shown["temperature"], shown["store"]) == ({"a": "b"}, 0.5, False)
    assert (facts.summarizes, facts.encrypted, facts.store, bytes(facts.items)) == (True, True, False, b"[]")


def test_logprobs_are_asked_for_in_two_ways() -> None:
    assert read()[0].params.logprobs is None
    assert read(include=["message.output_text.logprobs"])[0].params.logprobs == 0
    assert read(top_logprobs=3)[0].params.logprobs == 3


def test_what_an_agent_sends_with_every_request() -> None:
    made, _ = read(
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="0af9",
        client_metadata={"x": "y", "z": "1"},
        reasoning={"summary": "auto"},
        tool_choice="auto",
        parallel_tool_calls=True,
        text={"verbosity": "medium"},
        truncation="auto",
        service_tier="auto",
    )
    assert made.form.stream


def test_earlier_responses_come_first_and_references_are_resolved() -> None:
    history = History(
        items=[user("earlier"), CALL],
        referenced={"msg_9": {"type": "message", "role": "user", "content": "referenced"}},
    )
    reference = {"type": "item_reference", "id": "msg_9"}
    made, _ = read(history, input=[RESULT, reference], instructions="new ones")
    assert [message["role"] for message in made.messages] == ["system", "user", "assistant", "tool", "user"]
    for nothing in (None, "", []):
        made, facts = read(history, input=nothing, previous_response_id="resp_1")
        assert [message["role"] for message in made.messages] == ["user", "assistant"]
        assert bytes(facts.items) == b"[]"
    with pytest.raises(NotFound) as caught:
        read(input=[reference])
    assert (caught.value.param, caught.value.error_code) == ("input[0]", "item_not_found")


def test_what_a_body_refers_to() -> None:
    def found(**fields: Any) -> Lookup:
        body = json.dumps({"model": "m", **fields}).encode()
        return references([body[:30], body[30:]])

    assert found(previous_response_id="resp_1") == Lookup("resp_1", [])
    assert found(input=[{"type": "item_reference", "id": "x"}, user(), {"id": 5}]) == Lookup(None, ["x"])
    assert found(previous_response_id=5, input="x") == Lookup(None, [])
    assert found(input=[{"type": "item_reference"}]) == Lookup(None, [])
    assert found(input=[{"type": "item_reference", "id": "x"}, 7]) == Lookup(None, []), "reading it tells why"
    assert found(input="previous_response_id").previous is None
    assert found(input="item_reference", previous_response_id="resp_1") == Lookup("resp_1", [])
    marked = codecs.BOM_UTF8 + b'{"input": "x", "previous_response_id": "resp_1"}'
    assert references([marked[:2], marked[2:]]) == Lookup("resp_1", [])
    for body in (b"", b"[]", b"{", b'{"previous_response_id": "\\ud800"}', b"[" * 10_000):
        assert references([body]) == Lookup(None, [])
    line = line_of(History(items=[user("a\nb")]))
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")


BAD: list[tuple[str, Any]] = [
    ("input", ""),
    ("input", []),
    ("input", 5),
    ("input", ["x"]),
    ("input", [{"type": "message"}]),
    ("input", [{"type": ["message"], "role": "user", "content": "x"}]),
    ("input", [{"content": "x"}]),
    ("input", [{"role": "user", "content": 5}]),
    ("input", [{"role": "robot", "content": "x"}]),
    ("input", [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]),
    ("input", [{"role": "user", "content": [{"type": ["input_text"], "text": "x"}]}]),
    ("input", [{"role": "user", "content": [{"type": "input_text"}]}]),
    ("input", [{"role": "user", "content": ["x"]}]),
    ("input", [{"type": "function_call", "name": "f", "arguments": "{}"}]),
    ("input", [{**CALL, "arguments": {}}]),
    ("input", [{"type": "function_call_output", "output": "x"}]),
    ("input", [{"type": "function_call_output", "call_id": "c", "output": {}}]),
    ("input", [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]),
    ("input", [{"type": "reasoning", "summary": "x"}]),
    ("input", [{"type": "reasoning", "summary": [{"type": "text"}]}]),
    ("input", [{"type": "file_search_call", "id": "x"}]),
    ("input", [{"type": "web_search_call", "action": "x"}]),
    ("input", [{"type": "item_reference"}]),
    ("instructions", 5),
    ("max_output_tokens", 0),
    ("max_output_tokens", "5"),
    ("max_output_tokens", 2**63),
    ("temperature", -1),
    ("top_p", -1),
    ("top_logprobs", 21),
    ("top_logprobs", -1),
    ("include", "x"),
    ("include", ["everything"]),
    ("background", True),
    ("conversation", "conv_1"),
    ("prompt", {"id": "x"}),
    ("max_tool_calls", 3),
    ("moderation", {"model": "x"}),
    ("context_management", [{"type": "compaction"}]),
    ("store", "yes"),
    ("stream", 1),
    ("stream_options", {"include_obfuscation": True}),
    ("previous_response_id", 5),
    ("metadata", {"a": 5}),
    ("metadata", {"a": "x" * 513}),
    ("reasoning", {"effort": "huge"}),
    ("reasoning", {"mode": "pro"}),
    ("reasoning", "low"),
    ("text", {"format": {"type": "yaml"}}),
    ("text", {"format": {"type": "json_schema", "name": "x"}}),
    ("text", {"format": {"type": "json_schema", "name": "x", "schema": 5}}),
    ("text", {"verbosity": "loud"}),
    ("tools", [{"type": "function"}]),
    ("tools", [{**TOOL, "name": "a b"}]),
    ("tools", [TOOL, TOOL]),
    ("tools", [{**TOOL, "parameters": {"type": "string"}}]),
    ("tools", [{**TOOL, "async": True}]),
    ("tools", [{**TOOL, "function": {}}]),
    ("tools", [{"type": "local_shell"}]),
    ("tools", [{"type": "code_interpreter", "container": {}}]),
    ("tools", [{"type": "mcp"}]),
    ("tools", [{"type": ["function"], "name": "f"}]),
    ("tools", [{"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "lark"}}]),
    ("tools", [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]),
    ("tools", [5]),
    ("tool_choice", "required"),
    ("tool_choice", "sometimes"),
    ("tool_choice", {"type": "function", "name": "f"}),
    ("tool_choice", {"type": "web_search"}),
    ("truncation", "some"),
    ("user", "x" * 5000),
    ("service_tier", "best"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda one: json.dumps(one)[:60])
def test_what_cannot_be_is_refused_by_name(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.param is not None
    assert error.param.startswith(name)


def test_what_must_be_there() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(b'{"model": "m"}', ResponsesRequest)
    assert caught.value.param == "input"


def test_images_are_parts_in_their_places() -> None:
    def text(one: str) -> dict[str, str]:
        return {"type": "input_text", "text": one}

    image = {"type": "input_image", "image_url": "data:x", "detail": "low", "file_id": None}
    made, _ = read(
        input=[
            {"role": "user", "content": [text("a"), image, text("b")]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [image]},
        ]
    )
    user, _, tool = made.messages
    assert user["content"] == [
        {"type": "text", "text": "a"},
        ImagePart("data:x", "input[0].content[1]", "low", "input_image"),
        {"type": "text", "text": "b"},
    ]
    assert tool["content"] == [ImagePart("data:x", "input[2].output[0]", "low", "input_image")]
