"""Texts around an answer: markup at the start and the end of the content, content in other places."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.parsing.checks import check_output, read
from tests.text.parsing.families import SPEC, by_value
from weft.text.parsing.declaration import OutputFormat, combined
from weft.text.parsing.events import CallArguments, CallBegin, CallEnd, Content, OutputEvent, Reasoning
from weft.text.parsing.formats import CALLS, REASONING

FAMILIES = {
    "ernie45": ("ernie45", "ernie45", "<response>", "</response>"),
    "granite": ("granite", "granite", "<response>", "</response>"),
    "hunyuan_a13b": ("hunyuan_a13b", "hunyuan_a13b", "<answer>", "</answer>"),
}
SOLAR_CALL = (
    '<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>get<|tool_call:args|>{"days": 1}<|tool_call:end|>'
)
CALL = [
    CallBegin(call=0, name="get", id="a1"),
    CallArguments(call=0, text='{"days": 1}'),
    CallEnd(call=0),
]


def declared(reasoning: str, calls: str) -> OutputFormat:
    made = combined(REASONING[reasoning], CALLS[calls])
    assert made is not None
    return made


def events(made: OutputFormat, text: str) -> list[OutputEvent]:
    """Return the events of ``text``, after checking that every character has one use."""
    check_output(made, SPEC, text, raw_arguments=True)
    return read(made, SPEC, [text])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_texts_around_an_answer_are_markup(name: str) -> None:
    reasoning, calls, opens, closes = FAMILIES[name]
    made = declared(reasoning, calls)
    thought = "<think>\nHm.\n</think>\n\n"
    for text in (
        f"{thought}\n{opens}\nIt rains.\n{closes}\n",
        f"{thought}{opens}It rains.{closes}",
        f"{thought}It rains.",
        f"{thought}{opens}\nIt rains.",
    ):
        assert events(made, text) == [Reasoning("Hm."), Content("It rains.")], text
    assert events(made, f"{opens}\nIt rains.\n{closes}") == [Content("It rains.")]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_texts_inside_an_answer_are_content(name: str) -> None:
    reasoning, calls, opens, closes = FAMILIES[name]
    made = declared(reasoning, calls)
    for text in (f"Write {opens} here.", f"Write {closes}", f"a{opens}b{closes} c"):
        assert events(made, text) == [Content(text)], text
    inner = f"Say {closes} and {opens} go on."
    assert events(made, f"{opens}{inner}{closes}") == [Content(inner)]


def test_an_answer_before_calls() -> None:
    made = declared("ernie45", "hermes")
    call = '<tool_call>{"name": "get", "arguments": {"days": 1}}</tool_call>'
    found = by_value(events(made, f"<think>a</think>\n<response>\nSure.\n</response>\n{call}"))
    assert found[:2] == [Reasoning("a"), Content("Sure.")]
    assert found[2:] == by_value([CallBegin(call=0, name="get"), *CALL[1:]])


def test_granite_32_has_sentences_instead_of_tags() -> None:
    text = "Here is my thought process:\nHm.\nHere is my response:\nIt rains."
    assert events(declared("granite", "granite"), text) == [Reasoning("Hm."), Content("It rains.")]


def test_solar_messages() -> None:
    made = declared("solar_open", "solar_open")
    thought = "<|think|>Hm.<|end|><|begin|>assistant"
    answer = "<|content|>It rains.<|end|>"
    assert events(made, thought + answer) == [Reasoning("Hm."), Content("It rains.")]
    assert events(made, answer.removesuffix("<|end|>")) == [Content("It rains.")]
    assert events(made, f"{thought}{SOLAR_CALL}<|calls|>") == [Reasoning("Hm."), *CALL]
    both = f"{thought}{answer}<|begin|>assistant{SOLAR_CALL}<|calls|>"
    assert events(made, both) == [Reasoning("Hm."), Content("It rains."), *CALL]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**63))
def test_any_pieces_give_the_same_events(seed: int) -> None:
    source = random.Random(seed)
    reasoning, calls, opens, closes = FAMILIES[source.choice(sorted(FAMILIES))]
    made = declared(reasoning, calls)
    words = (opens, closes, "<think>", "</think>", "\n", " ", "It rains.", "a < b", opens[:4], closes[:5])
    text = "".join(source.choice(words) for _ in range(source.randint(1, 9)))
    found = events(made, text)
    assert read(made, SPEC, list(text)) == found, text
