"""From token ids to events: special tokens of markup reach the parser, and clients get only text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.text_folders import write_tokenizer
from tests.text.parsing.families import (
    FAMILIES,
    SPEC,
    TOOLS,
    Call,
    Calls,
    Family,
    ReasoningMarks,
    by_value,
    joined,
)
from weft.text.choice import Choice
from weft.text.model import TextModel
from weft.text.parsing.events import CallArguments, CallBegin, CallEnd, Content, OutputEvent
from weft.text.parsing.parser import OutputSpec
from weft.types.messages import TokenEvent
from weft.types.sampling import SamplingParams

PARTS = [
    ReasoningMarks("Let me see 你好."),
    "Looking it up.",
    Calls((Call("get_weather", {"city": "Zürich 😀", "days": 2}), Call("get", {}))),
]
OFF = OutputSpec()


def model(folder: Path, family: Family, special: bool) -> TextModel:
    """Return a model whose tokenizer has the family's marks as tokens, hidden (``special``) or shown in
    text.
    """
    marks = sorted(
        mark for mark in family.declared.marks() if mark[0] in "<[" and mark[-1] in ">]" and mark[1:]
    )
    folder.mkdir(exist_ok=True)
    if special:
        write_tokenizer(folder, special=marks)
    else:
        write_tokenizer(folder, added=marks)
    return TextModel.load(folder, None, family.calls, family.reasoning)


def events_of(
    text: TextModel, ids: list[int], spec: OutputSpec, size: int = 1, stop_id: int | None = None
) -> Iterator[OutputEvent]:
    """Return the events of a client's choice when the engine generates ``ids``."""
    choice = Choice(text.tokenizer, SamplingParams(), sequence=1, visible=text.output.visible_for(spec))
    parser = text.output.parser(spec)
    for start in range(0, len(ids), size):
        last = start + size >= len(ids)
        delta = choice.on_event(
            TokenEvent(
                sequence=1,
                token_ids=tuple(ids[start : start + size]),
                finish="stop" if last else None,
                stop_id=stop_id if last else None,
            )
        )
        if delta is not None:
            yield from parser.feed(delta.text)
            if delta.finish_reason is not None:
                yield from parser.close()


@pytest.mark.requirement("G4")
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_become_events(tmp_path: Path, name: str, special: bool) -> None:
    family = FAMILIES[name]
    text = model(tmp_path, family, special)
    written = family.render(PARTS)
    ids = text.tokenizer.encode(written, parse_special=True)
    assert bool(text.output.visible) is special
    for size in (1, 4, len(ids)):
        events = joined(list(events_of(text, ids, SPEC, size)))
        assert by_value(events) == by_value(family.expected(PARTS))


def test_markup_is_hidden_where_nothing_is_parsed(tmp_path: Path) -> None:
    family = FAMILIES["hermes"]
    text = model(tmp_path, family, True)
    ids = text.tokenizer.encode("<think>a</think>b<tool_call>{}</tool_call>", parse_special=True)
    assert joined(list(events_of(text, ids, OFF))) == [Content("ab{}")]
    assert (
        "".join(event.text for event in events_of(text, ids, SPEC) if isinstance(event, Content))
        == "b<tool_call>{}</tool_call>"
    ), "what is no call is text, its tags too"


def test_an_end_of_turn_gives_no_text_and_ends_a_call(tmp_path: Path) -> None:
    """GPT-OSS ends a call with a token that also ends the turn."""
    text = model(tmp_path, FAMILIES["gpt_oss"], True)
    written = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"days": 1}<|call|>'
    ids = text.tokenizer.encode(written, parse_special=True)
    end = text.tokenizer.special["<|call|>"]
    assert ids[-1] == end
    assert joined(list(events_of(text, ids, SPEC, 1, end))) == [
        CallBegin(call=0, name="get"),
        CallArguments(call=0, text='{"days": 1}'),
        CallEnd(call=0),
    ]


def test_other_special_tokens_stay_hidden(tmp_path: Path) -> None:
    text = model(tmp_path, FAMILIES["hermes"], True)
    assert text.tokenizer.special["<|im_start|>"] not in text.output.visible
    ids = [text.tokenizer.special["<|im_start|>"], *text.tokenizer.encode("hi")]
    assert joined(list(events_of(text, ids, SPEC))) == [Content("hi")]
    assert TOOLS
