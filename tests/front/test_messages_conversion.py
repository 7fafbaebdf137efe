"""Conversion of requests of the Messages API, and refusals that name the wrong field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.support.tool_template import write_template
from weft.common.errors import InvalidRequest, NotFound
from weft.front.protocol.conversation import Conversation
from weft.front.protocol.messages.messages_conversion import MessagesFacts, conversation
from weft.front.protocol.messages.messages_request import CountRequest, MessagesRequest
from weft.front.protocol.messages.read_messages import read_messages
from weft.front.protocol.parse import parse
from weft.front.requests.reading import Job, Reader
from weft.front.sealed_reasoning import sealed
from weft.text.images import ImagePart
from weft.text.model import TextModel
from weft.text.submit import ModelLimits

FOLDER = Path(weft.__file__).parent / "checkpoints/spool-text"
HELLO = {"role": "user", "content": "hello"}
LINE = "x-anthropic-billing-header: cc_version=2.1; cch=5f3a1;"
TOOL = {"name": "f", "description": "does", "input_schema": {"type": "object", "properties": {}}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": [1, None]}}


def read(**fields: Any) -> tuple[Conversation, MessagesFacts]:
    body = {"model": "m", "max_tokens": 16, "messages": [HELLO], **fields}
    asked = parse(json.dumps(body).encode(), MessagesRequest)
    return conversation(asked, system_inside=True, keep_attribution=False)


def messages(*given: Any, **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read(messages=list(given), **fields)[0].messages
    return found


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.http_status == 400
    return caught.value


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": one} for one in texts]


def test_a_tool_loop_becomes_messages_of_a_chat() -> None:
    made = messages(
        {"role": "user", "content": [*text("one", "two"), {**text("three")[0], "cache_control": None}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "let me", "signature": "s"},
                {"type": "redacted_thinking", "data": "opaque"},
                *text("I call."),
                CALL,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": text("4", "5")},
                *text("go on"),
            ],
        },
        system=[*text("be brief"), {**text("be kind")[0], "cache_control": {"type": "ephemeral"}}],
    )
    assert made == [
        {"role": "system", "content": "be brief\n\nbe kind"},
        {"role": "user", "content": text("one", "two", "three")},
        {
            "role": "assistant",
            "content": "I call.",
            "reasoning_content": "let me",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"a": [1, null]}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "4\n5"},
        {"role": "user", "content": text("go on")},
    ]


def test_turns_of_one_role_are_one_turn() -> None:
    made = messages(
        HELLO, HELLO, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, HELLO
    )
    assert [message["content"] for message in made] == [text("hello", "hello"), "ab", text("hello")]


def test_a_system_message_inside_stays_in_its_place_where_the_template_shows_it() -> None:
    inside = [HELLO, {"role": "system", "content": "now in French"}]
    assert messages(*inside)[1:] == [{"role": "system", "content": "now in French"}]
    asked = parse(json.dumps({"model": "m", "max_tokens": 1, "messages": inside}).encode(), MessagesRequest)
    (folded,) = conversation(asked, system_inside=False, keep_attribution=False)[0].messages
    reminder = "<system-reminder>\nnow in French\n</system-reminder>"
    assert folded == {"role": "user", "content": text("hello", reminder)}


def test_an_error_of_a_tool_says_so() -> None:
    def result(content: Any, is_error: bool | None) -> str:
        block = {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": is_error}
        return str(messages({"role": "user", "content": [block]})[0]["content"])

    assert result("no such file", True) == "Error: no such file"
    assert result("Error: no", True) == "Error: no"
    assert result("fine", False) == "fine"
    assert result(None, None) == ""


def test_a_plain_text_document_is_text() -> None:
    source = {"type": "text", "data": "body", "media_type": "text/plain"}
    block = {"type": "document", "source": source, "title": "T"}
    assert messages({"role": "user", "content": [block]})[0]["content"] == text("T\nbody")


def test_the_answer_goes_on_from_a_last_turn_of_the_assistant() -> None:
    made, _ = read(messages=[HELLO, {"role": "assistant", "content": "The answer is ("}])
    assert (made.continues, made.opens) == (True, False)
    made, _ = read(messages=[HELLO, {"role": "assistant", "content": ""}])
    assert (made.continues, made.opens, len(made.messages)) == (False, True, 1)
    assert refused(messages=[HELLO, {"role": "assistant", "content": [CALL]}]).param == "messages"


@pytest.mark.requirement("G13")
def test_lines_of_attribution_are_left_out() -> None:
    for system in (LINE + "\nbe brief", [*text(LINE), *text("be brief")]):
        made, facts = read(system=system)
        assert made.messages[0] == {"role": "system", "content": "be brief"}
        assert facts.attribution
    made, facts = read(system="be brief\n" + LINE)
    assert (LINE in made.messages[0]["content"], facts.attribution) == (True, False)
    asked = parse(
        json.dumps({"model": "m", "max_tokens": 1, "messages": [HELLO], "system": LINE}).encode(),
        MessagesRequest,
    )
    kept, facts = conversation(asked, system_inside=True, keep_attribution=True)
    assert (kept.messages[0]["content"], facts.attribution) == (LINE, False)


def test_a_reasoning_that_was_omitted_comes_back_in_its_signature() -> None:
    block = {"type": "thinking", "thinking": "", "signature": sealed("secret 語")}
    (_, turn, _) = messages(HELLO, {"role": "assistant", "content": [block, *text("a")]}, HELLO)
    assert turn["reasoning_content"] == "secret 語"
    for signature in ("EqQB", "weft1.!!", "weft1./w=="):
        block["signature"] = signature
        (_, turn, _) = messages(HELLO, {"role": "assistant", "content": [block, *text("a")]}, HELLO)
        assert "reasoning_content" not in turn


def test_tools_and_the_choice_among_them() -> None:
    def use(choice: Any) -> tuple[Any, ...]:
        tools = read(
            tools=[TOOL, {**TOOL, "name": "g", "type": "custom", "strict": True}], tool_choice=choice
        )[0].tools
        return tools.mode, tools.names, tools.parallel

    assert use(None) == ("auto", None, True)
    assert use({"type": "auto", "disable_parallel_tool_use": True}) == ("auto", None, False)
    assert use({"type": "any"}) == ("required", None, True)
    assert use({"type": "tool", "name": "g"}) == ("required", ("g",), True)
    assert use({"type": "none"}) == ("none", None, True)
    made = read(tools=[{**TOOL, "strict": True, "input_examples": [{"a": 1}]}])[0].tools.tools[0]
    assert (made.name, made.parameters, made.strict) == ("f", TOOL["input_schema"], True)
    assert made.description == 'does\n\nExamples of its input:\n{"a": 1}'


def test_how_much_to_think() -> None:
    def asked(**fields: Any) -> tuple[Any, ...]:
        made, facts = read(**fields)
        return made.effort, made.thinking_budget, facts.omit_reasoning

    assert asked() == (None, None, False)
    assert asked(thinking={"type": "disabled"}) == ("none", None, False)
    assert asked(thinking={"type": "adaptive", "display": "omitted"}) == (None, None, True)
    assert asked(thinking={"type": "enabled", "budget_tokens": 2048}) == ("medium", 2048, False)
    assert asked(output_config={"effort": "max"}) == ("max", None, False)


def test_what_an_agent_sends_with_every_request() -> None:
    """Fields of a coding agent's requests that change nothing here are accepted."""
    made, _ = read(
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        metadata={"user_id": json.dumps({"session_id": "x" * 500})},
        cache_control={"type": "ephemeral"},
        service_tier="auto",
        tools=[{**TOOL, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
    )
    assert made.messages == [{"role": "user", "content": text("hello")}]


def test_a_form_of_the_answer() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields, param in (
        ({"output_config": {"format": form}}, "output_config"),
        ({"output_format": form}, "output_format"),
    ):
        constraint = read(**fields)[0].constraint
        assert constraint is not None
        assert constraint.param == param
    assert refused(output_format=form, output_config={"format": form}).param == "output_format"


BAD: list[tuple[str, Any]] = [
    ("messages", []),
    ("messages", "x"),
    ("messages", ["x"]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "tool", "content": "x"}]),
    ("messages", [{"role": ["user"], "content": "x"}]),
    ("messages", [{"role": "user", "content": None}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": ["x"]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": 1}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": "x", "volume": 11}]}]),
    ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
    (
        "messages",
        [{"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "x"}}]}],
    ),
    ("messages", [{"role": "user", "content": [{"type": "thinking", "thinking": "x", "signature": ""}]}]),
    ("messages", [{"role": "user", "content": [{"type": "tool_result"}]}]),
    (
        "messages",
        [
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}],
            }
        ],
    ),
    ("messages", [{"role": "user", "content": "x", "name": "y"}]),
    (
        "messages",
        [
            {
                "role": "assistant",
                "content": [{"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}}],
            }
        ],
    ),
    ("system", 5),
    ("system", [5]),
    ("system", [{"type": "image"}]),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("max_tokens", 2**63),
    ("max_tokens", True),
    ("temperature", -1),
    ("temperature", "hot"),
    ("top_p", 2),
    ("top_k", -5),
    ("stop_sequences", "x"),
    ("stop_sequences", [""]),
    ("stop_sequences", ["x"] * 17),
    ("stop_sequences", [5]),
    ("stream", "yes"),
    ("thinking", {"type": "enabled"}),
    ("thinking", {"type": "enabled", "budget_tokens": 0}),
    ("thinking", {"type": "between_tools"}),
    ("thinking", True),
    ("metadata", {"user_id": 5}),
    ("metadata", {"user_id": "x" * 5000}),
    ("metadata", {"other": "x"}),
    ("tools", {}),
    ("tools", [5]),
    ("tools", [{"name": "f"}]),
    ("tools", [{**TOOL, "name": "a b"}]),
    ("tools", [{**TOOL, "name": ""}]),
    ("tools", [TOOL, TOOL]),
    ("tools", [{**TOOL, "input_schema": {"type": "array"}}]),
    ("tools", [{**TOOL, "input_schema": 5}]),
    ("tools", [{**TOOL, "defer_loading": True}]),
    ("tools", [{"type": "web_search_20250305", "name": "web_search"}]),
    ("tools", [{"type": "bash_20250124", "name": "bash"}]),
    ("tool_choice", {"type": "any"}),
    ("tool_choice", {"type": "tool", "name": "g"}),
    ("tool_choice", "auto"),
    ("output_config", {"effort": "most"}),
    ("output_config", {"format": {"type": "json_schema", "schema": 5}}),
    ("output_format", {"type": "json_object"}),
    ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
    ("context_management", {"edits": {}}),
    ("context_management", {"x": 1}),
    ("mcp_servers", [{}]),
    ("container", "x"),
    ("speed", "fast"),
    ("service_tier", "best"),
    ("betas", "x"),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda one: json.dumps(one)[:60])
def test_what_cannot_be_is_refused_by_name(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.param is not None
    assert error.param.startswith(name) or (name, error.param) == ("stop_sequences", "stop")


@pytest.mark.parametrize("name", ["max_tokens", "messages"])
def test_what_must_be_there(name: str) -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [HELLO]}
    del body[name]
    with pytest.raises(InvalidRequest) as caught:
        parse(json.dumps(body).encode(), MessagesRequest)
    assert caught.value.param == name


def test_a_count_needs_no_length_and_takes_what_a_prompt_consists_of() -> None:
    body = {
        "model": "m",
        "messages": [HELLO],
        "tools": [TOOL],
        "tool_choice": {"type": "auto"},
        "system": "s",
    }
    asked = parse(json.dumps(body).encode(), CountRequest)
    made, _ = conversation(asked, system_inside=True, keep_attribution=False)
    assert [message["role"] for message in made.messages] == ["system", "user"]
    assert [tool.name for tool in made.tools.tools] == ["f"]


def test_wishes_that_a_model_does_not_know_are_no_errors(tmp_path: Path) -> None:
    limits = ModelLimits(vocab_size=1024, max_model_len=2048, end_ids=(2,))
    plain = Reader(TextModel.load(FOLDER), ("m",), limits, 1 << 20)
    thinks = Reader(TextModel.load(FOLDER, write_template(tmp_path)), ("m",), limits, 1 << 20)

    def job(reader: Reader, **fields: Any) -> Job:
        body = {"model": "m", "max_tokens": 10**6, "messages": [HELLO], **fields}
        return read_messages(reader, json.dumps(body).encode())

    enabled = {"type": "enabled", "budget_tokens": 1024}
    for fields in (
        {"thinking": enabled},
        {"thinking": {"type": "disabled"}},
        {"output_config": {"effort": "max"}},
    ):
        made = job(plain, **fields)
        assert made.prompts == job(plain).prompts
        assert made.thinking_budget is None
    assert job(thinks, thinking=enabled).thinking_budget == 1024
    assert job(thinks, thinking={"type": "disabled"}).prompts != job(thinks).prompts
    room = job(plain).prompts[0]
    assert room.max_tokens == 2048 - room.count, "as much as the context has room for"
    with pytest.raises(NotFound):
        job(plain, model="other")


def test_images_are_parts_in_their_places() -> None:
    inline = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    named = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    made, _ = read(
        messages=[
            {"role": "user", "content": [inline, {"type": "text", "text": "a"}, named]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [inline]}]},
        ]
    )
    user, _, tool = made.messages
    assert user["content"] == [
        ImagePart("data:;base64,AAAA", "messages[0].content[0]", part_type="image"),
        {"type": "text", "text": "a"},
        ImagePart("https://example.org/a.png", "messages[0].content[2]", part_type="image"),
    ]
    assert tool["content"] == [
        ImagePart("data:;base64,AAAA", "messages[2].content[0].content[0]", part_type="image")
    ]


def search_result(**more: Any) -> dict[str, Any]:
    found = {"type": "search_result", "source": "https://a.example", "title": "T", "content": text("a", "b")}
    return {**found, **more}


def document(source: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **more}


@pytest.mark.parametrize(
    ("block", "shown"),
    [
        (
            document({"type": "text", "media_type": "text/plain", "data": "a"}, title="T", context="C"),
            "T\nC\na",
        ),
        (document({"type": "content", "content": "a"}, title="T"), "T\na"),
        (document({"type": "content", "content": text("a", "b")}), "a\nb"),
        (search_result(), "T\nhttps://a.example\na\nb"),
        (search_result(citations={"enabled": False}, content=[]), "T\nhttps://a.example"),
    ],
)
def test_documents_and_search_results_are_text(block: dict[str, Any], shown: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [*text("x"), block]}
    user, _, tool = messages(
        {"role": "user", "content": [block]},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [result]},
    )
    assert user["content"] == text(shown)
    assert tool["content"] == f"x\n{shown}"


def test_images_of_a_document_stay_in_place() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    block = document({"type": "content", "content": [*text("a"), image]}, title="T")
    (user,) = messages({"role": "user", "content": [block]})
    shown = ImagePart(image["source"]["url"], "messages[0].content[0].source.content[1]", part_type="image")
    assert user["content"] == [*text("T", "a"), shown]


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (
            document({"type": "base64", "media_type": "application/pdf", "data": "x"}),
            "reads no PDF files; send the document as text",
        ),
        (document({"type": "content", "content": [search_result()]}), "supported types: text, image"),
        (document({"type": "url", "url": "https://example.org/a.pdf"}), "reads no PDF files"),
        (document({"type": "other", "data": "x"}), "supported: content, text"),
        (document({"type": "content", "content": 5}), "source.content"),
        (search_result(content="a"), "content"),
        (search_result(content=[document({"type": "content", "content": "a"})]), "supported types: text"),
        (search_result(citations={"enabled": True}), "set citations.enabled to false"),
    ],
)
def test_documents_that_cannot_be_shown_are_named(block: dict[str, Any], said: str) -> None:
    error = refused(messages=[{"role": "user", "content": [block]}])
    assert (error.param or "").startswith("messages[0].content[0]")
    assert said in error.message
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [block]}
    last = {"role": "user", "content": [result]}
    assert said in refused(messages=[HELLO, {"role": "assistant", "content": [CALL]}, last]).message


SEARCH = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}
FOUND = {"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "x", "page_age": None}


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ([FOUND], '[{"type": "web_search_result", "title": "T", "url": "u"}]'),
        ({"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"}, None),
        (text("a", "b"), "a\nb"),
        ([], ""),
        (None, ""),
        ("a", "a"),
    ],
)
def test_tools_of_another_server_are_calls_with_results(content: Any, shown: str | None) -> None:
    result = {"type": "web_search_tool_result", "tool_use_id": "s", "content": content, "caller": {}}
    turn = {"role": "assistant", "content": [*text("one"), SEARCH, result, *text("two")]}
    _, call, tool, end, _ = messages(HELLO, turn, HELLO)
    assert call["content"] == "one"
    assert call["tool_calls"] == [
        {"id": "s", "type": "function", "function": {"name": "web_search", "arguments": '{"query": "q"}'}}
    ]
    assert tool == {
        "role": "tool",
        "tool_call_id": "s",
        "content": json.dumps(content) if shown is None else shown,
    }
    assert end["content"] == "two"


def test_a_failed_tool_of_another_server() -> None:
    result = {"type": "mcp_tool_result", "tool_use_id": "s", "content": text("no"), "is_error": True}
    call = {**SEARCH, "type": "mcp_tool_use", "server_name": "x"}
    assert messages(HELLO, {"role": "assistant", "content": [call, result]})[2]["content"] == "Error: no"


def test_nothing_is_nested_so_deeply_that_it_is_no_mistake_of_the_client(tmp_path: Path) -> None:
    """Deep nesting is always the client's mistake: writing a value takes more stack than reading it."""
    limits = ModelLimits(vocab_size=1024, max_model_len=2048, end_ids=(2,))
    reader = Reader(TextModel.load(FOLDER, write_template(tmp_path)), ("m",), limits, 1 << 20)

    def refusal(levels: int, tool: dict[str, Any]) -> tuple[str, str | None]:
        """Return the refusal of a tool in which an object of ``levels`` levels replaces 5."""
        body = json.dumps({"model": "m", "max_tokens": 2, "messages": [HELLO], "tools": [tool]})
        with pytest.raises(InvalidRequest) as caught:
            read_messages(reader, body.replace("5", '{"a":' * levels + "1" + "}" * levels).encode())
        return caught.value.message, caught.value.param

    examples = {refusal(levels, {**TOOL, "input_examples": [5]}) for levels in range(900, 1010)}
    assert ("the body is nested too deeply", None) in examples
    schema = {**TOOL, "input_schema": {"type": "object", "x": 5}}
    assert refusal(700, schema) == ("tools is nested too deeply", "tools")
