"""Tools, reasoning and formats of chat answers over HTTP: recorded outputs of a Qwen3-like model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import Running
from tests.support.text_folders import write_tokenizer
from weft.cli.main import main

TEMPLATE = (
    "{%- if tools -%}{{- '<|im_start|>system\n# Tools\n' -}}"
    "{%- for tool in tools -%}{{- tool | tojson + '\n' -}}"
    "{%- endfor -%}{{- '<tool_call></tool_call><|im_end|>\n' -}}{%- endif -%}"
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') -}}"
    "{%- for c in m.tool_calls or [] -%}"
    "{{- '<tool_call>\n' + {'name': c.function.name, 'arguments': c.function.arguments} | tojson -}}"
    "{{- '\n</tool_call>' -}}{%- endfor -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}"
    "{%- endif -%}{%- endif -%}"
)
REASONING = "<think>\nLet me see.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


TOOLS = [tool("weather", description="Tells it", parameters=CITY), tool("time")]


@pytest.fixture(scope="module")
def server(start_scripted: Any, tmp_path_factory: pytest.TempPathFactory) -> Running:
    folder = tmp_path_factory.mktemp("qwen")
    write_tokenizer(folder, added=["<think>", "</think>", "<tool_call>", "</tool_call>"], template=TEMPLATE)
    both = REASONING + "I ask.\n" + CALL + "\n" + TIME
    entries: list[dict[str, Any]] = [
        {"match": "no tools here", "text": both},
        {"match": {"regex": "think of both.*thinking off"}, "text": "fine"},
        {"match": "think of both", "text": both, "chunks": [1, 7, 3]},
        {"match": "call alone", "text": CALL},
        {"match": "call cut", "text": CALL[:40], "finish": "length"},
        {"match": "unknown name", "text": CALL.replace("weather", "nope")},
        {"match": "only thinks", "text": REASONING + "Done."},
        {"match": {"contains": ["off switch", "<think>\n\n</think>"]}, "text": "quick"},
        {"match": "off switch", "text": REASONING + "slow"},
        {"match": "bare exploit", "text": "__import__('os').system('x') {{7*7}} \x00 <tool_call>"},
        {"match": "json please", "text": '{"city": "Oslo"}'},
    ]
    made: Running = start_scripted(
        [{**entry, "repeat": True} for entry in entries],
        "--tokenizer",
        str(folder),
        "--max-model-len",
        "8192",
    )
    return made


def ask(server: Running, text: str, **fields: Any) -> dict[str, Any]:
    answer = server.chat(text, **fields)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    made: dict[str, Any] = choice
    return made


def refused(server: Running, param: str, **fields: Any) -> str:
    answer = server.chat("call alone", **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    return str(answer.json()["error"]["message"])


def streamed(server: Running, sse: Any, text: str, **fields: Any) -> list[dict[str, Any]]:
    with server.stream(messages=[{"role": "user", "content": text}], **fields) as response:
        assert response.status_code == 200
        events = sse(response)
    assert events.pop() == "[DONE]"
    return [choice for event in events for choice in event["choices"]]


@pytest.mark.requirement("F65")
def test_a_whole_answer_has_reasoning_content_and_calls(server: Running) -> None:
    choice = ask(server, "think of both", tools=TOOLS)
    message = choice["message"]
    assert "Let me see." in message["reasoning_content"] == message["reasoning"]
    assert message["content"].strip() == "I ask."
    calls = message["tool_calls"]
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == [
        ("weather", {"city": "Oslo"}),
        ("time", {}),
    ]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.requirement("F62")
def test_a_stream_has_the_same(server: Running, sse: Any) -> None:
    choices = streamed(server, sse, "think of both", tools=TOOLS)
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    whole = ask(server, "think of both", tools=TOOLS)["message"]
    deltas = [choice["delta"] for choice in choices]
    for name in ("content", "reasoning_content", "reasoning"):
        assert "".join(delta.get(name, "") for delta in deltas) == whole[name]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    for number, expected in enumerate(whole["tool_calls"]):
        first, *rest = (call for call in calls if call["index"] == number)
        assert first["type"] == "function"
        assert first["id"]
        assert first["function"] == {"name": expected["function"]["name"], "arguments": ""}
        assert all(call.keys() == {"index", "function"} for call in rest)
        assert all(call["function"].keys() == {"arguments"} for call in rest)
        assert "".join(call["function"]["arguments"] for call in rest) == expected["function"]["arguments"]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["tool_calls"]
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.requirement("F62")
def test_several_choices_with_tools(server: Running, sse: Any) -> None:
    answer = server.chat("call alone", tools=TOOLS, n=3).json()
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]]
    assert len(set(ids)) == 3
    choices = streamed(server, sse, "call alone", tools=TOOLS, n=3)
    ends = [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]
    assert sorted(ends) == [(0, "tool_calls"), (1, "tool_calls"), (2, "tool_calls")]


def test_calls_alone_leave_the_content_null(server: Running) -> None:
    assert ask(server, "call alone", tools=TOOLS)["message"]["content"] is None


def test_a_cut_call_ends_for_its_length(server: Running) -> None:
    choice = ask(server, "call cut", tools=TOOLS)
    assert choice["finish_reason"] == "length"


@pytest.mark.requirement("F20")
def test_what_is_no_call_is_content(server: Running) -> None:
    choice = ask(server, "unknown name", tools=TOOLS)
    assert choice["message"]["content"] == CALL.replace("weather", "nope")
    assert choice["finish_reason"] == "stop"
    text = ask(server, "bare exploit", tools=TOOLS)["message"]["content"]
    assert text == "__import__('os').system('x') {{7*7}} \x00 <tool_call>"


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}])
def test_without_tools_calls_are_text(server: Running, fields: dict[str, Any]) -> None:
    choice = ask(server, "no tools here", **fields)
    assert CALL in choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_no_tool_is_shown_where_none_may_be_called(server: Running) -> None:
    def shown(**fields: Any) -> str:
        body = {"model": server.model, "messages": [{"role": "user", "content": "x"}], **fields}
        ids = server.http.post("/tokenize", json=body).json()["tokens"]
        return str(server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"])

    assert '"name": "weather"' in shown(tools=TOOLS)
    count = server.chat("call alone", tools=TOOLS, max_tokens=1).json()["usage"]["prompt_tokens"]
    none = server.chat("call alone", tools=TOOLS, tool_choice="none", max_tokens=1)
    assert none.json()["usage"]["prompt_tokens"] < count


@pytest.mark.requirement("G5")
def test_one_call_where_no_more_may_come(server: Running) -> None:
    message = ask(server, "think of both", tools=TOOLS, parallel_tool_calls=False)["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


def test_reasoning_can_be_left_out(server: Running, sse: Any) -> None:
    message = ask(server, "only thinks", include_reasoning=False)["message"]
    assert message["content"].strip() == "Done."
    assert not {"reasoning", "reasoning_content"} & message.keys()
    deltas = [c["delta"] for c in streamed(server, sse, "only thinks", include_reasoning=False)]
    assert not any({"reasoning", "reasoning_content"} & delta.keys() for delta in deltas)
    assert "".join(delta.get("content", "") for delta in deltas).strip() == "Done."


@pytest.mark.requirement("F64")
def test_effort_is_the_switch_of_the_template(server: Running) -> None:
    for fields in (
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
    ):
        assert ask(server, "off switch", **fields)["message"]["content"] == "quick"
    for fields in ({}, {"reasoning_effort": "low"}, {"reasoning_effort": "high"}):
        assert ask(server, "off switch", **fields)["message"]["content"].strip() == "slow"
    refused(server, "reasoning_effort", reasoning_effort="lots")


def test_a_tool_loop(server: Running) -> None:
    """An answer with a call is sent back with its result, and the next prompt contains both."""
    call = ask(server, "call alone", tools=TOOLS)["message"]
    messages = [
        {"role": "user", "content": "only thinks"},
        call,
        {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "rain"},
    ]
    answer = server.chat(messages=messages, tools=TOOLS)
    assert answer.status_code == 200, answer.text
    ids = server.http.post("/tokenize", json={"messages": messages, "tools": TOOLS}).json()["tokens"]
    prompt = server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert CALL in prompt
    assert "<|im_start|>tool\nrain<|im_end|>" in prompt


@pytest.mark.requirement("G15")
def test_a_prompt_of_token_ids(server: Running) -> None:
    ids = server.http.post(
        "/tokenize", json={"messages": [{"role": "user", "content": "only thinks"}]}
    ).json()
    body = {"model": server.model, "prompt_token_ids": ids["tokens"], "return_token_ids": True}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert answer["prompt_token_ids"] == ids["tokens"]
    assert answer["choices"][0]["message"]["content"].strip() == "Done."
    assert answer["choices"][0]["message"]["reasoning"]
    both = {**body, "messages": [{"role": "user", "content": "x"}]}
    for wrong in (both, {**body, "prompt_token_ids": []}, {**body, "prompt_token_ids": [-1]}):
        refusal = server.http.post("/v1/chat/completions", json=wrong)
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "prompt_token_ids")


@pytest.mark.requirement("F64", "G6")
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": CITY, "strict": True, "description": "d"},
            }
        },
        {"response_format": {"type": "json_object"}, "tools": TOOLS},
        {"guided_json": CITY},
        {"guided_json": json.dumps(CITY)},
        {"guided_regex": r"\{.*\}"},
        {"guided_choice": ['{"city": "Oslo"}', "no"]},
        {"guided_grammar": 'start: "{" /.*/ "}"'},
        {"structured_outputs": {"json": CITY}},
        {"structured_outputs": {"choice": ["a"], "regex": None}},
        {"tools": [tool("weather", parameters=CITY, strict=True)]},
    ],
)
def test_forms_are_accepted(server: Running, fields: dict[str, Any]) -> None:
    assert ask(server, "json please", **fields)["message"]["content"] == '{"city": "Oslo"}'


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.requirement("F16", "F17", "F35")
@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tool_choice", {"tools": TOOLS, "tool_choice": tool("absent")}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tools", {"tools": [tool("f", parameters={"type": "object", "properties": {"a": {"type": "x"}}})]}),
        (
            "tools",
            {"tools": [tool("f", strict=True, parameters={**CITY, "if": {"type": "object"}, "then": {}})]},
        ),
        ("response_format", {"response_format": {"type": "json_object"}, "guided_regex": "x"}),
        ("guided_regex", {"guided_regex": "("}),
        ("guided_regex", {"guided_regex": r"(?=x)x"}),
        ("guided_grammar", {"guided_grammar": "start: nope"}),
        ("guided_json", {"guided_json": {"type": "nope"}}),
        ("guided_json", {"guided_json": {"$ref": "#/$defs/absent"}}),
        (
            "guided_json",
            {"guided_json": {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}},
        ),
        ("guided_json", {"guided_json": _deep(300)}),
        ("guided_json", {"guided_json": {"enum": []}}),
        ("structural_tag", {"structural_tag": {"type": "nope"}}),
    ],
)
def test_forms_that_cannot_be_held_to_are_named(server: Running, param: str, fields: dict[str, Any]) -> None:
    said = refused(server, param, **fields)
    assert "/" not in said.replace("$ref", "").replace("#/", "").split()[0]
    assert server.chat("call alone", max_tokens=1).status_code == 200


@pytest.mark.requirement("G5", "G6")
def test_required_and_named_calls(server: Running) -> None:
    for choice in ("required", tool("weather")):
        made = ask(server, "call alone", tools=TOOLS, tool_choice=choice)
        assert made["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert made["finish_reason"] == "tool_calls"


@pytest.mark.requirement("F16")
@pytest.mark.parametrize(
    ("warm", "more"),
    [pytest.param(200, 200, marks=pytest.mark.slow), pytest.param(200, 500, marks=pytest.mark.grid)],
)
def test_many_schemas_keep_the_server_small(server: Running, warm: int, more: int) -> None:
    def memory() -> int:
        lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    def schema(number: int) -> dict[str, Any]:
        return {"type": "object", "properties": {f"a{number}": {"type": "string"}}}

    for number in range(warm):
        ask(server, "json please", guided_json=schema(number))
    before = memory()
    for number in range(warm, warm + more):
        ask(server, "json please", guided_json=schema(number))
    grown = memory() - before
    assert grown < 80 * more, "KiB"


@pytest.mark.requirement("F64")
def test_default_variables_of_the_template(start_scripted: Any, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, added=["<think>", "</think>"], template=TEMPLATE)
    script = [
        {"match": "<think>\n\n</think>", "text": "quick", "repeat": True},
        {"text": REASONING + "slow", "repeat": True},
    ]
    flags = ("--tokenizer", str(tmp_path), "--max-model-len", "512")
    server = start_scripted(script, *flags, "--default-chat-template-kwargs", '{"enable_thinking": false}')
    assert ask(server, "x")["message"]["content"] == "quick"
    for fields in ({"reasoning_effort": "high"}, {"chat_template_kwargs": {"enable_thinking": True}}):
        assert ask(server, "x", **fields)["message"]["content"].strip() == "slow"


@pytest.mark.parametrize(
    "flags",
    [
        ("--default-chat-template-kwargs", "{"),
        ("--default-chat-template-kwargs", "[]"),
        ("--default-chat-template-kwargs", '{"tools": []}'),
        ("--tool-call-parser", "nope"),
        ("--allowed-origins", "example.org"),
        ("--allowed-hosts", "https://example.org"),
        ("--api-key", "same", "--admin-key", "same"),
    ],
)
def test_flags_that_cannot_be_are_named(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.yaml"
    script.write_text("- text: x\n")
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0", "--scripted", str(script), *flags])
    shown = capsys.readouterr().err
    assert ended.value.code == 2
    assert flags[-2] in shown
    assert "Traceback" not in shown
