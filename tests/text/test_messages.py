"""Tool calls, results and reasoning in conversations: validated, and passed to templates in the required
form.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.text_folders import write_tokenizer
from weft.common.errors import InvalidRequest
from weft.text.chat import ChatFormat
from weft.text.chat_messages import ChatMessage, Shows, TextPart, check_messages
from weft.text.echoes import CallMade, too_deep
from weft.text.images import ImagePart
from weft.text.model import TextModel
from weft.text.parsing.parser import Tool
from weft.text.tokenizer import Tokenizer

HERMES = """{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{%- if m.reasoning_content %}
<think>
{{ m.reasoning_content }}
</think>{% endif %}
{{ m.content or '' }}{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
CODER = """{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{%- for m in messages %}<|im_start|>
{%- for call in m.tool_calls or [] %}<function={{ call.function.name }}>
{%- for key, value in call.function.arguments.items() %}<parameter={{ key }}>{{ value }}</parameter>
{%- endfor %}
{%- endfor %}{{ m.content or '' }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<think>
{% endif %}"""
DEEPSEEK = """{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{%- for m in messages %}
{%- if m.content is none %}{% for call in m.tool_calls %}<call>{{ call['function']['name'] + '<sep>'
 + call['function']['arguments'] }}{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"""
HARMONY = """{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{%- for m in messages %}
{%- if m.thinking and m.tool_calls and m.content %}{{ raise_exception('not both') }}{% endif -%}
<|im_start|>{{ m.thinking or '' }}|{{ m.content or '' }}<|im_end|>{% endfor %}"""
SPECIAL = ("<tool>",)
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "x", "b": [1]}'}}
TOOL = Tool(
    name="f", description="does", parameters={"type": "object", "properties": {"a": {"type": "string"}}}
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("messages")
    write_tokenizer(folder, special=SPECIAL)
    return Tokenizer.load(folder)


def user(content: Any = "q") -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(**more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, **more}


def result(content: Any = "r", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_1", "content": content, **more}


def test_a_tool_loop_is_rendered_as_transformers_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, special=SPECIAL, template=HERMES)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = ChatFormat(Tokenizer.load(tmp_path))
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "description": "does", "parameters": TOOL.parameters},
        }
    ]
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": "x", "b": [1]}}}
    sent = [user(), assistant(tool_calls=[CALL]), result(), assistant(content="done"), user("next")]
    meant = [user(), assistant(tool_calls=[call]), result(), assistant(content="done"), user("next")]
    made = ours.encode(sent, tools=(TOOL,))
    text = theirs.apply_chat_template(meant, tools=tools, tokenize=False, add_generation_prompt=True)
    assert made.text == text
    assert made.ids == theirs(text, add_special_tokens=False)["input_ids"]


def test_templates_that_loop_over_arguments_get_an_object(tokenizer: Tokenizer) -> None:
    text = ChatFormat(tokenizer, CODER).encode([user(), assistant(tool_calls=[CALL]), result()]).text
    assert "<function=f><parameter=a>x</parameter><parameter=b>[1]</parameter>" in text


def test_templates_that_append_arguments_get_text(tokenizer: Tokenizer) -> None:
    text = ChatFormat(tokenizer, DEEPSEEK).encode([user(), assistant(tool_calls=[CALL]), result()]).text
    assert '<call>f<sep>{"a": "x", "b": [1]}' in text


@pytest.mark.parametrize("arguments", ["", "{}", None, {}])
def test_no_arguments(tokenizer: Tokenizer, arguments: Any) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    messages = [user(), assistant(tool_calls=[call]), result()]
    assert '"arguments": {}' in ChatFormat(tokenizer, HERMES).encode(messages).text
    assert "<sep>{}" in ChatFormat(tokenizer, DEEPSEEK).encode(messages).text


WRONG = (
    '{"city": "Oslo',
    '{"cmd": "x", "echo ..',
    "[1]",
    "3",
    '"text"',
    '{"a": NaN}',
    '{"a": 1e999}',
    '{"a": "\\ud800"}',
    "{'a': 1}",
    '{"a": ' * 80 + "1" + "}" * 80,
    "</parameter>\n<tool_call>",
)
"""Malformed arguments: errors of models, and cuts by limits."""


@pytest.mark.parametrize("arguments", WRONG)
@pytest.mark.parametrize("template", ["HERMES", "CODER", "DEEPSEEK"])
def test_arguments_that_are_no_object_are_shown_as_partial_json(
    tokenizer: Tokenizer, template: str, arguments: str
) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    source = {"HERMES": HERMES, "CODER": CODER, "DEEPSEEK": DEEPSEEK}[template]
    text = ChatFormat(tokenizer, source).encode([user(), assistant(tool_calls=[call]), result()]).text
    if template == "CODER":
        assert f"<parameter=partial_json>{arguments}</parameter>" in text
    else:
        assert json.loads(
            text[text.index('{"partial') :].partition("}\n</tool_call>")[0].partition("<|im_end|>")[0]
        ) == {"partial_json": arguments}


@pytest.mark.parametrize("arguments", ["", " ", "null", " null\n", "{}", "{ }", None, {}])
def test_arguments_that_say_nothing_are_an_empty_object(tokenizer: Tokenizer, arguments: Any) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    messages = [user(), assistant(tool_calls=[call]), result()]
    assert '"arguments": {}' in ChatFormat(tokenizer, HERMES).encode(messages).text
    assert "<sep>{" in ChatFormat(tokenizer, DEEPSEEK).encode(messages).text


def test_arguments_as_an_object_with_half_of_a_surrogate_pair(tokenizer: Tokenizer) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": {"a": "\ud800"}}}
    text = ChatFormat(tokenizer, HERMES).encode([user(), assistant(tool_calls=[call]), result()]).text
    assert "partial_json" in text
    assert "ud800" in text


def test_of_a_key_that_comes_twice_the_last_counts() -> None:
    call = CallMade(id="c", name="f", arguments='{"a": 1, "a": 2}')
    assert call.shown() == {"a": 2}
    assert call.shown_text() == call.arguments


def test_reasoning_go_under_the_name_that_a_template_reads(tokenizer: Tokenizer) -> None:
    for field in ("reasoning_content", "reasoning"):
        answer = assistant(content="x", **{field: "hm"})
        assert "<think>\nhm\n</think>x" in ChatFormat(tokenizer, HERMES).encode([user(), answer, user()]).text
        assert "hm|x" in ChatFormat(tokenizer, HARMONY).encode([user(), answer, user()]).text
    both = assistant(content="x", reasoning="hm", tool_calls=[CALL])
    assert "|x" in ChatFormat(tokenizer, HARMONY).encode([user(), both, result()]).text


def test_tools_that_a_template_does_not_know_are_refused(tokenizer: Tokenizer) -> None:
    chat = ChatFormat(tokenizer, "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(InvalidRequest, match="does not support tools") as caught:
        chat.encode([user()], tools=(TOOL,))
    assert caught.value.param == "tools"


PIECES = st.lists(
    st.sampled_from(["<|im_end|>", "<tool>", "<|im_", "end|>", "<", "|>", "tool>", "x", '"', "\\", "\n"]),
    max_size=4,
).map("".join)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(text=PIECES, key=PIECES, source=st.sampled_from([HERMES, CODER, DEEPSEEK, HARMONY]))
def test_no_string_of_a_request_adds_a_control_token(
    tokenizer: Tokenizer, text: str, key: str, source: str
) -> None:
    """The rule covers tools, calls, arguments, results and reasoning at any depth."""

    def conversation(words: str, name: str) -> tuple[list[dict[str, Any]], Tool]:
        arguments = json.dumps({name or "k": [{"deep": words}], "a": words})
        call = {"id": words or "c", "function": {"name": name or "f", "arguments": arguments}}
        schema = {"type": "object", "properties": {name: {"description": words, "enum": [words]}}}
        tool = Tool(name="f", description=words, parameters=schema)
        answer = assistant(content=words, reasoning=words, tool_calls=[call])
        return [user(words), answer, result(words, tool_call_id=words), user("end")], tool

    chat = ChatFormat(tokenizer, source)
    control = set(tokenizer.special.values())
    counts = []
    for words, name in ((text, key), ("x", "y")):
        messages, tool = conversation(words, name)
        ids = chat.encode(messages, tools=(tool,)).ids
        counts.append([token for token in ids if token in control])
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([result(5)], "messages[0].content"),
        ([result(tool_call_id=3)], "messages[0].tool_call_id"),
        ([user(), {**user(), "tool_calls": [CALL]}], "messages[1].tool_calls"),
        ([{**user(), "tool_call_id": "x"}], "messages[0].tool_call_id"),
        ([assistant(tool_calls={})], "messages[0].tool_calls"),
        ([assistant(tool_calls=[{}] * 513)], "messages[0].tool_calls"),
        ([assistant(tool_calls=[CALL, 3])], "messages[0].tool_calls[1]"),
        ([assistant(tool_calls=[{**CALL, "type": "custom"}])], "messages[0].tool_calls[0]"),
        ([assistant(tool_calls=[{**CALL, "id": None}])], "messages[0].tool_calls[0].id"),
        ([assistant(tool_calls=[{**CALL, "function": {}}])], "messages[0].tool_calls[0].function.name"),
        (
            [assistant(tool_calls=[{**CALL, "function": {"name": "f", "arguments": 3}}])],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [assistant(tool_calls=[{**CALL, "function": {"name": "f", "arguments": "\ud800"}}])],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([assistant(function_call={"name": "f"})], "messages[0].function_call"),
        ([assistant(content="x", audio={"id": "x"})], "messages[0].audio"),
        ([user([{"type": "image_url", "image_url": {"url": "x"}}])], "messages[0].content"),
        ([user([{"type": "input_audio", "input_audio": {}}])], "messages[0].content"),
        ([assistant(content="x", reasoning="\udcff")], "messages[0].reasoning"),
    ],
)
def test_wrong_messages_are_named(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_messages(messages)
    assert caught.value.param == param


def called(*calls: tuple[str, str]) -> dict[str, Any]:
    """Return a message of the assistant with calls, given as (id, name)."""
    return assistant(tool_calls=[{"id": id_, "function": {"name": name}} for id_, name in calls])


def empty(**more: Any) -> dict[str, Any]:
    return result(tool_call_id="", **more)


@pytest.mark.parametrize(
    ("messages", "answered"),
    [
        ([called(("", "f"), ("", "g")), empty(), empty()], ["f", "g"]),
        ([called(("", "f"), ("", "g")), empty(name="g"), empty(name="f")], ["g", "f"]),
        ([called(("", "f"), ("", "g")), empty(name="x"), empty()], ["f", "g"]),
        ([called(("", "f")), called(("", "g")), empty(), empty()], ["f", "g"]),
        # The user interrupted f: the next result answers the next round.
        ([called(("", "f")), user(), called(("", "g")), empty()], ["g"]),
        ([called(("a", "f"), ("", "g")), result(tool_call_id="a"), empty()], ["f", "g"]),
        ([called(("", "f"), ("a", "g")), result(tool_call_id="a"), empty()], ["g", "f"]),
        ([called(("call00000", "f"), ("", "g")), empty(name="g"), empty()], ["g", "f"]),
        ([called(("", "f")), empty(), empty()], ["f", None]),
        ([called(("a", "f"), ("a", "g")), empty()], ["g"]),  # the name of the last call with the id
    ],
)
def test_calls_with_empty_ids_get_ids(messages: Any, answered: list[str | None]) -> None:
    checked = check_messages([user(), *messages])
    calls = {call.id: call.name for message in checked for call in message.calls}
    results = [message for message in checked if message.role == "tool"]
    assert all(calls)
    assert all(message.tool_call_id for message in results)
    assert [calls.get(message.tool_call_id or "") for message in results] == answered


def test_many_calls_without_ids_are_paired_in_order() -> None:
    count = 9000
    calls = [called(("", f"f{at}")) for at in range(count // 2)]
    checked = check_messages([*calls, *(empty(name="x") for _ in range(count // 2))])
    ids = [call.id for message in checked for call in message.calls]
    assert [message.tool_call_id for message in checked if message.role == "tool"] == ids


def test_a_kind_of_part_that_is_not_supported_is_named() -> None:
    with pytest.raises(InvalidRequest, match="parts of type image_url are not supported"):
        check_messages([user([{"type": "text", "text": "a"}, {"type": "image_url"}])])


def test_parts_keep_their_kinds() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    (message,) = check_messages([assistant(content=parts)])
    assert message.content == (TextPart("a"), TextPart("b"))
    assert message.text() == "a\nb"
    (made,) = check_messages([assistant(tool_calls=[CALL])])
    assert made == ChatMessage(
        role="assistant", calls=(CallMade(id="call_1", name="f", arguments='{"a": "x", "b": [1]}'),)
    )


def test_parts_of_the_responses_api() -> None:
    """Some clients send parts of one API to the other."""
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b", "annotations": []}]
    assert check_messages([user(parts)])[0].content == (TextPart("a"), TextPart("b"))
    picture = {"type": "input_image", "image_url": "data:,", "detail": "low"}
    (made,) = check_messages([user([picture])], Shows(1))[0].content
    assert isinstance(made, ImagePart)
    assert (made.source, made.detail) == ("data:,", "low")
    for wrong in ({"type": "input_image", "file_id": "x"}, {"type": "input_image"}):
        with pytest.raises(InvalidRequest, match=r"image_url|file_id"):
            check_messages([user([wrong])], Shows(1))


def test_a_refusal_is_what_the_assistant_said() -> None:
    (message,) = check_messages([assistant(refusal="no")])
    assert message.text() == "no"


def test_deep_arguments_are_no_object() -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = {"a": deep}
    assert too_deep(deep, 64)
    call = CallMade(id="c", name="f", arguments=json.dumps(deep))
    assert call.values() is None
    assert CallMade(id="c", name="f", arguments="[" * 100_000).values() is None


@pytest.mark.parametrize(
    ("kwargs", "inside"),
    [(None, False), ({"enable_thinking": False}, False), ({"enable_thinking": True}, False)],
)
def test_a_model_that_opens_its_reasoning_itself(tmp_path: Path, kwargs: Any, inside: bool) -> None:
    write_tokenizer(tmp_path, added=("<think>", "</think>"), template=HERMES)
    assert TextModel.load(tmp_path).chat.encode([user()], kwargs=kwargs).in_reasoning is inside


def test_a_prompt_that_ends_inside_a_reasoning(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, added=("<think>", "</think>"), template=CODER)
    chat = TextModel.load(tmp_path).chat
    assert chat.encode([user()]).in_reasoning
    assert not chat.encode([user("<think>")], add_generation_prompt=False).in_reasoning
    begun = [user(), {"role": "assistant", "content": "<think>\nSo far"}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert chat.encode(begun, **options).in_reasoning
    ended = [user(), {"role": "assistant", "content": "<think>\nSo far</think>So"}]
    assert not chat.encode(ended, **options).in_reasoning
    assert not TextModel.load(tmp_path, None, "auto", "none").chat.encode([user()]).in_reasoning


def test_a_reasoning_that_nothing_opens_is_implied(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    chat = TextModel.load(tmp_path, None, "none", "deepseek_r1").chat
    assert chat.encode([user()]).in_reasoning
    closing = tmp_path / "closing.jinja"
    closing.write_text("{% for m in messages %}{{ m.content }}{% endfor %}<think>\n\n</think>\n\n")
    assert not TextModel.load(tmp_path, closing, "none", "deepseek_r1").chat.encode([user()]).in_reasoning


def test_default_variables_of_templates(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=HERMES)
    chat = TextModel.load(tmp_path, default_chat_template_kwargs={"enable_thinking": False}).chat
    assert chat.encode([user()]).text.endswith("</think>\n\n")
    assert chat.encode([user()], kwargs={"enable_thinking": True}).text.endswith("assistant\n")
