"""Truncated and malformed calls, in answers and in the history, and stop strings, in all three APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.servers import Running
from tests.support.text_folders import write_tokenizer

TEMPLATE = (
    "{%- for tool in tools or [] -%}{{- tool | tojson + '<tool_call></tool_call>' -}}{%- endfor -%}"
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') -}}"
    "{%- for c in m.tool_calls or [] -%}{{- '<call>' + c.function.name -}}"
    "{%- for key, value in c.function.arguments.items() -%}{{- '[' + key + '=' + value | string + ']' -}}"
    "{%- endfor -%}{%- endfor -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CUT = '{"city": "Osl'
BROKEN = '{"city": "Oslo", '
THINKS = "<think>\nQuestion: what?\n\nSo.\n</think>\n\nIt is so. Question: why?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
APIS = ("chat", "responses", "messages")
WRONG = (CUT, '{"cmd": "x", "echo ..', "null", "[1]", "3", '"x"', "", '{"a": "\\ud800"}', '{"a": 1, "a": 2}')


@pytest.fixture(scope="module")
def server(start_scripted: Callable[..., Running], tmp_path_factory: pytest.TempPathFactory) -> Running:
    folder = tmp_path_factory.mktemp("cut")
    write_tokenizer(folder, added=["<think>", "</think>", "<tool_call>", "</tool_call>"], template=TEMPLATE)
    entries: list[dict[str, Any]] = [
        {"match": {"contains": ["[partial_json=", "go on"]}, "text": "partly"},
        {"match": "go on", "text": "gone on"},
        {"match": "be cut", "text": CALL[: CALL.index(CUT) + len(CUT)], "finish": "length"},
        {"match": "break", "text": CALL.replace("Oslo", 'Oslo", oops') + "\n" + CALL},
        {"match": "one more brace", "text": CALL.partition("}}")[0], "finish": "length"},
        {"match": "think", "text": THINKS},
        {"match": "stop inside", "text": "I ask.\n" + CALL},
    ]
    return start_scripted([{**entry, "repeat": True} for entry in entries], "--tokenizer", str(folder))


def post(server: Running, api: str, text: str, *turns: Any, **fields: Any) -> dict[str, Any]:
    """Return the answer to ``text``. ``turns`` are further messages or items."""
    ask = {"role": "user", "content": text}
    tool: dict[str, Any] = {"name": "weather", "parameters": PARAMETERS}
    body: dict[str, Any] = {"model": server.model, **fields}
    if api == "chat":
        body |= {"messages": [ask, *turns], "tools": [{"type": "function", "function": tool}]}
        path = "/v1/chat/completions"
    elif api == "responses":
        body |= {"input": [ask, *turns], "tools": [{"type": "function", "strict": False, **tool}]}
        path = "/v1/responses"
    else:
        body |= {"messages": [ask, *turns], "tools": [{"name": "weather", "input_schema": PARAMETERS}]}
        body["max_tokens"] = 300
        path = "/v1/messages"
    answer: httpx.Response = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def back(api: str, arguments: Any) -> list[dict[str, Any]]:
    """Return a call and the result, in the form of a client's next request."""
    if api == "chat":
        call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        return [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "?"},
            {"role": "user", "content": "go on"},
        ]
    if api == "responses":
        return [
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c", "output": "?"},
            {"role": "user", "content": "go on"},
        ]
    block = {"type": "tool_use", "id": "c", "name": "weather", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "?"}
    return [
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    ]


def content(api: str, answer: dict[str, Any]) -> str:
    if api == "chat":
        return str(answer["choices"][0]["message"]["content"])
    if api == "responses":
        parts = [item["content"] for item in answer["output"] if item["type"] == "message"]
        return "".join(part["text"] for found in parts for part in found)
    return "".join(block["text"] for block in answer["content"] if block["type"] == "text")


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("arguments", WRONG)
def test_arguments_that_are_no_object_end_no_conversation(server: Running, api: str, arguments: str) -> None:
    answer = post(server, api, "hello", *back(api, arguments))
    says_something = arguments not in ("null", "", '{"a": 1, "a": 2}')
    assert content(api, answer) == ("partly" if says_something else "gone on")


@pytest.mark.parametrize("arguments", [None, [1], 3, {"partial_json": CUT}])
def test_input_that_is_no_object_ends_no_conversation(server: Running, arguments: Any) -> None:
    answer = post(server, "messages", "hello", *back("messages", arguments))
    assert content("messages", answer) == ("gone on" if arguments is None else "partly")


def test_a_cut_call_in_chat(server: Running) -> None:
    (choice,) = post(server, "chat", "be cut")["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == CUT
    answer = post(server, "chat", "hello", *back("chat", call["function"]["arguments"]))
    assert content("chat", answer) == "partly"


def test_a_cut_call_in_responses(server: Running) -> None:
    answer = post(server, "responses", "be cut", store=True)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    (call,) = answer["output"]
    assert (call["type"], call["status"], call["arguments"]) == ("function_call", "incomplete", CUT)
    later = back("responses", CUT)
    body = {"model": server.model, "previous_response_id": answer["id"], "input": later[1:]}
    body["input"][0]["call_id"] = call["call_id"]
    again = server.http.post("/v1/responses", json=body)
    assert again.status_code == 200, again.text
    assert content("responses", again.json()) == "partly"


def test_a_cut_call_in_messages(server: Running) -> None:
    answer = post(server, "messages", "be cut")
    assert answer["stop_reason"] == "max_tokens"
    (block,) = answer["content"]
    assert block["input"] == {"partial_json": CUT}
    again = post(server, "messages", "hello", *back("messages", block["input"]))
    assert content("messages", again) == "partly"


def test_a_call_that_the_end_of_a_cut_output_would_make_whole_is_cut(server: Running) -> None:
    (choice,) = post(server, "chat", "one more brace")["choices"]
    assert choice["finish_reason"] == "length"
    (item,) = post(server, "responses", "one more brace")["output"]
    assert item["status"] == "incomplete"


def test_a_broken_call_beside_a_whole_one(server: Running) -> None:
    """The finish reason never asks a client to run calls if one call has invalid JSON arguments."""
    (choice,) = post(server, "chat", "break")["choices"]
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [BROKEN, '{"city": "Oslo"}']
    assert choice["finish_reason"] == "stop"
    items = [item for item in post(server, "responses", "break")["output"] if item["type"] == "function_call"]
    assert [item["status"] for item in items] == ["incomplete", "completed"]
    assert post(server, "messages", "break")["stop_reason"] == "end_turn"


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("ask", "stop", "kept"),
    [
        ("think", "Question:", "It is so. "),
        ("think", "\n\n", "It is so. Question: why?"),
        ("stop inside", "Oslo", "I ask."),
    ],
)
def test_stop_strings_look_at_content(server: Running, api: str, ask: str, stop: str, kept: str) -> None:
    name = "stop_sequences" if api == "messages" else "stop"
    assert content(api, post(server, api, ask, **{name: [stop]})) == kept
    everywhere = post(server, api, ask, **{name: [stop], "stop_in": "everything"})
    assert content(api, everywhere) in ("", "I ask.", "None")
    assert content(api, everywhere) != kept or api == "chat" or ask == "stop inside"
    plain = post(server, api, ask, **{name: [stop], "stop_in": "content"})
    assert content(api, plain) == kept


def test_a_stop_string_found_everywhere_cuts_a_call(server: Running) -> None:
    (choice,) = post(server, "chat", "stop inside", stop=["Oslo"], stop_in="everything")["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "'
    assert choice["finish_reason"] == "stop"
    answer = server.chat("think", stop_in="nowhere")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop_in")
