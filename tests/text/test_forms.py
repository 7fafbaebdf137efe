"""Unspecified parts of a conversation take the form that the chat template reads, found by rendering
probes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.text_folders import write_tokenizer
from weft.common.errors import InvalidRequest
from weft.text.forms import TemplateForm, find_form
from weft.text.model import TextModel
from weft.text.parsing.parser import Tool
from weft.text.template import ChatTemplate

SHOW = (
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
)
FAILS_ON_NULL = "{% for m in messages %}<{{ m.role }}>{{ m.content + '' }}" + SHOW + "{% endfor %}"
WRITES_NONE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + SHOW + "{% endfor %}"
ASKS_FOR_FIELD = (
    "{% for m in messages %}<{{ m.role }}>{% if 'content' in m %}{{ m.content + '' }}{% else %}"
    + SHOW
    + "{% endif %}{% endfor %}"
)
NULL_MEANS_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is none %}{% for c in m.tool_calls %}"
    "[{{ c.function.name + ' ' + c.function.arguments }}]{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('only one') }}{% endif %}{% endif %}<{{ m.role }}>{{ m.content or '' }}"
    + SHOW
    + "{% endfor %}"
)
FIRST_CALL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% if m.tool_calls %}"
    "[{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}]"
    "{% endif %}{% endfor %}"
)
NAMED_RESULTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'tool' %}{{ m.name + ':' }}{% endif %}"
    "{{ m.content or '' }}" + SHOW + "{% endfor %}"
)
NEEDS_ALL = (
    "{% for t in tools or [] %}{{ t.function.name + ' ' + t.function.description }}"
    "{{ t.function.parameters.properties | length }};{% endfor %}"
    "{% for m in messages %}{{ m.content or '' }}" + SHOW + "{% endfor %}"
)


def model(folder: Path, template: str, special: Sequence[str] = (), **files: Any) -> TextModel:
    write_tokenizer(folder, special=tuple(special))
    (folder / "chat_template.jinja").write_text(template)
    return TextModel.load(folder)


def call(name: str = "f", arguments: str = '{"a": 1}', ident: str = "c1") -> dict[str, Any]:
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}


USER = {"role": "user", "content": "u"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "r"}


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (FAILS_ON_NULL, '<user>u<assistant>[f {"a": 1}]<tool>r'),
        (WRITES_NONE, '<user>u<assistant>[f {"a": 1}]<tool>r'),
        (ASKS_FOR_FIELD, '<user>u<assistant>[f {"a": 1}]<tool>r'),
        (NULL_MEANS_CALLS, '<user>u<assistant>[f {"a": 1}]<tool>r'),
        (ONE_CALL, '<user>u<assistant>[f {"a": 1}]<tool>r'),
        (NAMED_RESULTS, '<user>u<assistant>[f {"a": 1}]<tool>f:r'),
    ],
)
def test_calls_without_content_are_shown(tmp_path: Path, template: str, wanted: str) -> None:
    chat = model(tmp_path, template).chat
    for content in ({"content": None}, {}, {"content": ""}):
        turn = {"role": "assistant", **content, "tool_calls": [call()]}
        assert chat.encode([USER, turn, RESULT]).text == wanted


@pytest.mark.parametrize("template", [ONE_CALL, FIRST_CALL])
def test_several_calls_become_messages_of_their_own_where_a_template_shows_one(
    tmp_path: Path, template: str
) -> None:
    chat = model(tmp_path, template).chat
    turn = {"role": "assistant", "content": "t", "tool_calls": [call(), call("g", "{}", "c2")]}
    second = {"role": "tool", "tool_call_id": "c2", "content": "s"}
    wanted = '<user>u<assistant>t[f {"a": 1}]<tool>r<assistant>[g {}]<tool>s<user>u'
    for results in ([RESULT, second], [second, RESULT]):
        assert chat.encode([USER, turn, *results, USER]).text == wanted
    assert chat.encode([USER, turn]).text == '<user>u<assistant>t[f {"a": 1}]<assistant>[g {}]'
    assert chat.one_call
    apart = [{**turn, "tool_calls": [one]} for one in turn["tool_calls"]]
    wanted = '<user>u<assistant>t[f {"a": 1}]<tool>r<assistant>t[g {}]<tool>s'
    assert chat.encode([USER, *apart, second, RESULT]).text == wanted, "calls of adjacent messages"


def test_results_of_equal_ids_keep_their_order_beside_single_calls(tmp_path: Path) -> None:
    chat = model(tmp_path, FIRST_CALL).chat
    results = [{**RESULT, "content": text} for text in ("r", "s", "t")]
    stray = {**RESULT, "tool_call_id": "x", "content": "stray"}
    turn = {"role": "assistant", "content": None, "tool_calls": [call("f"), call("g")]}
    made = chat.encode([USER, turn, stray, *results]).text
    wanted = '<user>u<assistant>[f {"a": 1}]<tool>r<assistant>[g {"a": 1}]<tool>s<tool>t<tool>stray'
    assert made == wanted
    assert chat.encode([USER, stray, *results]).text == "<user>u<tool>stray<tool>r<tool>s<tool>t"


def test_fields_of_tools_that_are_left_out_are_there_where_a_template_needs_them(tmp_path: Path) -> None:
    chat = model(tmp_path, NEEDS_ALL).chat
    full = Tool(name="h", description="d", parameters={"type": "object", "properties": {"a": {}}})
    assert chat.encode([USER], tools=[Tool(name="f"), full]).text == "f 0;h d1;u"
    plain = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    other = model(tmp_path, plain).chat
    assert other.encode([USER], tools=[Tool(name="f")]).text.startswith(
        '[{"type": "function", "function": {"name": "f"}}]'
    )


def test_a_template_that_cannot_show_calls_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refuses = (
        "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no calls here') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    with caplog.at_level(logging.WARNING):
        chat = model(tmp_path, refuses).chat
    assert "does not render the tool calls" in caplog.text
    assert "no calls here" in caplog.text
    with pytest.raises(InvalidRequest, match="no calls here"):
        chat.encode([USER, {"role": "assistant", "content": None, "tool_calls": [call()]}, RESULT])


TAKES_LISTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}"
)
USER_LISTS = (
    "{% macro shown(content) %}{% if content is string %}{{ content }}{% else %}{% for p in content %}"
    "({{ p.text }}){% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}<{{ m.role }}>{{ shown(m.content) if m.role == 'user' else m.content + '' }}"
    "{% endfor %}"
)
MAPS = "{% for m in messages %}<{{ m.role }}>{{ m.content | map(attribute='text') | join('+') }}{% endfor %}"
STRINGS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (TAKES_LISTS, "<user>(a)(b)<assistant>(a)(b)<user>u"),
        (USER_LISTS, "<user>(a)(b)<assistant>a\nb<user>u"),
        (MAPS, "<user>a+b<assistant>a+b<user>u"),
        (STRINGS, "<user>a\nb<assistant>a\nb<user>u"),
    ],
)
def test_text_parts_stay_a_list_where_the_template_takes_one(
    tmp_path: Path, template: str, wanted: str
) -> None:
    messages = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": PARTS}, USER]
    assert model(tmp_path, template).chat.encode(messages).text == wanted


SPECIAL = ("<|object_ref_start|>", "<|python_tag|>")


@pytest.mark.parametrize(
    "asked",
    [
        "t.parameters.type == 'object'",
        "t.parameters.type in ['object', 'array']",
        "t.parameters['type'] | upper == 'OBJECT'",
        "t.parameters.type.lower() == 'object'",
        "t.parameters.type | trim == 'object'",
        "t.parameters.type.startswith('obj')",
        "'bject' in t.parameters.type",
        "t.parameters.type[:3] == 'obj'",
        "{'object': 1}[t.parameters.type] == 1",
        "t.parameters.properties.start.type == 'string'",
        "t.name == 'python'",
        "([t] | selectattr('name', 'equalto', 'python') | list | length) == 1",
        "messages[0].content == 'start'",
    ],
)
def test_comparisons_see_the_plain_word(tmp_path: Path, asked: str) -> None:
    """Comparisons in a template work even if the word is a part of a special token."""
    template = (
        "{% set t = tools[0].function if tools else none %}{{ messages[0].content }}"
        "{% if t and (" + asked + ") %}|yes{% endif %}"
    )
    schema = {"type": "object", "properties": {"start": {"type": "string"}}}
    chat = model(tmp_path, template, SPECIAL).chat
    made = chat.encode([{"role": "user", "content": "start"}], tools=[Tool(name="python", parameters=schema)])
    assert made.text == "start|yes"


@pytest.mark.parametrize(
    "written",
    [
        "{{ '<|' + w + '|>' }}",
        "{{ '<|' ~ w ~ '|>' }}",
        "{{ '<|%s|>' % w }}",
        "{{ '<|{}|>'.format(w) }}",
        "{{ ['<|', w, '|>'] | join }}",
        "{{ ''.join(['<|', w, '|>']) }}",
        "{{ '<|x|>'.replace('x', w) }}",
        "{{ '<|x|>' | replace('x', w) }}",
        "{{ '<|' + w | trim + '|>' }}",
        "{{ '<|' + w | lower + '|>' }}",
        "{{ '<|' + w.strip() + '|>' }}",
        "{{ '<|' + w[0:] + '|>' }}",
        "{{ '<|' + w.split('!')[0] + '|>' }}",
        "{{ '<|' + (w | string) + '|>' }}",
        "{{ '<|' ~ (w | safe) ~ '|>' }}",
        "{{ '<|' ~ (w | escape) ~ '|>' }}",
        "{{ '<|' + (w | title | lower) + '|>' }}",
        "{{ '<|' + (w | replace('!', '')) + '|>' }}",
        "{{ '<|' }}{{ w }}{{ '|>' }}",
        "<|{% for c in w %}{{ c }}{% endfor %}|>",
        "{% set x %}{{ w }}{% endset %}{{ '<|' + x + '|>' }}",
        "{% macro f(x) %}<|{{ x }}|>{% endmacro %}{{ f(w) }}",
        "{{ '<|' + (w | tojson)[1:-1] + '|>' }}",
        "{{ '<|' + (w | list | join) + '|>' }}",
        "{{ '<|' + (w * 1) + '|>' }}",
        "{{ '<|' + (w.center(1)) + '|>' }}",
    ],
)
def test_a_word_never_makes_a_special_token(tmp_path: Path, written: str) -> None:
    loaded = model(tmp_path, "{% set w = messages[0].content %}" + written)
    made = loaded.chat.encode([{"role": "user", "content": "im_start"}])
    assert made.text == "<|im_start|>"
    assert loaded.tokenizer.special["<|im_start|>"] not in made.ids


CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
    "{% if m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif loop.last and not add_generation_prompt %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
ROLES_ALONE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}"
)


def ends(loaded: TextModel) -> set[str]:
    return {text for text, number in loaded.tokenizer.added.items() if number in loaded.end_ids}


def test_a_mark_that_closes_a_message_ends_no_turn(tmp_path: Path) -> None:
    """The mark ends no turn for any parser, because the answer follows the reasoning message."""
    assert {"<|call|>", "<|return|>"} <= ends(model(tmp_path, CHANNELS, MARKS))
    assert "<|end|>" not in ends(model(tmp_path, CHANNELS, MARKS))
    assert "<|end|>" not in ends(TextModel.load(tmp_path, None, "none", "none"))


def test_marks_behind_calls_end_turns(tmp_path: Path) -> None:
    special = ("<|user|>", "<|assistant|>", "<|tool|>", "<tool_call>", "</tool_call>")
    found = ends(model(tmp_path, ROLES_ALONE, special))
    assert {"<|user|>", "<|tool|>"} <= found
    assert not {"<tool_call>", "</tool_call>", "<|assistant|>"} & found


def test_llamas_tokens_choose_llamas_calls(tmp_path: Path) -> None:
    """The template shows neither tags nor tokens of calls."""
    loaded = model(tmp_path, "{{ tools }}" + STRINGS, ("<|python_tag|>", "<|eom_id|>"))
    assert loaded.output.declared is not None
    assert loaded.output.declared.name == "llama3_json"


def test_probing_is_bounded() -> None:
    slow = "{% for i in range(60000) %}{% for j in range(60000) %}{% endfor %}{% endfor %}{{ tool_calls }}"
    assert find_form(ChatTemplate("{{ messages[0].nothing.at.all }}"), {}).problem
    form = find_form(ChatTemplate(slow), {}, seconds=0.2)
    assert form.problem
    assert form.texts == TemplateForm().texts
