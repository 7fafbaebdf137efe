"""Fields that clients of other servers send are accepted, or ignored where docs/http.md lists them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.support.text_folders import TOOL_TEMPLATE, TOOL_TOKENS, write_tokenizer
from weft.common.errors import InvalidRequest, NotFound
from weft.front.protocol.chat_request import ChatRequest
from weft.front.protocol.effort import effort_variables, switch_variables
from weft.front.protocol.fields import HINTS
from weft.front.protocol.messages.read_messages import read_messages
from weft.front.protocol.parse import parse
from weft.front.protocol.responses.read import NONE, read_response, references
from weft.front.requests.read_pooled import read_embeddings
from weft.front.requests.reading import Job, Reader
from weft.text.images import image_part
from weft.text.model import TextModel
from weft.text.submit import ModelLimits

DOCS = Path(weft.__file__).parents[1] / "docs/http.md"
LIMITS = ModelLimits(vocab_size=512, max_model_len=2048, end_ids=(2,))
HELLO = {"role": "user", "content": "hi"}
TEMPLATE = (
    "{%- for m in messages -%}{{- m.role + ': ' + (m.reasoning_content or '') + '|' + (m.content or '') -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- 'assistant: ' -}}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think></think>' -}}{%- endif -%}"
    "{%- endif -%}"
)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    folder = tmp_path_factory.mktemp("thinks")
    write_tokenizer(folder, added=["<think>", "</think>"], template=TEMPLATE)
    return Reader(TextModel.load(folder, reasoning_parser="qwen3"), ("own", "other"), LIMITS, 1 << 20)


def chat(reader: Reader, **fields: Any) -> Job:
    return reader.chat(json.dumps({"messages": [HELLO], **fields}).encode())


def prompt(reader: Reader, job: Job) -> str:
    return reader.text.tokenizer.decode(job.prompts[0].ids)


def refused(reader: Reader, **fields: Any) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        chat(reader, **fields)
    assert caught.value.http_status == 400
    return caught.value.param


VALUES: dict[str, tuple[list[Any], Any]] = {
    "cache_control": ([{"type": "ephemeral"}], "x"),
    "keep_alive": ([5, -1, "5m"], []),
    "prediction": ([{"type": "content", "content": "x"}], "x"),
    "prompt_cache_options": ([{}], 5),
    "provider": ([{"order": ["a"]}], []),
    "service_tier": (["auto", "default", "flex", "priority", "ultrafast"], "best"),
    "session_id": (["a"], 5),
    "store": ([True, False], "yes"),
    "usage": ([{"include": True}], True),
    "verbosity": (["low", "medium", "high"], "loud"),
}


@pytest.mark.parametrize("name", sorted(HINTS))
def test_a_hint_is_checked_and_changes_nothing(name: str) -> None:
    right, wrong = VALUES[name]
    plain = parse(json.dumps({"messages": [HELLO]}).encode(), ChatRequest)
    for value in right:
        assert parse(json.dumps({"messages": [HELLO], name: value}).encode(), ChatRequest) == plain
    with pytest.raises(InvalidRequest) as caught:
        parse(json.dumps({"messages": [HELLO], name: wrong}).encode(), ChatRequest)
    assert caught.value.param == name


def test_every_hint_is_documented() -> None:
    table = DOCS.read_text().split("### Fields of other clients")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", table))
    assert HINTS.keys() <= named
    more = {"reasoning_details", "thinking_blocks", "max_thinking_tokens", "enable_thinking", "thinking"}
    assert more <= named


def test_a_request_without_a_model_gets_the_servers_own(reader: Reader) -> None:
    assert chat(reader).asked.model == "own"
    assert chat(reader, model=None).asked.model == "own"
    assert chat(reader, model="other").asked.model == "other"
    with pytest.raises(NotFound):
        chat(reader, model="else")
    assert reader.completions(b'{"prompt": "x"}').asked.model == "own"
    assert read_embeddings(reader, b'{"input": "x"}').asked.model == "own"
    assert read_response(reader, NONE + b'{"input": "x"}').asked.model == "own"
    body = json.dumps({"max_tokens": 5, "messages": [HELLO]}).encode()
    assert read_messages(reader, body).asked.model == "own"


def test_top_p_of_zero_keeps_the_likeliest_token(reader: Reader) -> None:
    bodies = [
        chat(reader, top_p=0, top_k=5),
        reader.completions(b'{"prompt": "x", "top_p": 0.0}'),
        read_response(reader, NONE + b'{"input": "x", "top_p": 0}'),
        read_messages(reader, json.dumps({"max_tokens": 5, "messages": [HELLO], "top_p": 0}).encode()),
    ]
    for job in bodies:
        assert (job.token_params.top_k, job.token_params.top_p) == (1, 1.0)
        assert job.token_params.temperature == 1.0


BUDGETS: list[dict[str, Any]] = [
    {"thinking_token_budget": 7},
    {"max_thinking_tokens": 7},
    {"thinking_budget": 7},
    {"thinking_budget_tokens": 7},
    {"thinking": {"type": "enabled", "budget_tokens": 7}},
    {"reasoning": {"max_tokens": 7}},
    {"max_thinking_tokens": 7, "thinking_token_budget": 7},
]


@pytest.mark.parametrize("fields", BUDGETS)
def test_budgets_of_reasoning(reader: Reader, fields: dict[str, Any]) -> None:
    assert chat(reader, **fields).thinking_budget == 7


def test_fields_of_mistrals_clients(reader: Reader) -> None:
    assert chat(reader, random_seed=7, safe_prompt=False).params.seed == 7
    assert chat(reader, random_seed=7, seed=7).params.seed == 7
    assert refused(reader, random_seed=7, seed=8) == "random_seed"
    assert refused(reader, random_seed=1 << 64) == "random_seed"
    assert refused(reader, safe_prompt=True) == "safe_prompt"


def test_budgets_that_differ_or_are_none(reader: Reader) -> None:
    assert refused(reader, max_thinking_tokens=7, thinking_budget=8) == "thinking_budget"
    assert refused(reader, max_thinking_tokens=-2) == "max_thinking_tokens"
    assert refused(reader, max_thinking_tokens=7, logprobs=True) == "max_thinking_tokens"
    assert chat(reader, thinking_budget=-1).thinking_budget is None


SWITCHES: list[tuple[dict[str, Any], bool]] = [
    ({"enable_thinking": False}, False),
    ({"thinking": False}, False),
    ({"thinking": {"type": "disabled"}}, False),
    ({"reasoning": {"enabled": False}}, False),
    ({"reasoning": {"effort": "none"}}, False),
    ({"reasoning_effort": "none"}, False),
    ({"enable_thinking": True}, True),
    ({"thinking": {"type": "enabled"}}, True),
    ({"thinking": {"type": "adaptive"}}, True),
    ({"reasoning_effort": "max"}, True),
    ({"reasoning": {"effort": "high"}}, True),
    ({"thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, True),
]


@pytest.mark.parametrize(("fields", "thinks"), SWITCHES)
def test_switches_of_thinking(reader: Reader, fields: dict[str, Any], thinks: bool) -> None:
    assert ("<think></think>" in prompt(reader, chat(reader, **fields))) is not thinks


def test_switches_that_cannot_be(reader: Reader) -> None:
    assert refused(reader, enable_thinking=True, thinking={"type": "disabled"}) == "thinking"
    assert refused(reader, thinking={"type": "off"}) == "thinking"
    assert refused(reader, enable_thinking="yes") == "enable_thinking"
    with pytest.raises(InvalidRequest, match="enable_thinking"):
        switch_variables(False, "{{ messages }}")
    assert switch_variables(True, "{{ messages }}") == {}
    assert switch_variables(False, "{{ messages }}", thinks=False) == {}


def test_reasoning_that_are_not_to_be_shown(reader: Reader) -> None:
    assert not chat(reader, reasoning={"exclude": True}).asked.include_reasoning
    assert chat(reader, reasoning={"effort": "low"}).asked.include_reasoning
    assert chat(reader, separate_reasoning=True, stream_reasoning=True).asked.include_reasoning
    assert refused(reader, separate_reasoning=False) == "separate_reasoning"


OPEN = "{{ reasoning_effort }}"
LISTED = "{% if reasoning_effort not in ('xhigh', 'medium', 'low') %}{{ raise_exception('no') }}{% endif %}"
ONE = "{% if reasoning_effort not in ['none', 'high'] %}{{ raise_exception('no') }}{% endif %}"
MOST = "{% if reasoning_effort == 'high' %}a{% elif reasoning_effort == 'max' %}b{% endif %}"


@pytest.mark.parametrize(
    ("template", "effort", "made"),
    [
        (OPEN, "max", "high"),
        (OPEN, "xhigh", "high"),
        (OPEN, "low", "low"),
        (LISTED, "max", "xhigh"),
        (LISTED, "high", "xhigh"),
        (LISTED, "minimal", "low"),
        (ONE, "medium", "high"),
        (ONE, "none", "none"),
        (MOST, "max", "max"),
        (MOST, "low", "low"),
    ],
)
def test_the_most_effort_that_a_template_knows(template: str, effort: str, made: str) -> None:
    assert effort_variables(effort, template) == {"reasoning_effort": made}


def test_no_effort_is_the_switch_where_the_word_is_unknown() -> None:
    assert effort_variables("none", LISTED + "{{ enable_thinking }}") == {"enable_thinking": False}


def test_tools_as_clients_write_them(reader: Reader) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": None, "required": None}}
    for tool in (
        {"type": "function", "function": function, "cache_control": {"type": "ephemeral"}},
        {"type": "function", "function": {**function, "cache_control": {"type": "ephemeral"}}},
        {"type": "function", "function": {**function, "return": {"type": "string"}}},  # of transformers
    ):
        body = json.dumps({"messages": [HELLO], "tools": [tool]}).encode()
        (made,) = parse(body, ChatRequest).tool_use().tools
        assert made.parameters == {"type": "object"}


HIDDEN = {"type": "reasoning.encrypted", "data": "x"}
YO = {"type": "text", "text": "yo"}
ECHOED: list[dict[str, Any]] = [
    {"reasoning_content": "hm"},
    {"reasoning": "hm", "reasoning_details": [{"type": "reasoning.text", "text": "hm", "index": 0}]},
    {
        "reasoning_details": [
            {"type": "reasoning.text", "text": "hm"},
            {"type": "reasoning.encrypted", "data": "x"},
        ]
    },
    {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
    {
        "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
            {"type": "text", "text": "yo"},
        ]
    },
    {"content": [{"type": "think", "think": "hm"}, YO]},
]


@pytest.mark.parametrize("fields", ECHOED)
def test_reasoning_come_back_in_the_forms_of_others(reader: Reader, fields: dict[str, Any]) -> None:
    answer = {"role": "assistant", "content": "yo", **fields}
    job = chat(reader, messages=[HELLO, answer, HELLO])
    assert "assistant: hm|yo" in prompt(reader, job)


def test_an_answer_comes_back_with_all_its_fields(reader: Reader) -> None:
    answer = {"role": "assistant", "content": "yo"}
    more = {
        "id": "chatcmpl-1",
        "annotations": [{"type": "url_citation"}],
        "provider_specific_fields": {"a": 1},
        "images": [],
        "finish_reason": "stop",
        "created_at": 5,
        "cache_control": {"type": "ephemeral"},
    }
    plain = chat(reader, messages=[HELLO, answer, HELLO])
    assert chat(reader, messages=[HELLO, {**answer, **more}, HELLO]).prompts == plain.prompts
    user = {**HELLO, "id": "m1", "cache_control": {"type": "ephemeral"}}
    assert chat(reader, messages=[user, answer, HELLO]).prompts == plain.prompts
    for name in ("prefix", "partial", "audio"):
        assert refused(reader, messages=[HELLO, {**answer, name: True}]) == f"messages[1].{name}"
    assert refused(reader, messages=[{**HELLO, "importance": 5}]) == "messages[0].importance"


def test_a_message_comes_back_with_all_its_fields(reader: Reader) -> None:
    answer = {"role": "assistant", "content": [{"type": "text", "text": "yo"}]}
    more = {"id": "msg_1", "type": "message", "model": "m", "stop_reason": "end_turn", "usage": {"a": 1}}

    def read(message: dict[str, Any]) -> Job:
        body = {"max_tokens": 5, "messages": [HELLO, message, HELLO]}
        return read_messages(reader, json.dumps(body).encode())

    assert read({**answer, **more}).prompts == read(answer).prompts


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Return a reader for a model that calls tools."""
    folder = tmp_path_factory.mktemp("calls")
    write_tokenizer(folder, added=TOOL_TOKENS, template=TOOL_TEMPLATE)
    text = TextModel.load(folder, reasoning_parser="qwen3", tool_call_parser="hermes")
    return Reader(text, ("own", "other"), LIMITS, 1 << 20)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BARE = {"type": "object", "default": None, "const": None}
READERS = {
    "chat": lambda reader, fields: chat(reader, **fields),
    "messages": lambda reader, fields: read_messages(
        reader, json.dumps({"max_tokens": 5, "messages": [HELLO], **fields}).encode()
    ),
    "responses": lambda reader, fields: read_response(
        reader, NONE + json.dumps({"input": "hi", "store": False, **fields}).encode()
    ),
}
WITH_NULLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("chat", {}, {"response_format": {"type": "text", "json_schema": None}}),
    ("chat", {}, {"thinking": {"type": "adaptive", "budget_tokens": None, "x": None}}),
    ("chat", {}, {"reasoning": {"effort": None, "x": None}}),
    ("chat", {"metadata": {"a": "b"}}, {"metadata": {"a": "b", "c": None}}),
    ("chat", {"logit_bias": {"1": 1}}, {"logit_bias": {"1": 1, "2": None}}),
    ("chat", {"tools": [TOOL]}, {"tools": [{**TOOL, "custom": None}]}),
    (
        "chat",
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f", "x": None}}},
    ),
    (
        "chat",
        {"messages": [HELLO, {"role": "assistant", "tool_calls": [CALL]}]},
        {
            "messages": [
                {**HELLO, "name": None},
                {"role": "assistant", "tool_calls": [{**CALL, "type": None}]},
            ]
        },
    ),
    ("messages", {}, {"thinking": {"type": "adaptive", "budget_tokens": None}}),
    ("messages", {}, {"output_config": {"effort": None, "x": None}, "context_management": {"edits": None}}),
    ("messages", {}, {"metadata": {"user_id": None, "x": None}}),
    ("messages", {"system": "a"}, {"system": [{"type": "text", "text": "a", "x": None}]}),
    ("messages", {}, {"messages": [{**HELLO, "name": None}]}),
    (
        "messages",
        {},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "x": None}]}]},
    ),
    (
        "messages",
        {"tools": [{"name": "f", "input_schema": BARE}], "tool_choice": {"type": "auto"}},
        {
            "tools": [{"name": "f", "input_schema": BARE, "x": None}],
            "tool_choice": {"type": "auto", "name": None},
        },
    ),
    (
        "messages",
        {"messages": [HELLO, {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]}]},
        {
            "messages": [
                HELLO,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": None}]},
            ]
        },
    ),
    ("responses", {}, {"text": {"format": {"type": "text", "name": None}, "x": None}}),
    ("responses", {}, {"reasoning": {"effort": None, "x": None}, "metadata": {"a": None}}),
    (
        "responses",
        {"tools": [{"type": "function", "name": "f"}]},
        {"tools": [{"type": "function", "name": "f", "x": None}]},
    ),
]


@pytest.mark.parametrize(("api", "plain", "nulls"), WITH_NULLS)
def test_a_null_field_is_absent_at_any_depth(
    tooled: Reader, api: str, plain: dict[str, Any], nulls: dict[str, Any]
) -> None:
    made, expected = READERS[api](tooled, nulls), READERS[api](tooled, plain)
    assert made.prompts == expected.prompts
    assert made.token_params == expected.token_params
    assert made.output == expected.output


def test_nulls_of_a_schema_keep_their_meaning(reader: Reader) -> None:
    field = {"type": ["string", "null"], "enum": ["a", None], "default": None}
    schema = {"type": "object", "properties": {"a": field}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with_null = {**form, "json_schema": {**form["json_schema"], "x": None}}
    assert chat(reader, response_format=with_null).grammar == chat(reader, response_format=form).grammar


@pytest.mark.parametrize(
    ("api", "fields", "said"),
    [
        ("chat", {"reasoning_effort": "much"}, "supported: high, low, max, medium, minimal, none, xhigh"),
        ("chat", {"tools": [{"type": "custom", "custom": {}}]}, "$[0].type; supported: function"),
        ("chat", {"tool_choice": "maybe"}, "supported: any, auto, none, required"),
        (
            "chat",
            {"response_format": {"type": "xml"}},
            "supported: json_object, json_schema, structural_tag, text",
        ),
        ("messages", {"thinking": {"type": "on"}}, "supported: adaptive, disabled, enabled"),
        ("messages", {"output_config": {"effort": "none"}}, "supported: high, low, max, medium, xhigh"),
        (
            "messages",
            {"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]},
            "supported: false",
        ),
        ("responses", {"truncation": "auto", "text": {"verbosity": "max"}}, "supported: high, low, medium"),
        ("responses", {"service_tier": "best"}, "supported: auto, default"),
    ],
)
def test_a_refused_word_names_the_supported_words(
    tooled: Reader, api: str, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        READERS[api](tooled, fields)
    assert said in caught.value.message


@pytest.mark.parametrize("form", [{}, {"type": None}, {"type": None, "json_schema": None}])
def test_a_type_that_is_null_is_missing(reader: Reader, form: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="response_format: object missing required field type"):
        chat(reader, response_format=form)


def test_an_empty_result_may_have_no_content(tooled: Reader) -> None:
    calls = [HELLO, {"role": "assistant", "tool_calls": [CALL]}]
    plain = chat(tooled, messages=[*calls, {"role": "tool", "tool_call_id": "c", "content": ""}])
    for more in ({}, {"content": None}, {"content": []}):
        job = chat(tooled, messages=[*calls, {"role": "tool", "tool_call_id": "c", **more}])
        assert job.prompts == plain.prompts
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    for more in ({}, {"output": None}, {"output": []}, {"output": ""}):
        result = {"type": "function_call_output", "call_id": "c", **more}
        job = READERS["responses"](tooled, {"input": [HELLO, call, result]})
        assert job.prompts == plain.prompts


def test_a_list_without_parts_is_empty_text(tooled: Reader) -> None:
    for role in ("system", "user", "assistant"):
        empty, listed = ({"role": role, "content": content} for content in ("", []))
        wanted = chat(tooled, messages=[HELLO, empty, HELLO])
        assert chat(tooled, messages=[HELLO, listed, HELLO]).prompts == wanted.prompts


@pytest.mark.parametrize(
    ("api", "fields", "said"),
    [
        ("chat", {"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "content[0] must have a type"),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"text": "a"}]}]},
            "content[0] must have a type",
        ),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "content[0].text must be a string",
        ),
        ("responses", {"tools": [{"name": "f"}]}, "tools[0] must have a type"),
    ],
)
def test_a_part_without_a_type_is_named(tooled: Reader, api: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        READERS[api](tooled, fields)
    assert said in caught.value.message


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_obfuscation": False, "x": None}])
def test_stream_options_that_are_off_need_no_stream(tooled: Reader, options: dict[str, Any]) -> None:
    assert not chat(tooled, stream_options=options).asked.stream
    assert not tooled.completions(
        json.dumps({"prompt": "x", "stream_options": options}).encode()
    ).asked.stream
    assert not READERS["responses"](tooled, {"stream_options": options}).asked.stream
    assert refused(tooled, stream_options={"include_usage": True}) == "stream_options"
    assert refused(tooled, stream_options={"other": False}) == "stream_options"


def test_an_empty_previous_response_is_none(tooled: Reader) -> None:
    body = json.dumps({"input": "x", "previous_response_id": ""}).encode()
    assert references([body]) == references([b'{"input": "x"}'])
    assert read_response(tooled, NONE + body).prompts


def test_cache_hints_of_parts_change_nothing(tooled: Reader) -> None:
    hint = {"prompt_cache_breakpoint": {"ttl": "5m"}, "cache_control": {"type": "ephemeral"}}
    url = "data:image/png;base64,"
    image = image_part({"type": "image_url", "image_url": {"url": url}, **hint}, "image_url", "x")
    assert image == image_part({"type": "image_url", "image_url": {"url": url}}, "image_url", "x")
    for fields, said in (({}, "type input_image"), ({"other": 1}, "file_id is not supported")):
        part = {"type": "input_image", "image_url": url, **hint, **fields}
        with pytest.raises(InvalidRequest, match=said):  # this model takes no images
            READERS["responses"](tooled, {"input": [{"role": "user", "content": [part]}]})


@pytest.mark.parametrize("name", ["billing_policy", "compaction", "fallback_credit_token", "thread", "speed"])
def test_official_fields_without_support_are_called_so(tooled: Reader, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is not supported by this server"):
        READERS["messages"](tooled, {name: "x"})
