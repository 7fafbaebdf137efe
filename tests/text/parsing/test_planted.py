"""Outputs that other parsers lose or misread, each in a test."""

from __future__ import annotations

import pytest

from tests.text.parsing.checks import read
from tests.text.parsing.families import FAMILIES, SPEC, TOOLS, joined
from weft.text.parsing.declaration import (
    BLANK,
    NAME,
    Call,
    JsonArguments,
    OutputFormat,
    ReasoningMarks,
    check_format,
    combined,
)
from weft.text.parsing.events import CallArguments, CallBegin, CallEnd, Content, OutputEvent, Reasoning
from weft.text.parsing.formats import CALLS, REASONING
from weft.text.parsing.parser import OutputSpec
from weft.text.parsing.parsing_engine import OutputEngine

HERMES = FAMILIES["hermes"].declared


def call(number: int, name: str, arguments: str, *, whole: bool = True) -> list[OutputEvent]:
    made: list[OutputEvent] = [CallBegin(call=number, name=name)]
    if arguments:
        made.append(CallArguments(call=number, text=arguments))
    return [*made, CallEnd(call=number)] if whole else made


def hermes(text: str, spec: OutputSpec = SPEC) -> list[OutputEvent]:
    events = read(HERMES, spec, [text])
    assert read(HERMES, spec, list(text)) == events
    return events


@pytest.mark.requirement("G2")
@pytest.mark.parametrize(
    "text",
    [
        "Write <tool_call> before and </tool_call> behind it.",
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "argum',
        "<tool_call>\nget_weather(city='x')\n</tool_call>",
        '<tool_call>{"name": "get_weather", "arguments": "city"}</tool_call>',
        '<tool_call>{"name": ["get_weather"], "arguments": {}}</tool_call>',
        '<tool_call>__import__("os").system("id")</tool_call>',
        'Like {"name": "get_weather", "arguments": {"city": "x"}}',
        "the </think> tag",
        "in `<think>` tags",
        "<tool_call>" * 3,
        "<",
        "\n\n",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert hermes(text) == [Content(text)]


def test_a_closing_tag_inside_of_an_argument() -> None:
    arguments = '{"city": "</tool_call> <tool_call>{\\"name\\": 1}"}'
    text = '<tool_call>{"name": "get_weather", "arguments": ' + arguments + "}</tool_call>"
    assert hermes(text) == call(0, "get_weather", arguments)


def test_text_between_before_and_behind_calls_is_kept_in_order() -> None:
    one = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    assert hermes(f"a\n{one}\nb {one}{one}c") == [
        Content("a"),
        *call(0, "get", "{}"),
        Content("\nb"),
        *call(1, "get", "{}"),
        *call(2, "get", "{}"),
        Content("c"),
    ]


@pytest.mark.requirement("G1")
def test_a_call_inside_of_a_reasoning_and_a_reasoning_behind_content() -> None:
    one = '<tool_call>{"name": "get", "arguments": {"days": 1}}</tool_call>'
    assert hermes(f"<think>a {one} b</think>c\n<think>d</think>e") == [
        Reasoning("a"),
        *call(0, "get", '{"days": 1}'),
        Reasoning(" b"),
        Content("c"),
        Reasoning("d"),
        Content("e"),
    ]


@pytest.mark.requirement("G2")
def test_arguments_that_break_stay_and_the_rest_is_text() -> None:
    text = '<tool_call>{"name": "get", "arguments": {"city": "x", oops}}</tool_call> and so on'
    assert hermes(text) == [
        *call(0, "get", '{"city": "x", ', whole=False),
        Content("oops}}</tool_call> and so on"),
    ]
    cut = '<tool_call>{"name": "get", "arguments": {"city": "Zür'
    assert hermes(cut) == call(0, "get", '{"city": "Zür', whole=False)


def test_a_call_behind_a_broken_one_is_found() -> None:
    one = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    assert hermes(f'<tool_call>{{"nam{one}') == [Content('<tool_call>{"nam'), *call(0, "get", "{}")]
    broken = '<tool_call>{"name": "get", "arguments": {"city": }'
    assert hermes(broken + one) == [
        *call(0, "get", '{"city": ', whole=False),
        Content("}"),
        *call(1, "get", "{}"),
    ]


def test_arguments_before_the_name_and_none_at_all() -> None:
    text = '<tool_call>{"arguments": {"days": 2}, "name": "get"}</tool_call>'
    assert hermes(text) == call(0, "get", '{"days": 2}')
    assert hermes('<tool_call>{"name": "get"}</tool_call>') == call(0, "get", "{}")
    assert hermes('<tool_call>{"name": "get", "arguments": null}</tool_call>') == call(0, "get", "{}")


def test_a_missing_brace_costs_nothing_but_itself() -> None:
    text = '<tool_call>{"name": "get", "arguments": {"days": 2}</tool_call>'
    assert hermes(text) == call(0, "get", '{"days": 2}')


def test_a_call_is_whole_when_its_arguments_are() -> None:
    """An end-of-turn token gives no text, so a call is complete without the closing mark."""
    assert hermes('<tool_call>{"name": "get", "arguments": {}') == call(0, "get", "{}")


def test_further_calls_are_text_where_only_one_may_come() -> None:
    one = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    spec = OutputSpec(tools=TOOLS, tool_calls=True, reasoning=True, parallel=False)
    assert hermes(one + "\n" + one, spec) == [*call(0, "get", "{}"), Content("\n" + one)]


def test_calls_are_text_where_none_are_looked_for() -> None:
    one = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    assert hermes(one, OutputSpec(tools=TOOLS, reasoning=True)) == [Content(one)]
    reasoning = OutputSpec(tools=TOOLS, tool_calls=True)
    assert hermes("<think>a</think>" + one, reasoning) == [Content("<think>a</think>"), *call(0, "get", "{}")]


def test_a_reasoning_that_the_prompt_opened() -> None:
    spec = OutputSpec(reasoning=True, in_reasoning=True)
    assert hermes("\na\n</think>\n\nb", spec) == [Reasoning("a"), Content("b")]
    assert hermes("<think>\na</think>b", spec) == [Reasoning("a"), Content("b")]
    assert hermes("a <think> b", spec) == [Reasoning("a <think> b")]


def test_the_name_is_given_before_its_arguments_have_come() -> None:
    engine = OutputEngine(HERMES, SPEC)
    assert engine.feed('Hm <tool_call>\n{"name": "get", "arguments": ') == [Content("Hm")]
    assert engine.feed('{"city') == [CallBegin(call=0, name="get"), CallArguments(call=0, text='{"city')]
    assert engine.feed('": "a') == [CallArguments(call=0, text='": "a')]


def test_only_what_may_become_markup_is_held_back() -> None:
    engine = OutputEngine(HERMES, SPEC)
    assert engine.feed("if a <") == [Content("if a")]
    assert engine.feed(" b") == [Content(" < b")]
    assert engine.feed(" <tool_") == []
    assert engine.feed("box>") == [Content(" <tool_box>")]
    assert engine.close() == []


def test_a_string_argument_in_tags_streams() -> None:
    engine = OutputEngine(FAMILIES["qwen3_coder"].declared, SPEC)
    engine.feed("<tool_call>\n<function=get>\n<parameter=city>\n")
    assert engine.feed("Zü") == [CallArguments(call=0, text="Zü")]
    assert engine.feed("rich\n</para") == [CallArguments(call=0, text="rich")]
    assert engine.feed("sol") == [CallArguments(call=0, text="\\n</parasol")]


@pytest.mark.parametrize(
    ("types", "raw", "value"),
    [
        ("integer", "12", "12"),
        ("integer", "12.0", "12"),
        ("integer", "123456789012345678901234567890", "123456789012345678901234567890"),
        ("integer", "twelve", '"twelve"'),
        ("number", "1e-3", "1e-3"),
        ("number", "NaN", '"NaN"'),
        ("boolean", "True", "true"),
        (["string", "null"], "null", "null"),
        (["string", "integer"], "7", '"7"'),
        (["integer", "string"], "7", "7"),
        ("array", "['a', None]", '["a", null]'),
        ("object", '{"a": [1]}', '{"a": [1]}'),
        ("object", "__import__('os')", "\"__import__('os')\""),
        (None, "[1, 2]", "[1, 2]"),
        (None, "text", '"text"'),
    ],
)
def test_values_in_tags_become_json_by_their_schema(types: object, raw: str, value: str) -> None:
    schema = {} if types is None else {"type": types}
    tool = type(TOOLS[0])(name="f", parameters={"type": "object", "properties": {"a": schema}})
    spec = OutputSpec(tools=(tool,), tool_calls=True)
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{raw}\n</parameter>\n</function>\n</tool_call>"
    declared = FAMILIES["qwen3_coder"].declared
    assert read(declared, spec, [text]) == call(0, "f", f'{{"a": {value}}}')
    assert read(declared, spec, list(text)) == call(0, "f", f'{{"a": {value}}}')


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("get(city='it\\'s', days=-1)", '{"city": "it\'s", "days": -1}'),
        ('get(city="""a\n"b\\"""", tags=(1, 2.),)', '{"city": "a\\n\\"b\\"", "tags": [1, 2.0]}'),
        ("get(area={'a': {1: True}, \"b\": []})", '{"area": {"a": {"1": true}, "b": []}}'),
        ("get(city='\\x41\\u00e9\\q', days=0x10)", '{"city": "A\\u00e9\\\\q", "days": 16}'),
        ("get( city = 'a' , days = 1_000 )", '{"city": "a", "days": 1000}'),
    ],
)
def test_values_as_python_writes_them(text: str, arguments: str) -> None:
    declared = FAMILIES["pythonic"].declared
    assert read(declared, SPEC, [f"[{text}]"]) == call(0, "get", arguments)
    assert read(declared, SPEC, list(f"[{text}]")) == call(0, "get", arguments)


@pytest.mark.parametrize(
    "value", ["__import__('os')", "1+1", "lambda: 0", "f'x'", "[x for x in y]", "'a' 'b'", "get()", "{1, 2}"]
)
def test_nothing_is_evaluated(value: str) -> None:
    events = read(FAMILIES["pythonic"].declared, SPEC, [f"[get(city={value})]"])
    assert not any(isinstance(event, CallEnd) for event in events)
    assert isinstance(events[-1], Content)


def test_bare_calls_begin_a_line_and_need_arguments() -> None:
    declared = FAMILIES["llama3_json"].declared
    one = '{"name": "get", "parameters": {"days": 1}}'
    assert read(declared, SPEC, [f"Sure.\n\n{one}"]) == [Content("Sure."), *call(0, "get", '{"days": 1}')]
    for text in (f"Like {one}", '{"name": "get"}', '{"name": "get", "age": 3}', '{"a": 1}', "{"):
        assert read(declared, SPEC, [text]) == [Content(text)]


def test_a_bare_call_beside_tags_is_none_where_a_grammar_holds_calls() -> None:
    """A grammar constrains calls in tags only, so an object without tags stays content."""
    one = '{"name": "get", "arguments": {"days": 1}}'
    assert hermes(one) == call(0, "get", '{"days": 1}')
    strict = tuple(type(tool)(name=tool.name, strict=True) for tool in TOOLS)
    spec = OutputSpec(tools=strict, tool_calls=True)
    assert hermes(one, spec) == [Content(one)]
    assert hermes(f"<tool_call>{one}</tool_call>", spec) == call(0, "get", '{"days": 1}')


def test_a_call_in_a_block_of_code_is_an_example() -> None:
    one = '{"name": "get", "parameters": {"days": 1}}'
    declared = FAMILIES["llama3_json"].declared
    for text in (f"```json\n{one}\n```", f"So:\n\n  ```\n\n{one}\n```\nDone."):
        assert read(declared, SPEC, [text]) == [Content(text)]
        assert read(declared, SPEC, list(text)) == [Content(text)]
    text = f"```\nx\n```\n{one}"
    assert read(declared, SPEC, list(text)) == [Content("```\nx\n```"), *call(0, "get", '{"days": 1}')]
    text = "```\n<think>\n```\n<think>a</think>b"
    assert hermes(text) == [Content("```\n<think>\n```"), Reasoning("a"), Content("b")]


def test_a_prompt_that_ended_inside_of_a_channel() -> None:
    text = "hm<|end|>?<|start|>assistant<|channel|>final<|message|>yes"
    spec = OutputSpec(tools=TOOLS, tool_calls=True, reasoning=True, in_reasoning=True)
    declared = FAMILIES["gpt_oss"].declared
    assert read(declared, spec, [text]) == [Reasoning("hm"), Content("?yes")]
    assert read(declared, spec, list(text)) == [Reasoning("hm"), Content("?yes")]


def test_no_trigger_is_a_prefix_of_another() -> None:
    for thinking in (None, *REASONING.values()):
        for calling in (None, *CALLS.values()):
            if thinking is not REASONING["mistral"] or calling not in (CALLS["pythonic"], CALLS["llama4"]):
                combined(thinking, calling)
    with pytest.raises(ValueError, match="is a prefix of"):
        combined(REASONING["mistral"], CALLS["pythonic"])
    head = ("<tool", BLANK, NAME)
    with pytest.raises(ValueError, match="is a prefix of"):
        check_format(
            OutputFormat(name="x", calls=(*HERMES.calls, Call(head=head, arguments=JsonArguments())))
        )
    with pytest.raises(ValueError, match="is empty"):
        check_format(OutputFormat(name="x", calls=(Call(head=(NAME,), arguments=JsonArguments()),)))
    with pytest.raises(ValueError, match="is a prefix of"):
        check_format(
            OutputFormat(
                name="x",
                reasoning=(ReasoningMarks(open="<a", close="b"), ReasoningMarks(open="<a", close="c")),
            )
        )


def test_channels_that_are_broken_are_text() -> None:
    declared = FAMILIES["gpt_oss"].declared
    for text in (
        "plain text",
        "<|channel|>analysis",
        "<|channel|>We look it up, and then <|channel|>",
        "<|channel|>final a b c d<|message|>x",
        '<|channel|>commentary to=functions.unknown <|constrain|>json<|message|>{"a": 1}',
        "<|start|>user<|message|>x",
    ):
        assert read(declared, SPEC, [text]) == [Content(text)]
        assert read(declared, SPEC, list(text)) == [Content(text)]
        assert read(declared, SPEC, [text + "<|end|>"]) == [Content(text)], "an end is always markup"


HEADERS = {
    "<|channel|>final <|constrain|>response<|message|>": "content",
    "<|channel|>final<|constrain|>json_schema<|message|>": "content",
    "<|channel|>final json<|message|>": "content",
    "<|channel|>secret<|message|>": "content",
    "<|channel|><|message|>": "content",
    "<|channel|> final <|message|>": "content",
    "<|channel|>finaljson<|message|>": "content",
    "<|channel|>commentary to=assistant<|message|>": "content",
    "<|channel|>analysis<|channel|>final<|message|>": "content",
    "<|channel|>final<|channel|>final<|message|>": "content",
    "<|channel|>analysis<|message|><|channel|>final<|message|>": "content",
    "<|start|>assistant<|channel|>final<|message|>": "content",
    "<|start|>assistant<|start|>assistant<|channel|>final<|message|>": "content",
    "<|start|>assistant<|message|>": "content",
    "<|message|>": "content",
    "": "content",
    "<|channel|>analysis code<|message|>": "thought",
    "<|channel|>final<|channel|>analysis<|message|>": "thought",
}


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("before", ["", "<|channel|>analysis<|message|>Hm.<|end|>"])
def test_a_header_with_unknown_words_is_a_header(header: str, before: str) -> None:
    """A header is never content: not when repeated, without a channel, or with undeclared words."""
    declared = FAMILIES["gpt_oss"].declared
    text = before + header + "Hello there.<|return|>"
    said = Content("Hello there.") if HEADERS[header] == "content" else Reasoning("Hello there.")
    wanted = joined([*([Reasoning("Hm.")] if before else []), said])
    assert read(declared, SPEC, [text]) == wanted
    assert read(declared, SPEC, list(text)) == wanted


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get<|channel|>commentary <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.get <|constrain|>json_object<|message|>",
        "<|channel|>commentary to=functions.get code<|constrain|>json<|message|>",
        "<|channel|>analysis to=functions.get <|constrain|>json<|message|>",
        "<|channel|>commentary <|constrain|>json to=functions.get<|message|>",
        "<|channel|>tool to=functions.get<|message|>",
        "<|start|>assistant to=functions.get<|message|>",
        "to=functions.get<|message|>",
    ],
)
def test_a_calls_header_with_unknown_words_is_a_header(header: str) -> None:
    text = header + '{"days": 1}<|call|>'
    for pieces in ([text], list(text)):
        assert read(FAMILIES["gpt_oss"].declared, SPEC, pieces) == call(0, "get", '{"days": 1}')


def test_a_recipient_before_the_channel() -> None:
    text = ' to=functions.get<|channel|>commentary <|constrain|>json<|message|>{"days": 1}'
    assert read(FAMILIES["gpt_oss"].declared, SPEC, [text]) == call(0, "get", '{"days": 1}')
