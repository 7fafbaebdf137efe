"""``response_template`` of transformers as a declaration: correct outputs give the result of transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.text.parsing.checks import check_output, read
from tests.text.parsing.families import FAMILIES, SPEC, TOOLS, Call, Calls, Part, ReasoningMarks
from weft.text.parsing.events import CallArguments, CallBegin, Content, OutputEvent, Reasoning
from weft.text.parsing.response_template import read_response_template

THINKING = {"open": "<think>", "close": "</think>", "content": "text"}
FUNCTION = {"type": "function", "function": "{content}"}
TEMPLATES: dict[str, dict[str, Any]] = {
    "hermes": {
        "open": "<tool_call>",
        "close": "</tool_call>",
        "repeats": True,
        "content": "json",
        "transform": FUNCTION,
    },
    "qwen3_coder": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>]+)>\s*",
        "close_pattern": r"</function>\s*</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>"},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
    "mistral": {
        "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.\-]+)\[ARGS\]",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
    "mistral_list": {
        "open": "[TOOL_CALLS]",
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        "transform_each": True,
    },
    "deepseek_v31": {
        "open_pattern": r"<｜tool▁call▁begin｜>(?P<name>[\w.-]+)<｜tool▁sep｜>",
        "close": "<｜tool▁call▁end｜>",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
}
ONE = Calls((Call("get_weather", {"city": "Zürich", "days": 2, "exact": True}),))
OUTPUTS: list[list[Part]] = [
    [ONE],
    [ReasoningMarks("Let me see."), ONE],
    [ReasoningMarks("Let me see."), "Here it is.", ONE],
    [ReasoningMarks("Nothing to call."), "Hello."],
]


def template(name: str) -> dict[str, Any]:
    thinking = THINKING
    if name.startswith("mistral"):
        thinking = {**THINKING, "open": "[THINK]", "close": "[/THINK]"}
    return {
        "start_anchor": "<|im_start|>assistant\n",
        "defaults": {"role": "assistant"},
        "fields": {"thinking": thinking, "tool_calls": TEMPLATES[name], "content": {"content": "text"}},
    }


def as_message(events: list[OutputEvent]) -> dict[str, Any]:
    """Events as transformers' message."""
    message: dict[str, Any] = {"role": "assistant"}
    for event in events:
        if isinstance(event, Content):
            message["content"] = message.get("content", "") + event.text
        elif isinstance(event, Reasoning):
            message["thinking"] = event.text
        elif isinstance(event, CallBegin):
            message.setdefault("tool_calls", []).append(
                {"type": "function", "function": {"name": event.name}}
            )
        elif isinstance(event, CallArguments):
            message["tool_calls"][event.call]["function"]["arguments"] = json.loads(event.text)
    return message


@pytest.mark.requirement("G1")
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("output", range(len(OUTPUTS)))
def test_reads_what_transformers_reads(name: str, output: int) -> None:
    parsing = pytest.importorskip("transformers.utils.chat_parsing")
    declared = read_response_template(template(name))
    assert declared is not None
    text = FAMILIES[name].render(OUTPUTS[output])
    if name == "deepseek_v31":  # the section around the calls is not in the template
        text = text.replace("<｜tool▁calls▁begin｜>", "").replace("<｜tool▁calls▁end｜>", "")
    tools = [
        {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}} for tool in TOOLS
    ]
    theirs = parsing.parse_response(text, template(name), prefix="", tools=tools)
    events = read(declared, SPEC, [text])
    assert as_message(events) == theirs
    assert read(declared, SPEC, list(text)) == events
    check_output(declared, SPEC, text[:-5] + "<think>" + text[5:], raw_arguments=False)


def test_a_reasoning_that_nothing_opens() -> None:
    declared = read_response_template(
        {"start_anchor": "x", "fields": {"thinking": {"close": "</think>"}, "content": {"open": "</think>"}}}
    )
    assert declared is None, "content with a mark of its own is more than a declaration says"
    declared = read_response_template({"start_anchor": "x", "fields": {"thinking": {"close": "</think>"}}})
    assert declared is not None
    assert declared.reasoning[0].implied


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {},
        {"fields": []},
        {"fields": {}},
        {"version": 2, "fields": {"thinking": THINKING}},
        {"fields": {"thinking": 3}},
        {"fields": {"thinking": {**THINKING, "close": ["a", "b"]}}},
        {"fields": {"thinking": {**THINKING, "open": [1]}}},
        {"fields": {"tool_calls": {"content": "json"}}},
        {"fields": {"tool_calls": {"open": "<a>", "content": "kv-lines"}}},
        {
            "fields": {
                "tool_calls": {"open": "<a>", "content": "json", "content_args": {"unquoted_keys": True}}
            }
        },
        {"fields": {"tool_calls": {"open_pattern": "(a|b)(?P<name>x+)", "content": "json"}}},
        {"fields": {"tool_calls": {"open_pattern": "a+(?P<name>x+)", "content": "json"}}},
        {"fields": {"tool_calls": {"open": "<think>", "content": "json"}, "thinking": THINKING}},
    ],
)
def test_what_says_more_is_no_declaration(wrong: Any) -> None:
    assert read_response_template(wrong) is None
