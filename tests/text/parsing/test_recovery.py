"""Errors of real models, by the kinds of docs/outputs.md under "Recovery": repaired, or returned as text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.slow import mostly_slow
from tests.text.parsing.checks import check_output, read
from tests.text.parsing.families import FAMILIES, SPEC, Call, Calls, by_value
from tests.text.parsing.outputs import Maker
from weft.text.parsing.events import CallArguments, CallBegin, CallEnd, Content, OutputEvent

CITY = {"city": "Oslo"}
BOTH = {"city": "Oslo", "days": 3}
QUOTED = {**BOTH, "note": 'ä "b" \\ 😀'}
CHANNEL = "<|channel|>commentary to=functions.get <|constrain|>json<|message|>"
CODER_HEAD = "<tool_call>\n<function=get>\n"
CODER_TAIL = "\n</function>\n</tool_call>"
DSML_HEAD = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get">\n'
DSML_TAIL = "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
DSML_CITY = '<｜DSML｜parameter name="city" string="true">Oslo'
DSML_DAYS = '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
KIMI_ARGUMENTS = '<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'


def coder(parameters: str, tail: str = CODER_TAIL) -> str:
    return CODER_HEAD + parameters + tail


def hermes(arguments: str, name: str = '"name": "get"') -> str:
    return f'<tool_call>\n{{{name}, "arguments": {arguments}}}\n</tool_call>'


def kimi(ident: str) -> str:
    return f"<|tool_calls_section_begin|><|tool_call_begin|>{ident}{KIMI_ARGUMENTS}<|tool_calls_section_end|>"


MENDED: list[tuple[str, str, Any]] = [
    # a closing tag is missing or misspelled
    ("qwen3_coder", coder("<parameter=city>\nOslo"), CITY),
    ("qwen3_coder", coder("<parameter=city>Oslo", "</function></tool_call>"), CITY),
    ("qwen3_coder", coder("<parameter=city>\nOslo", "\n</function>"), CITY),
    ("qwen3_coder", coder("<parameter=city>\nOslo", "\n</tool_call>"), CITY),
    ("qwen3_coder", coder("<parameter=city>\nOslo\n<parameter=days>\n3\n</parameter>"), BOTH),
    ("qwen3_coder", coder("<parameter=city>\nOslo\n<parameter=days>\n3"), BOTH),
    ("qwen3_coder", coder("<parameter=days>\n3\n<parameter=city>\nOslo\n</parameter>"), BOTH),
    ("qwen3_coder", coder("<parameter=city>\nOslo\n</parameter>", ""), CITY),
    ("qwen3_coder", coder("<parameter=city>\nOslo\n</parameter>", "\n"), CITY),
    ("qwen3_coder", coder("<parameter=city>\nOslo\n</parameter>", "\n</tool_call>"), CITY),
    ("qwen3_coder", coder("<parameter=city>\nOslo\n</parameter/>"), CITY),
    ("qwen3_coder", coder("<parameter=city>\nOslo\n<parameter/>"), CITY),
    ("qwen3_coder", coder("<parameter=city>\nOslo\n</param>"), CITY),
    ("qwen3_coder", coder("<parameter=city>\nOslo\n</parameters>"), CITY),
    ("qwen3_coder", coder("<parameter=city>\nOslo\n</city>"), CITY),
    ("qwen3_coder", coder("<parameter=city>\nOslo\n</parameter=city>\n<parameter=days>3</parameter>"), BOTH),
    ("qwen3_coder", coder("", "</tool_call>"), {}),
    ("qwen3_coder", '<tool_call>\n<function="get">\n<parameter=city>\nOslo\n</parameter>' + CODER_TAIL, CITY),
    ("glm45", "<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>Oslo\n</tool_call>", CITY),
    ("glm45", "<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>", CITY),
    (
        "glm45",
        "<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>Oslo\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        BOTH,
    ),
    ("deepseek_v32", DSML_HEAD + DSML_CITY + "\n" + DSML_TAIL, CITY),
    ("deepseek_v32", DSML_HEAD + DSML_CITY + "\n" + DSML_DAYS + DSML_TAIL, BOTH),
    ("deepseek_v32", DSML_HEAD + DSML_CITY + "</｜DSML｜parameter>\n", CITY),
    ("deepseek_v32", DSML_HEAD + DSML_CITY + "</parameter>\n" + DSML_TAIL, CITY),
    (
        "deepseek_v32",
        DSML_HEAD + '<｜DSML｜parameter name="days">3</｜DSML｜parameter>\n' + DSML_TAIL,
        {"days": 3},
    ),
    (
        "deepseek_v32",
        DSML_HEAD + '<｜DSML｜parameter name="city">Oslo</｜DSML｜parameter>\n' + DSML_TAIL,
        CITY,
    ),
    # slips of JSON
    ("hermes", hermes('{"city": "a\nb\tc\x07"}'), {"city": "a\nb\tc\x07"}),
    ("hermes", hermes('{"city": "Oslo",}'), CITY),
    ("hermes", hermes('{"tags": ["a", ], "city": "Oslo" , }'), {"tags": ["a"], "city": "Oslo"}),
    ("hermes", '<tool_call>\n{"name": "get", "arguments": {\n</tool_call>', {}),
    ("hermes", '<tool_call>\n{"name": "get", "arguments": {"tags": [\n</tool_call>', {"tags": []}),
    ("hermes", hermes('{{"city": "Oslo"}}'), CITY),
    ("hermes", hermes('{{"city": "Oslo"}'), CITY),
    ("hermes", "<tool_call>\n{" + '{"name": "get", "arguments": {"city": "Oslo"}}' + "}\n</tool_call>", CITY),
    ("hermes", hermes(json.dumps(json.dumps(QUOTED))), QUOTED),
    ("hermes", hermes(json.dumps(json.dumps(QUOTED, ensure_ascii=False), ensure_ascii=False)), QUOTED),
    ("hermes", hermes('"{"city": "Oslo"}"'), CITY),
    ("hermes", hermes('""'), {}),
    ("hermes", hermes("{'city': 'Oslo'}"), CITY),
    ("hermes", "<tool_call>\n{'name': 'get', 'arguments': {'city': 'it\\'s \"x\"'}}\n</tool_call>",
     {"city": "it's \"x\""}),
    ("hermes", hermes('{"exact": True, "area": None, "tags": [False]}'),
     {"exact": True, "area": None, "tags": [False]}),
    ("hermes", hermes('{"city": "C:\\dir \\u12"}'), {"city": "C:\\dir \\u12"}),
    ("hermes", '<tool_call>\n{"name": "get", "arguments": {"city": "Oslo"\n</tool_call>', CITY),
    ("hermes", '<tool_call>\n{"name": "get", "arguments": {"city": "Oslo"', CITY),
    ("hermes", '<tool_call>\n{"name": "get", "arguments": {"city": "Oslo"},}\n</tool_call>', CITY),
    ("llama3_json", '{"name": "get", "parameters": {"city": "Oslo",}}', CITY),
    ("llama3_json", '{"name": "get", "parameters": "{\\"city\\": \\"Oslo\\"}"}', CITY),
    ("mistral", "[TOOL_CALLS]get[ARGS]{'city': 'Oslo'}", CITY),
    ("mistral", '[TOOL_CALLS]get{"city": "Oslo"', CITY),
    ("mistral_list", '[TOOL_CALLS][{"name": "get", "arguments": "{\\"city\\": \\"Oslo\\"}"}]', CITY),
    ("gpt_oss", CHANNEL + '{"city": "Oslo",}<|call|>', CITY),
    ("gpt_oss", CHANNEL + '{"city": "Oslo"<|call|>', CITY),
    ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{"city": "Oslo"', CITY),
    ("deepseek_v3", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n{"city": "Oslo"}'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", CITY),
    # ids
    ("kimi_k2", kimi("functions.get"), CITY),
    ("kimi_k2", kimi("get:0"), CITY),
    ("kimi_k2", kimi("get"), CITY),
    ("kimi_k2", kimi("functionsget5"), CITY),
    ("kimi_k2", kimi("functions_get_1"), CITY),
    ("kimi_k2", '<|tool_call_begin|>functions.get:0{"city": "Oslo"}', CITY),
    # call endings in Python's form
    ("pythonic", "[get(city='Oslo'", CITY),
    ("pythonic", "[get(city='Oslo']", CITY),
    ("olmo3", "<function_calls>\nget(city='Oslo'\n</function_calls>", CITY),
    ("olmo3", "<function_calls>get(city='Oslo')", CITY),
    ("gemma4", '<|tool_call>call:get{city:<|"|>Oslo<|"|><tool_call|>', CITY),
    ("gemma4", '<|tool_call>call:get{city:<|"|>Oslo<|"|>', CITY),
    ("gemma4", '<|tool_call>call:get{ city: "Oslo", }<tool_call|>', CITY),
    ("gemma4", '<|tool_call>call:get{"city": "Oslo", \'days\':3}<tool_call|>', BOTH),
    ("gemma4", '<|tool_call>call:get{area:{<|"|>a b<|"|>:[<|"|>x<|"|>, 1],c:None}}<tool_call|>',
     {"area": {"a b": ["x", 1], "c": None}}),
    # other spellings
    ("phi4_mini", '<|tool_call|>{"name": "get", "arguments": {"city": "Oslo",}}<|/tool_call|>', CITY),
    ("nemotron_json", "<TOOLCALL>[{'name': 'get', 'arguments': {'city': 'Oslo'}}]</TOOLCALL>", CITY),
    ("command_r", 'Action: ```json\n[{"tool_name": "get", "parameters": {"city": "Oslo"}}]\n```', CITY),
    ("solar_open", '<|tool_calls|><|tool_call:begin|><|tool_call:name|>get<|tool_call:args|>{"city": "Oslo"',
     CITY),
    ("step3", '<｜tool_calls_begin｜><｜tool_call_begin｜><｜tool_sep｜><steptml:invoke name="get">'
     '<steptml:parameter name="city">Oslo</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>', CITY),
    ("hy_v3", "<tool_calls:opensource><tool_call:opensource>get<arg_key:opensource>city"
     "</arg_key:opensource><arg_value:opensource>Oslo</arg_value:opensource></tool_call:opensource>"
     "</tool_calls:opensource>", CITY),
]  # fmt: skip
NAMES = [f"{name}-{number}" for number, (name, _, _) in enumerate(MENDED)]


def calls_of(events: list[OutputEvent]) -> list[tuple[str, Any]]:
    """(name, arguments) of each call, all of which must be whole."""
    begun = [event for event in events if isinstance(event, CallBegin)]
    ended = [event for event in events if isinstance(event, CallEnd)]
    assert len(begun) == len(ended), events
    texts = [
        "".join(one.text for one in events if isinstance(one, CallArguments) and one.call == call.call)
        for call in begun
    ]
    return [(call.name, json.loads(text)) for call, text in zip(begun, texts, strict=True)]


@pytest.mark.parametrize(("name", "text", "arguments"), MENDED, ids=NAMES)
def test_a_slip_whose_meaning_is_clear_is_mended(name: str, text: str, arguments: Any) -> None:
    declared = FAMILIES[name].declared
    events = read(declared, SPEC, [text])
    assert calls_of(events) == [("get", arguments)]
    assert not any(isinstance(event, Content) for event in events), "no markup is left over"
    assert read(declared, SPEC, list(text)) == events
    check_output(declared, SPEC, text, raw_arguments=False)


@pytest.mark.parametrize(("name", "text", "arguments"), MENDED, ids=NAMES)
def test_a_call_behind_a_mended_one_is_found(name: str, text: str, arguments: Any) -> None:
    family = FAMILIES[name]
    if name in ("gpt_oss", "pythonic", "llama3_json", "mistral_list"):
        pytest.skip("these write all calls in one list, or one call a message")
    declared = family.declared
    whole = next(part for part in FAMILIES[name].render([_one()]).split("\n\n") if part)
    events = read(declared, SPEC, [f"{text}\n{whole}"])
    assert ("get_weather", {"days": 1}) in calls_of(events)
    assert calls_of(events)[0] == ("get", arguments)
    assert read(declared, SPEC, list(f"{text}\n{whole}")) == events


def _one() -> Calls:
    return Calls((Call("get_weather", {"days": 1}),))


KEPT = [
    "Ends with </function>\n</tool_call> and goes on",
    "</parameter>",
    "a\n</parameter>\nb",
    "</function>",
    "write </function> and <tool_call> so",
    "see <parameter=days> here",
    "See:\n<parameter=days>\n3\n</parameter>\nThanks",
    "See:\n<parameter=days>\n3\n</parameter>",
    "a\n<parameter=unknown>\nb",
    "a\n<parameter=city>\nb",
    "<title>x</title>",
    "</tool_call>",
    "</param> x",
]


@pytest.mark.parametrize("value", KEPT)
def test_tags_inside_of_a_value_are_text(value: str) -> None:
    declared = FAMILIES["qwen3_coder"].declared
    text = coder(
        f"<parameter=city>\nx\n</parameter>\n<parameter=note>\n{value}\n</parameter>\n"
        "<parameter=exact>\ntrue\n</parameter>"
    )
    events = read(declared, SPEC, [text])
    assert calls_of(events) == [("get", {"city": "x", "note": value, "exact": True})]
    assert read(declared, SPEC, list(text)) == events


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", coder("<parameter>\nOslo\n</parameter>")),
        ("qwen3_coder", coder("<parameter=>\nOslo\n</parameter>")),
        ("qwen3_coder", coder("<parameter=\nOslo\n</parameter>")),
        ("qwen3_coder", coder("<parameter=city: Oslo\n</parameter>")),
        ("deepseek_v32", DSML_HEAD + '<parameter name="city">Oslo</｜DSML｜parameter>\n' + DSML_TAIL),
        ("hermes", hermes("[1]")),
        ("hermes", hermes('"city"')),
        ("hermes", hermes("city=Oslo")),
        ("kimi_k2", kimi("call_abc123")),
    ],
)
def test_what_cannot_be_read_is_content(name: str, text: str) -> None:
    declared = FAMILIES[name].declared
    assert read(declared, SPEC, [text]) == [Content(text)]
    assert read(declared, SPEC, list(text)) == [Content(text)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", coder("<parameter=city>\nOslo", "")),
        ("qwen3_coder", coder("<parameter=city>\nOslo\n</parameter>\n<parameter>\n3\n</parameter>")),
        ("hermes", hermes('{"city": "say "hi" to"}')),
        ("hermes", hermes('{"city": "a" "days": 3}')),
        ("hermes", '<tool_call>\n{"name": "get", "arguments": {"city": "Os'),
        ("hermes", '<tool_call>\n{"name": "get", "arguments": {"city":'),
        ("hermes", hermes('{"days": 1' + "0" * 5000 + "}")),
        ("pythonic", "[get(city='Oslo', 3)]"),
    ],
)
def test_what_breaks_behind_its_beginning_is_a_call_that_is_not_whole(name: str, text: str) -> None:
    declared = FAMILIES[name].declared
    events = read(declared, SPEC, [text])
    assert sum(isinstance(event, CallBegin) for event in events) == 1
    assert not any(isinstance(event, CallEnd) for event in events)
    assert read(declared, SPEC, list(text)) == events
    check_output(declared, SPEC, text, raw_arguments=False)


def test_a_string_that_is_not_closed_takes_no_later_call_with_it() -> None:
    broken = '<tool_call>\n{"name": "get", "arguments": {"city": "Oslo\n</tool_call>\n'
    whole = '<tool_call>\n{"name": "get_weather", "arguments": {"days": 1}}\n</tool_call>'
    declared = FAMILIES["hermes"].declared
    events = read(declared, SPEC, [broken + whole])
    assert read(declared, SPEC, list(broken + whole)) == events
    begun = [event.name for event in events if isinstance(event, CallBegin)]
    assert begun == ["get", "get_weather"]
    assert [event.call for event in events if isinstance(event, CallEnd)] == [1]
    text = hermes('{"city": "a\n</tool_call>\nb", "days": 3}')
    assert calls_of(read(declared, SPEC, [text])) == [("get", {"city": "a\n</tool_call>\nb", "days": 3})]


SLIPS = (
    ("</parameter>", ""), ("</parameter>", "</parameter/>"), ("</function>", ""), ("</tool_call>", ""),
    ("</arg_value>", ""), ("<arg_value>", ""), ("</｜DSML｜parameter>", ""), (' string="true"', ""),
    (' string="false"', ""), ("</｜DSML｜invoke>", ""), ('"', "'"), ("{", "{{"), ("}", ",}"), ("}", ""),
    ("]", ",]"), ("]", ""), (":0", ""), (":1", ""), ("functions.", "functions"), ("true", "True"),
    ("null", "None"), ("\\n", "\n"), ("\\", ""), (")", ""), ("[ARGS]", ""), ("\n", ""), (">", ""), ("=", ""),
)  # fmt: skip
"""(correct text, its erroneous form)."""


@mostly_slow("name", FAMILIES, [*FAMILIES][::3])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**63))
def test_an_output_with_slips_loses_nothing(name: str, seed: int) -> None:
    """Each character is given out once, whole calls have a JSON object, and pieces change nothing."""
    family = FAMILIES[name]
    source = random.Random(seed)
    maker = Maker(family, source)
    text = maker.output()
    for _ in range(source.randint(1, 3)):
        old, new = source.choice([slip for slip in SLIPS if slip[0] in text] or [("", "")])
        places = text.split(old) if old else [text]
        at = source.randint(1, max(len(places) - 1, 1))
        text = old.join(places[:at]) + new + old.join(places[at:])
    if source.random() < 0.3:
        text = text[: source.randint(0, len(text))]
    events = read(family.declared, SPEC, [text])
    assert read(family.declared, SPEC, maker.pieces(text)) == events, text
    check_output(family.declared, SPEC, text, raw_arguments=False)


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"gpt_oss", "pythonic"}))
def test_an_output_that_ends_early_keeps_the_calls_before(name: str) -> None:
    """If the last call is cut anywhere, the earlier calls stay complete and unchanged."""
    family = FAMILIES[name]
    for seed in range(6):
        parts = [Maker(family, random.Random(seed)).calls()]
        text = family.render(parts)
        whole = by_value(read(family.declared, SPEC, [text]))
        for end in range(0, len(text), 7):
            events = read(family.declared, SPEC, [text[:end]])
            ended = [event.call for event in events if isinstance(event, CallEnd)]
            values = dict(_values(whole))
            for call in ended[:-1]:
                assert dict(_values(by_value(_only(events, call))))[call] == values[call]


def _values(events: list[Any]) -> list[tuple[int, Any]]:
    return [event for event in events if isinstance(event, tuple)]


def _only(events: list[OutputEvent], call: int) -> list[OutputEvent]:
    return [event for event in events if isinstance(event, CallArguments) and event.call == call]
